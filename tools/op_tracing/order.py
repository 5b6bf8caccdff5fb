"""The order of the calls that one function makes, merged from several configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tools.kernel_tracing.report.evaluation import Place

#: A configuration and a phase.
Step = tuple[str, str]


class Moment(NamedTuple):
    """When a function makes a call, among the calls of the same run of this function; what is smaller comes first.

    Time alone does not tell: of a function that runs in a loop over layers, each call is known by its first time.

    Attributes:
        place: where the call ends in the function's text.
        order: for calls of one place, such as a loop over operations, the number of kernels launched so far.
        plain: a module without kernels has the number of the kernel before it.
    """

    place: Place
    order: int
    plain: bool


def in_order(calls: Sequence[Mapping[Step, Moment]]) -> list[int]:
    """The indexes of calls, so that those of each step are in its order.

    Steps that contradict each other leave no such order; then the place in the text decides.

    Args:
        calls: for each call, the steps that make it, and when each makes it first.
    """
    before = _before(calls)
    pending = sorted(range(len(calls)), key=lambda index: min(moment.place for moment in calls[index].values()))
    found: list[int] = []
    while pending:
        ready = next((index for index in pending if before[index].isdisjoint(pending)), pending[0])
        pending.remove(ready)
        found.append(ready)
    return found


def _before(calls: Sequence[Mapping[Step, Moment]]) -> Mapping[int, set[int]]:
    """For each call, those that come right before it in a step."""
    steps: dict[Step, list[tuple[Moment, int]]] = defaultdict(list)
    for index, moments in enumerate(calls):
        for step, moment in moments.items():
            steps[step].append((moment, index))
    before: dict[int, set[int]] = defaultdict(set)
    for made in steps.values():
        for (_, earlier), (_, later) in pairwise(sorted(made)):
            before[later].add(earlier)
    return before
