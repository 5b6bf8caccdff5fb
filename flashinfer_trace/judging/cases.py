"""The cases of a judgement: the corners of a family, then plans that hypothesis draws, all from one seed."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import numpy.random  # noqa: F401  # or hypothesis does, once a submission can have written to its files

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.attention.cases import products_of_a_key
from flashinfer_trace.families.attention.paged import distinct_pages
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.many_rows import ROW_AXES, many_rows
from flashinfer_trace.harness.verify import ROUNDS, Job

__all__ = ["Case", "cases"]

#: Of the drawn cases, how many are followed by one with the same plan and other elements: a result that is remembered
#: by address or shape, or left from the call before, is wrong then.
REPEATED = 4
#: A few times as many keys have attention's long requests; how many slots they share.
KEYS, SHARED = 64, 2
#: Their queries, and fewer where products of these with the keys are more than take some tenths of a second.
QUERIES, FEWER, PRODUCTS = [1, 70, 17], [1, 17, 2], 2**28
#: Rows of further cases on a CPU, between those that are drawn, of 40 rows at most, and the corner of many rows: whole
#: tiles, and a number of rows that is drawn from more than DRAWN_ROWS.
TILES, DRAWN_ROWS = (64, 128), 40


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

    for plan in [*job.corners, *_long_requests(job), *_rows_between(job, numbers)]:
        yield case(plan, "corner")
    every = max(1, examples // REPEATED)
    for number in range(ROUNDS):
        # The first plan is hypothesis's simplest, which is often empty.
        for place, plan in enumerate(_drawn(job, examples + 3, seed + 1_000_003 * number)):
            yield case(plan, "drawn")
            if place % every == every - 1:
                yield case(plan, "repeated")


def _long_requests(job: Job) -> list[Plan]:
    """On a CPU, attention of three requests that are longer than those that are drawn there (up to 40 keys and 12
    queries), share their first slots, and have many queries; none if a corner of the family has requests that share
    pages, as those with pages of several tokens have."""
    corner = next((plan for plan in reversed(job.corners) if "kv_lens" in plan), None)
    if job.large or corner is None or any(plan.get("shared_prefix") for plan in job.corners):
        return []
    kv_lens, q_lens = [3 * KEYS + 5, 2 * KEYS + 1, 4 * KEYS], QUERIES
    if sum(map(operator.mul, q_lens, kv_lens)) * products_of_a_key(job.sized) > PRODUCTS:
        q_lens = FEWER
    cached = list(map(operator.sub, kv_lens, q_lens))
    plan = {**corner, "kv_lens": kv_lens, "logits": "normal"}
    plan |= {"q_lens": q_lens} if "q_lens" in plan else {}
    for entry, lengths in (("num_pages", kv_lens), ("num_slots", cached)):
        if entry in plan:
            plan |= {"shared_prefix": SHARED, entry: distinct_pages(lengths, 1, SHARED) + 1}
    return [plan]


def _rows_between(job: Job, numbers: random.Random) -> list[Plan]:
    """On a CPU, plans of numbers of rows that are neither drawn there nor those of a corner; none for a family without
    the corner of many rows."""
    found = []
    for axes in many_rows(replace(job.family, plan_for_axes=_axes), job.request):
        axis = next(axis for axis in ROW_AXES if axis in axes)
        low, _ = job.request.limits.get(axis, (0, axes[axis]))
        rows = [one for one in (*TILES, numbers.randint(DRAWN_ROWS + 1, axes[axis])) if low <= one]
        found += [job.family.plan_for_axes(job.sized, {axis: one}, Draws(0, "cpu")) for one in rows]
    return found


def _axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    """For a plan, the values of axes that it would be for."""
    return dict(axes)


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
    hypothesis.seed(seed)(settings(test))()
    return plans
