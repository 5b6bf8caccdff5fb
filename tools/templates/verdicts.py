"""Verdicts of the oracles here on the references of a record, as data: `tests/dumps/flashinfer-0.7.2.verdicts.json`."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import hashlib
import re
import symtable
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset.dumps import TIES, Dump, Match, aliases, differences, matches, normalized, siblings
from flashinfer_trace.families import families_of_op_type
from flashinfer_trace.format.naming import load_naming
from flashinfer_trace.harness.binding import Closure, judging_code
from flashinfer_trace.judging.dumped import ANOTHER, Classified, References, classify
from flashinfer_trace.judging.verdict import Failure
from flashinfer_trace.sandbox.worker import ReferenceWorker
from tools.templates.probes import probed
from tools.templates.record import Record

VERDICTS = Path("tests/dumps/flashinfer-0.7.2.verdicts.json")
#: Another epsilon than the templates': the families that have it.
EPSILON = "_eps1e5"
#: The modules that classify and judge dumps, and nothing else.
CLASSIFYING = ("dataset.dumps", "judging.dumped", "judging.grades", "judging.more_plans")


def judged(record: Record, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The verdicts, the same each time:

    - ``templates``: by template that a family here may compute, `Judge.template`.
    - ``probes``: what one call shows of templates without a family here.

    Args:
        record: the record.
        before: earlier verdicts. They are kept for templates for which all that decides is as it was.
    """
    kept = {one["made_by"]: one for one in (before or {}).get("templates", ())}
    with judge(record) as judging:
        return {
            "flashinfer": record.version,
            "templates": [kept.get(judging.made_by(name)) or judging.template(name) for name in judging.templates],
            "probes": judging.probes(),
        }


@contextlib.contextmanager
def judge(record: Record) -> Iterator[Judge]:
    """Yields a `Judge` of a record, with the sandbox that it needs."""
    torch.set_num_threads(1)
    with ReferenceWorker(waived=TIES) as worker:
        yield Judge(record, worker)


