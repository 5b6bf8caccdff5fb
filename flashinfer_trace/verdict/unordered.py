"""Comparison policies for outputs that are right in several ways: rows in any order, and choices among ties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.verdict.compare import Comparison, Elementwise, Expected, wrong_shape
from flashinfer_trace.verdict.wrong_outputs import ANY_OUTPUT, Mutant

#: The group of rows of which an operation says nothing: slots behind the last one that it fills.
UNSPECIFIED = -1


def failure(wrong: torch.Tensor, detail: str) -> Comparison:
    """An infinite ratio that names the first place where the boolean tensor `wrong` is true."""
    index = tuple(int(number) for number in wrong.nonzero()[0])
    return Comparison(math.inf, math.inf, detail=f"{detail}; first at {list(index)}")


@dataclass(frozen=True)
class Multiset(Elementwise):
    """The rows of each group are equal up to their order, bit for bit apart from the sign of zero.

    For operations that leave an order open, such as a sort by expert that counts with atomics: the rows of one expert
    form a group. `Family.relations` checks how such an order affects other outputs.

    `Expected.value` holds rows, [rows] or [rows, ...]; its part ``group``, int64 [rows], the group of each row. Groups
    need not be contiguous. Rows of the group UNSPECIFIED are not compared, which only the policy of a kernel may use.
    """

    reason: str

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        value, group = expected.value, expected.parts["group"]
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        specified = group != UNSPECIFIED
        count = int(specified.sum())
        if not count:
            return Comparison(0.0)
        both = torch.cat([each.double()[specified].reshape(count, -1) for each in (value, actual)])
        if both.isnan().any():
            rows = both[count:].isnan().any(dim=1)
            return failure(rows, f"{int(rows.sum())} rows have a NaN")
        if both.shape[1] == 1:  # numbers are sorted faster than rows
            kinds, kind = torch.unique(both.flatten(), return_inverse=True)
        else:
            kinds, kind = torch.unique(both, dim=0, return_inverse=True)
        wanted, got = (group[specified] * len(kinds) + each for each in (kind[:count], kind[count:]))
        wrong = wanted.sort().values != got.sort().values
        if not wrong.any():
            return Comparison(0.0)
        groups = torch.unique((wanted.sort().values[wrong]) // len(kinds))
        detail = f"the rows of {len(groups)} groups are not those expected, the first is group {int(groups[0])}"
        return Comparison(math.inf, math.inf, detail=detail)

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        group = expected.parts["group"]

        def among_specified(mutate: Mutate) -> Mutate:
            """The mutation, where it changes the multiset of all specified rows."""

            def changed(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
                mutated = mutate(output, other)
                if mutated is None:
                    return None
                rows = [
                    each.double()[group != UNSPECIFIED].nan_to_num(math.inf).flatten() for each in (output, mutated)
                ]
                return None if torch.equal(rows[0].sort().values, rows[1].sort().values) else mutated

            return changed

        always = (Mutant(each.name, among_specified(each.mutate), each.floating_only) for each in ANY_OUTPUT)
        return (
            *always,
            Mutant("two groups exchange a row", lambda output, _: exchanged_rows(output, group)),
            Mutant("one row written twice", among_specified(lambda output, _: repeated_row(output, group))),
        )


Mutate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


def exchanged_rows(output: torch.Tensor, group: torch.Tensor) -> torch.Tensor | None:
    """A row of the first group and a different one of another group change places; None without two such rows."""
    rows = output.reshape(len(output), -1)
    specified = (group != UNSPECIFIED).nonzero().flatten()
    if not len(specified):
        return None
    first = specified[0]
    others = ((group != UNSPECIFIED) & (group != group[first]) & (rows != rows[first]).any(dim=1)).nonzero().flatten()
    if not len(others):
        return None
    mutated = output.clone()
    mutated[first], mutated[others[0]] = output[others[0]], output[first]
    return mutated


def repeated_row(output: torch.Tensor, group: torch.Tensor) -> torch.Tensor | None:
    """The first row takes the place of a different one of its group; None if there is none."""
    rows = output.reshape(len(output), -1)
    for first in (group != UNSPECIFIED).nonzero().flatten().tolist():
        others = ((group == group[first]) & (rows != rows[first]).any(dim=1)).nonzero().flatten()
        if len(others):
            mutated = output.clone()
            mutated[others[0]] = output[first]
            return mutated
    return None


@dataclass(frozen=True)
class TopK(Elementwise):
    """Indices of the k largest scores of each row, where ties, and scores too close to tell, may go either way.

    Indices are distinct and valid. They contain every candidate whose score exceeds the k-th largest by more than the
    window, and none whose score is below it by more. A row with fewer than k candidates lists them all and has
    `padding` in its other places.

    `Expected.value` holds one right choice, integers [rows, k]; its parts ``scores``, float64 [rows, candidates], -inf
    for others than candidates, and, unless it is 0, ``window``, broadcastable to [rows, 1]: twice the error that a
    kernel may make in one score.

    Attributes:
        reason: one line for reports.
        ordered: whether scores must descend along a row, up to the window, with padding last.
        padding: the index in places without a candidate.
    """

    reason: str
    ordered: bool = False
    padding: int = -1

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        value, scores = expected.value, expected.parts["scores"]
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        if not value.numel():
            return Comparison(0.0)
        index = actual.long()
        within = (index >= 0) & (index < scores.shape[1])
        empty = (index == self.padding) & ~within
        if not (within | empty).all():
            return failure(~(within | empty), "an index is that of no candidate")
        safe = torch.where(within, index, 0)
        chosen = torch.zeros_like(scores, dtype=torch.int64).scatter_add_(1, safe, within.long())
        if (chosen > 1).any():
            return failure(chosen > 1, "a candidate is listed twice; row and candidate")
        needed, threshold, window = self._limits(expected)
        short = chosen.sum(dim=1, keepdim=True) != needed
        if short.any():
            return failure(short, "a row does not list as many candidates as it has to")
        of_chosen = torch.where(within, scores.gather(1, safe), math.inf)
        low = within & ((of_chosen < threshold - window) | (of_chosen == -math.inf))
        if low.any():
            return failure(low, "a listed candidate is not among the k largest")
        missing = (scores > threshold + window) & (chosen == 0)
        if missing.any():
            return failure(missing, "one of the k largest is not listed; row and candidate")
        return self._in_order(torch.where(within, of_chosen, -math.inf), window)

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        if not expected.value.numel():
            return ()
        _, threshold, window = self._limits(expected)
        scores = expected.parts["scores"]
        certain = scores > threshold + window

        def elsewhere(mutate: Mutate) -> Mutate:
            """The mutation, where a row loses a candidate that is certainly among its k largest."""

            def changed(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
                mutated = mutate(output, other)
                if mutated is None:
                    return None
                places = mutated.long().clamp(0, scores.shape[1] - 1)
                return mutated if (certain & ~torch.zeros_like(certain).scatter(1, places, True)).any() else None

            return changed

        def replaced(output: torch.Tensor, choice: torch.Tensor, valid: torch.Tensor) -> torch.Tensor | None:
            """Puts `choice` [rows] into the first place of the first valid row."""
            rows = (valid & (choice != output[:, 0])).nonzero().flatten()
            if not len(rows):
                return None
            mutated = output.clone()
            mutated[rows[0], 0] = choice[rows[0]].to(output.dtype)
            return mutated

        worst = torch.where(scores == -math.inf, math.inf, scores).argmin(dim=1)
        below = (scores.gather(1, worst.unsqueeze(1)) < threshold - window).squeeze(1)
        found = [Mutant(each.name, elsewhere(each.mutate), each.floating_only) for each in ANY_OUTPUT]
        found.append(Mutant("every row in the place of the next", elsewhere(lambda output, _: output.roll(1, dims=0))))
        found.append(Mutant("the smallest for one of the largest", lambda output, _: replaced(output, worst, below)))
        if expected.value.shape[1] > 1:
            several = expected.value[:, 1] != self.padding
            found.append(Mutant("one listed twice", lambda output, _: replaced(output, output[:, 1], several)))
        if self.ordered:
            found.append(Mutant("in ascending order", lambda output, _: self._ascending(output, expected)))
        return tuple(found)

    def _limits(self, expected: Expected) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """How many candidates each row lists, the smallest of their scores, and the window, each [rows, 1]."""
        scores, k = expected.parts["scores"], expected.value.shape[1]
        needed = (scores > -math.inf).sum(dim=1, keepdim=True).clamp_max(k)
        best = scores.topk(min(k, scores.shape[1]), dim=1).values
        last = (needed - 1).clamp_min(0)
        threshold = best.gather(1, last)
        window = torch.as_tensor(expected.parts.get("window", 0.0), dtype=scores.dtype, device=scores.device)
        return needed, threshold, window.expand_as(threshold)

    def _in_order(self, found: torch.Tensor, window: torch.Tensor) -> Comparison:
        if self.ordered:
            # Not only neighbors: a row could ascend by less than the window at each step.
            ascends = found > found.cummin(dim=1).values + window
            if ascends.any():
                return failure(ascends, "scores do not descend along a row")
        return Comparison(0.0)

    def _ascending(self, output: torch.Tensor, expected: Expected) -> torch.Tensor | None:
        """Every row reversed, where that puts a certainly smaller score first."""
        scores = expected.parts["scores"]
        window = self._limits(expected)[2]
        safe = output.long().clamp(0, scores.shape[1] - 1)
        found = torch.where(output == self.padding, -math.inf, scores.gather(1, safe))
        wrong = found[:, :1] > found[:, -1:] + window
        return output.flip(1) if wrong.any() else None
