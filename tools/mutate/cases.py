"""The cases that every mutant of a family is judged by: the harness's own, drawn once, with the oracle's results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace import definitions
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.case import CaseResult, SharedCase, shared_case
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.harness.twins import has_real_size, real_cases
from flashinfer_trace.harness.verify import Job, prepare, verify
from flashinfer_trace.verdict.compare import Expected

#: Real cases of the small twin and their seed: what ``flashinfer-trace verify`` draws by default.
EXAMPLES = 20
SEED = 0

#: A case is of the small twin, or of the Definition's own sizes.
SIZES = ("twin", "real")

#: Further cases of the small twin, by another seed, on which a mutant that is called equivalent must agree as well.
MORE_EXAMPLES = 40
MORE_SEED = 1


@dataclass(frozen=True)
class Case:
    """One case with what the oracle expects, and what the unchanged reference answers.

    `size` is one of `SIZES`: which of the bench's Definitions it belongs to.
    """

    size: str
    seed: int
    axes: Mapping[str, int]
    inputs: Mapping[str, Any]
    expected: Mapping[str, Expected]
    original: Mapping[str, torch.Tensor]

    @property
    def elements(self) -> int:
        return sum(value.numel() for value in self.inputs.values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Bench:
    """A family's representative Definition and its cases, the cheap ones first."""

    definition: Definition
    family: Family
    cases: tuple[Case, ...]

    def sized(self, reference: str, size: str) -> Definition:
        """The Definition with another reference, at the sizes that a case is for."""
        return at_size(with_reference(self.definition, reference), self.family, size)


def with_reference(definition: Definition, reference: str) -> Definition:
    return Definition.from_dict({**definition.to_dict(), "reference": reference}, definition.path)


def at_size(definition: Definition, family: Family, size: str) -> Definition:
    return prepare(definition, family, "cpu", full=size == "real")


def known_families() -> dict[str, Family]:
    """Every family that has a Definition, by name."""
    return {family.name: family for family in all_families()}


@functools.cache
def _members() -> Mapping[str, list[Definition]]:
    """The Definitions of each family, by its name."""
    found: dict[str, list[Definition]] = {}
    for definition in definitions():
        found.setdefault(family_of(definition).name, []).append(definition)
    return found


def representative(family: Family) -> Definition:
    """The largest Definition that has a case at its own sizes; where none does, the smallest."""
    own = _members().get(family.name, [])
    sizes = {definition.name: (input_bytes(definition), definition.name) for definition in own}
    affordable = [definition for definition in own if has_real_size(definition)]
    if affordable:
        return max(affordable, key=lambda definition: sizes[definition.name])
    return min(own, key=lambda definition: sizes[definition.name])


def bench_of(family: Family, definition: Definition, more: bool = False) -> Bench:
    """Draws the cases as `verify` does, the cheap ones first."""
    if more:
        cases = drawn(family, definition, MORE_EXAMPLES, MORE_SEED)
    else:
        cases = drawn(family, definition, EXAMPLES, SEED)
        if has_real_size(definition):
            cases += real(family, definition)
    cases.sort(key=lambda case: (SIZES.index(case.size), case.elements))
    return Bench(definition, family, tuple(cases))


def drawn(family: Family, definition: Definition, examples: int, seed: int) -> list[Case]:
    """The cases of the small twin that `verify` runs: corners, which are the same for every seed, then drawn ones."""
    cases: list[Case] = []

    def keep(shared: SharedCase, result: CaseResult) -> None:
        cases.append(Case("twin", shared.seed, shared.axes, shared.inputs, shared.expected, shared.actual))

    report = verify(Job(definition, family), examples=examples, seed=seed, on_case=keep)
    if report.status != "passed":
        raise ValueError(f"{definition.name}: the reference itself does not pass: {report.message}")
    return cases[report.corners :] if seed == MORE_SEED else cases


def real(family: Family, definition: Definition) -> list[Case]:
    """Those at the Definition's own sizes that `verify` runs."""
    job = Job(definition, family, full=True)
    cases = []
    for plan, seed in real_cases(job, SEED, corners=True):
        case = shared_case(job.sized, family, plan, seed, "cpu")
        if case.failures:
            raise ValueError(f"{definition.name}: the reference itself does not pass: {case.failures[0]}")
        cases.append(Case("real", seed, case.axes, case.inputs, case.expected, case.actual))
    return cases
