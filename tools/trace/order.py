"""The order of the calls that one function makes, merged from several runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

#: A run and a phase.
Step = tuple[str, str]


class Moment(NamedTuple):
    """When a function makes a call first in a step.

    Attributes:
        order: grows with time.
        line: of the call.
        layer: the decoder layer; None outside of the layers, or if it is not known.
    """

    order: int
    line: int
    layer: int | None


def in_order(calls: Sequence[Mapping[Step, Moment]]) -> list[int]:
    """The indexes of calls, with those of each step in its order.

    Steps that contradict each other leave no such order; then the line in the text decides.

    Args:
        calls: for each call, the steps that make it, and when each makes it first.
    """
    before = _before(calls)
    pending = sorted(range(len(calls)), key=lambda index: min(moment.line for moment in calls[index].values()))
    found: list[int] = []
    while pending:
        ready = next((index for index in pending if before[index].isdisjoint(pending)), pending[0])
        pending.remove(ready)
        found.append(ready)
    return found


def _before(calls: Sequence[Mapping[Step, Moment]]) -> Mapping[int, set[int]]:
    """For each call, the one that comes right before it in each step."""
    steps: dict[Step, list[tuple[Moment, int]]] = defaultdict(list)
    for index, moments in enumerate(calls):
        for step, moment in moments.items():
            steps[step].append((moment, index))
    before: dict[int, set[int]] = defaultdict(set)
    for made in steps.values():
        for earlier, later in pairwise(_sequence(made)):
            before[later].add(earlier)
    return before


def _sequence(made: Sequence[tuple[Moment, int]]) -> list[int]:
    """The calls of one step.

    Calls of the first layer are in the order of time. A call that a later layer is the first to make has its place
    among them by its line: time alone would put it last.
    """
    ordered = sorted(made)
    first = ordered[0][0].layer
    placed = [one for one in ordered if one[0].layer == first]
    for one in (one for one in ordered if one[0].layer != first):
        at = next((at for at, (moment, _) in enumerate(placed) if moment.line > one[0].line), len(placed))
        placed.insert(at, one)
    return [index for _, index in placed]
