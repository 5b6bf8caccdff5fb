"""The one loop over cases, of verifications and judgments: the corners of a family, then drawn plans."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import hypothesis
import numpy.random  # noqa: F401  # or hypothesis does, once a submission can have written to its files
from hypothesis import strategies as st
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.report import PlansRun

#: Rounds of further draws when repeated and vacuous cases left too few real ones: hypothesis draws seven of ten again.
ROUNDS = 24
#: Cases of one hypothesis example: what hypothesis does for each example takes longer than many a case.
BATCH = 8
#: Examples of the rounds of a verification. Their number depends on nothing else: any machine can draw the cases again
#: without running one, and a run of more cases begins with those of a run of fewer.
EXAMPLES = (4, 4, 8, 16, 32, 64)
#: How many drawn cases of a judgment are followed by one with the same plan and other elements. This catches
#: results that are cached by address or shape, or left from the call before.
REPEATED = 4

#: Draws depend on the seed alone in all threads: while one draws, hypothesis is patched.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Case:
    """One case to be run.

    Attributes:
        plan, seed: give its inputs.
        kind: ``corner``, ``drawn`` or ``repeated``.
        call_seed: in a judgment, of torch's generators in the submission's process.
        drawn_in: in a verification, the examples and the seed of the round that drew it.
    """

    plan: Plan
    seed: int
    kind: str
    call_seed: int = 0
    drawn_in: tuple[int, int] = (0, 0)


def cases(
    job: Job, seed: int, missing: Callable[[], int], fresh: random.Random | None = None, further: Sequence[Plan] = ()
) -> Iterator[Case]:
    """Corners, then drawn cases until enough of them count, for at most `ROUNDS` rounds. All follow from the seed.

    Args:
        job: what plans are for.
        seed: of what hypothesis draws.
        missing: how many more cases must count. It is asked from the end of the corners on.
        fresh: seeds of elements, and some cases are repeated with others: no kernel can know them. Without it, the
            seed of a corner is its number, and hypothesis draws the others, which it can shrink then.
        further: plans that are run as corners as well.
    """
    for number, plan in enumerate([*job.corners, *further]):
        yield Case(plan, number, "corner") if fresh is None else _fresh(plan, "corner", fresh)
    every = max(1, missing() // REPEATED)
    for number in range(ROUNDS):
        if missing() <= 0:
            return
        round_seed = seed + 1_000_003 * number
        if fresh is None:
            drawn_in = EXAMPLES[min(number, len(EXAMPLES) - 1)], round_seed
            batches: list[list[tuple[Plan, int]]] = []
            _draw(_batches(job), *drawn_in, batches.append)
            found = [Case(plan, one, "drawn", 0, drawn_in) for batch in batches for plan, one in batch]
        else:
            plans: list[Plan] = []
            _draw(job.plans, missing() + 3, round_seed, plans.append)  # the simplest plan is first, and often empty
            found = [_fresh(plan, kind, fresh) for plan, kind in _with_repeated(plans, every)]
        for case in found:
            if case.kind == "drawn" and missing() <= 0:
                return
            yield case


def drawn_again(job: Job, seed: int, ran: PlansRun) -> PlansRun:
    """The cases that a verification of this job runs, as many as it ran before. None is run, and no GPU is needed.

    Args:
        job: of one kernel, on the device that it ran on.
        seed: of that verification.
        ran: what it ran, and which cases proved nothing.
    """
    jobs, found, known, most = [job], PlansRun(), set[str](), 0

    def missing() -> int:
        return most - found.counts[-1]

    if len(ran.counts) > 1 and job.kernel is not None:  # it shared the cases of kernels that take less
        jobs.insert(0, replace(job, kernel=replace(job.kernel, plan_options=job.kernel.common)))
    for each, most in zip(jobs, ran.counts, strict=False):  # noqa: B007  # read by missing()
        found.counts.append(0)
        for case in cases(each, seed, missing):
            key = repr((sorted(case.plan.items()), case.seed))
            if key not in known and missing() > 0:
                known.add(key)
                found.add(case.plan, case.seed, sum(found.counts) in ran.vacuous)
    return found


def shrink(job: Job, case: Case, run: Callable[[Plan, int], object]) -> None:
    """Looks for the smallest case that fails as a drawn one of a verification does.

    Args:
        run: raises an error for a case that fails. One that passed before must pass again.

    Raises:
        BaseException: what `run` raised for the smallest case.
        hypothesis.errors.FlakyFailure: the same case failed, then passed. If nothing is raised, `case` itself passed.
    """

    def run_all(batch: list[tuple[Plan, int]]) -> None:
        for plan, seed in batch:
            run(plan, seed)

    _draw(_batches(job), *case.drawn_in, run_all, hypothesis.Phase.shrink)


def _fresh(plan: Plan, kind: str, numbers: random.Random) -> Case:
    return Case(plan, numbers.getrandbits(31), kind, numbers.getrandbits(31))


def _with_repeated(plans: Sequence[Plan], every: int) -> Iterator[tuple[Plan, str]]:
    for place, plan in enumerate(plans):
        yield plan, "drawn"
        if place % every == every - 1:
            yield plan, "repeated"


def _batches(job: Job) -> st.SearchStrategy[list[tuple[Plan, int]]]:
    case = st.tuples(job.plans, st.integers(0, 2**31 - 1))
    return st.lists(case, min_size=BATCH, max_size=BATCH)


def _draw(
    strategy: st.SearchStrategy[Any], examples: int, seed: int, body: Callable[[Any], Any], *phases: hypothesis.Phase
) -> None:
    """Has hypothesis call `body` with its draws, which depend only on the arguments."""

    def test(value: Any) -> None:
        body(value)

    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, *phases],
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    given: Any = hypothesis.given(strategy)(test)
    # hypothesis mixes in constants of all modules that a program has imported.
    empty = LRUCache[Any, Any](1024)  # of the constants that a type may be
    with _LOCK, mock.patch.multiple(providers, _get_local_constants=Constants, CONSTANTS_CACHE=empty):
        hypothesis.seed(seed)(settings(given))()
