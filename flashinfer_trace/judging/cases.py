"""The cases of a judgement: the corners of a family, then plans that hypothesis draws, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import numpy.random  # noqa: F401  # or hypothesis does, once a submission can have written to its files
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.verify import ROUNDS, Job
from flashinfer_trace.judging.further import further_plans

__all__ = ["Case", "cases"]

#: Of the drawn cases, how many are followed by one with the same plan and other elements: a result that is remembered
#: by address or shape, or left from the call before, is wrong then.
REPEATED = 4


@dataclass(frozen=True)
class Case:
    """One case to be run.

    Attributes:
        plan, seed: give its inputs.
        call_seed: of torch's generators in the submission's process.
        kind: ``corner``, ``drawn`` or ``repeated``.
    """

    plan: Plan
    seed: int
    call_seed: int
    kind: str


def cases(job: Job, examples: int, seed: int) -> Iterator[Case]:
    """Corners with fresh elements, then drawn plans for as long as the caller asks, at most ROUNDS times as many.

    Unlike in a verification, no case has a seed that is known beforehand.
    """
    numbers = random.Random(seed)

    def case(plan: Plan, kind: str) -> Case:
        return Case(plan, numbers.getrandbits(31), numbers.getrandbits(31), kind)

    for plan in [*job.corners, *further_plans(job, numbers)]:
        yield case(plan, "corner")
    every = max(1, examples // REPEATED)
    for number in range(ROUNDS):
        # The first plan is hypothesis's simplest, which is often empty.
        for place, plan in enumerate(_drawn(job, examples + 3, seed + 1_000_003 * number)):
            yield case(plan, "drawn")
            if place % every == every - 1:
                yield case(plan, "repeated")


def _drawn(job: Job, count: int, seed: int) -> list[Plan]:
    """`count` plans."""
    plans: list[Plan] = []
    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )

    def collect(plan: Plan) -> None:
        plans.append(plan)

    test: Any = hypothesis.given(job.plans)(collect)
    # Draws follow from the seed alone: hypothesis mixes in constants of all modules that a program has imported.
    empty = LRUCache[Any, Any](1024)  # of the constants that a type may be
    with mock.patch.multiple(providers, _get_local_constants=Constants, CONSTANTS_CACHE=empty):
        hypothesis.seed(seed)(settings(test))()
    return plans