class Judge:
    """Judges the references of a record, template by template.

    Args:
        record: the record.
        worker: where the references run.
    """

    def __init__(self, record: Record, worker: ReferenceWorker) -> None:
        self._record, self._worker, self._references = record, worker, References(worker)
        self._dumps: dict[str, list[Dump]] = {}
        for dump in record.parsed():
            found = matches(dump, record.version)
            if found:
                self._dumps.setdefault(found[0].alias.template, []).append(dump)

    @property
    def templates(self) -> list[str]:
        """The templates that a family here may compute."""
        return sorted(self._dumps)

    def probes(self) -> list[str]:
        """See `probes.probed`."""
        return probed(self._record, self._worker)

    def template(self, name: str) -> dict[str, Any]:
        """The verdict on a template:

        - ``made_by``: the digest of all that decides it (`made_by`).
        - ``dumps``: the class of each dump, and the Definition here.
        - ``reference``, if it has one that an oracle here can judge: what is wrong with it (nothing, if it is right)
          and the smallest input that shows it; what only its form makes another function; on which inputs a wrong
          one is right. Helpers that its dumps lack are put before it.
        - ``silent``: arguments that dumps do not tell; ``other_epsilon`` is what the reference is at another one.
        """
        found = [classify(dump, self._record.version, self._references) for dump in self._dumps[name]]
        rows: list[dict[str, Any]] = []
        for one in found:
            assert one.match is not None
            rows.append({"name": one.dump.name, "class": one.kind, "definition": one.match.definition.name})
        silent = aliases(self._record.version)[name].silent
        told: dict[str, Any] = {"template": name, "made_by": self.made_by(name), "dumps": rows}
        chosen = _representative(found)
        if chosen is not None:
            whole = self._with_helpers(name, chosen)
            # One with other inputs is wrong without being run.
            if whole.verdict is not None or any(line.startswith("input ") for line in whole.reasons):
                told["reference"] = _row(whole)
            if other := self._at_another_epsilon(name, whole.dump):
                told["other_epsilon"] = other
        return {**told, "silent": list(silent)} if silent else told

    def made_by(self, name: str) -> str:
        """The digest of all that decides the verdict on a template: its dumps, its names here, the families with their
        Definitions, kernels, oracles and bounds, and the code that classifies and judges."""
        alias = aliases(self._record.version)[name]
        parts: list[object] = [[dump.definition.to_dict() for dump in self._dumps[name]], alias, _judging_code()]
        parts.append(self._record.helpers.get(name, ""))
        for each in alias.families:
            parts += [_family_code(each), siblings(each)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _with_helpers(self, name: str, dump: Dump) -> Classified:
        """The class of a dump, with the helpers that its reference lacks put before it."""
        helpers = self._record.helpers.get(name, "")
        if helpers and missing_names(dump.definition.reference):
            head, imports, rest = dump.definition.reference.partition("import torch.nn.functional as F\n")
            reference = f"{head}{imports}\n\n{helpers}\n\n{rest}" if imports else f"{helpers}\n\n{head}"
            dump = dataclasses.replace(dump, definition=dataclasses.replace(dump.definition, reference=reference))
        return classify(dump, self._record.version, self._references)

    def _at_another_epsilon(self, name: str, dump: Dump) -> str:
        """The verdict on a reference at another epsilon; empty if no family here has one."""
        naming = load_naming()
        alias = aliases(self._record.version)[name]
        others = [family for family in alias.families if family.endswith(EPSILON) and family in naming.families]
        if not others:
            return ""
        match = next(one for one in matches(dump, self._record.version) if one.family in others)
        failure = self._references.judge(normalized(dump, match)).failure
        return f"eps = 1e-5: {_told(failure) if failure else 'right'}"


@functools.cache
def _judging_code() -> list[tuple[str, str]]:
    """The code that classifies and judges dumps; what decides for all kernels is in `judging_code` of a family."""
    parts = Closure(classify, References).parts.items()
    return sorted(part for part in parts if part[0].partition(":")[0].endswith(CLASSIFYING))


@functools.cache
def _family_code(name: str) -> str:
    """The digest of what a family's verdicts depend on."""
    family = families_of_op_type(load_naming().families[name].op_type)[name]
    kernels = [sorted(judging_code(family, kernel).items()) for kernel in family.kernels]
    return repr([Closure(family, family.plan).sha256, kernels, sorted(family.twin.items())])


def _representative(found: Sequence[Classified]) -> Dump | None:
    """The first dump with a reference and the dtypes of a family here; or the first with a reference, if any."""
    having = [one for one in found if one.dump.definition.reference]
    fit = [one for one in having if one.match and not _other_tensors(one.dump, one.match)]
    return next((one.dump for one in [*fit, *having]), None)


def _other_tensors(dump: Dump, match: Match) -> bool:
    return any(line.startswith(("input ", "output ")) for line in differences(dump, match))


def missing_names(source: str) -> list[str]:
    """Names that a source reads and neither defines nor imports, sorted: running it raises NameError."""
    if not source:
        return []
    top = symtable.symtable(source, "source", "exec")
    own = [one for one in top.get_symbols() if one.is_assigned() or one.is_imported() or one.is_namespace()]
    missing, queue = set[str](), [top]
    while queue:
        scope = queue.pop()
        queue += scope.get_children()
        read = [one for one in scope.get_symbols() if one.is_referenced() and (scope is top or one.is_global())]
        missing |= {one.get_name() for one in read}
    return sorted(missing - {one.get_name() for one in own} - set(dir(builtins)))


def _row(one: Classified) -> dict[str, Any]:
    assert one.match is not None
    failure = one.verdict.failure if one.verdict else None
    form = one.match.alias.form
    what = [line for line in one.reasons[: len(one.reasons) - (failure is not None)] if line not in form]
    right_on = one.verdict.right_on if one.verdict else ""
    return {
        "definition": one.match.definition.name,
        "kernel": one.match.alias.kernel,
        "wrong": [*what, *([_told(failure)] if failure else [])] if one.kind == ANOTHER else [],
        **({"form": list(form)} if form else {}),
        **({"right_on": right_on.partition(":")[0]} if right_on else {}),
        "axes": failure.axes if failure else {},
    }


def _told(failure: Failure) -> str:
    """A failure in few digits."""
    if failure.kind == "refused":  # each problem by its place; the first says enough
        return f"the sandbox refuses it: {re.sub(r'^[^ ]+:[0-9]+: | [(].*', '', failure.message)}"
    if failure.kind != "values" or not failure.index:
        return failure.message.partition("\n")[0]
    place = f"{failure.output}[{', '.join(map(str, failure.index))}]"
    got, wanted = failure.got + 0.0, failure.wanted + 0.0  # no negative zero
    return f"{place} is {got:.6g}, right is {wanted:.6g}: {failure.ratio:.3g} x the bound"
