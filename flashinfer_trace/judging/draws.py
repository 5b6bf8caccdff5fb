"""Whether a sampler draws at random: not twice the same from equal inputs, and each row by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

import torch

from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.verify import SEEDED_ROWS
from flashinfer_trace.judging.output_form import filled_outputs
from flashinfer_trace.judging.process import SubmissionProcess
from flashinfer_trace.judging.verdict import Failure

#: Of equal rows that are drawn from in one call: at most so many, of at most so many elements together.
ROWS, ELEMENTS = 1024, 1 << 24

#: Rows of the inputs that are looked at so: how often two draws of one row are equal differs between them.
SOURCES = 4

#: Probability that a sampler is rejected although it draws each row independently.
ALPHA = 1e-8

#: Permitted sources of a sampler's randomness, and how often to use them, for messages.
ADVICE = (
    "draw from torch's generators, which each call finds in another state, or take a seed from the system's entropy"
)

ADVICE_FOR_ROWS = "draw a random number for each row"


def unrandom(
    job: Job, process: SubmissionProcess, begin: Callable[[], SubmissionProcess] | None, seed: int, *, rows: bool
) -> Failure | None:
    """How a sampler's draws are not random, which chance cannot explain; None of a sampler whose draws are.

    Args:
        begin: starts another process with the same submission; None where it would begin in a state that this one had.
        rows: whether to compare rows of one call as well.

    Raises:
        Failed: it gave no outputs.
    """
    size = dict.fromkeys(job.sized.var_axes, SEEDED_ROWS)
    inputs = job.family.inputs_for_axes(job.sized, size, seed, job.device)
    seeds = iter(random.Random(seed).sample(range(1 << 31), 6 + 3 * SOURCES))
    times = f"from equal inputs, {SEEDED_ROWS} rows each"
    if _alike(_draw(job, process, inputs, seeds), _draw(job, process, inputs, seeds)):
        return Failure("same-draws", f"it draws the same twice {times}; {ADVICE}")
    if begin is not None:
        with begin() as one, begin() as other:  # both load meanwhile
            one.loaded()
            other.loaded()
            for number in ("first", "second"):
                if _alike(_draw(job, one, inputs, seeds), _draw(job, other, inputs, seeds)):
                    return Failure(
                        "same-draws", f"the {number} calls of two new processes draw the same {times}; {ADVICE}"
                    )
    return _dependent(job, process, inputs, seeds) if rows else None


def _draw(job: Job, process: SubmissionProcess, inputs: Inputs, seeds: Iterator[int]) -> dict[str, torch.Tensor]:
    seed = next(seeds)
    return process.call(inputs, filled_outputs(job.sized, inputs, seed), seed).outputs


def _alike(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def _of_one_row(job: Job, inputs: Inputs, row: int) -> Inputs:
    by_row = [name for name, spec in job.sized.inputs.items() if spec.shape and spec.shape[0] in job.sized.var_axes]
    count = min(ROWS, max(SEEDED_ROWS, ELEMENTS // sum(inputs[name][0].numel() for name in by_row)))
    return {
        name: value[row : row + 1].expand(count, *value.shape[1:]).contiguous() if name in by_row else value
        for name, value in inputs.items()
    }


def _dependent(job: Job, process: SubmissionProcess, inputs: Inputs, seeds: Iterator[int]) -> Failure | None:
    """The failure of a sampler whose draws of equal rows depend on each other.

    If they do not, two rows draw the same with one probability, whichever they are: of a pair of neighbors of one call
    and a pair of random rows of another, either is as likely the only one that does (McNemar's exact test).
    """
    found = {"neighbors": [0, 0], "rows half a batch apart": [0, 0]}
    for row in range(SOURCES):
        equal = _of_one_row(job, inputs, row)
        ordered, mixed = (_draw(job, process, equal, seeds) for _ in range(2))
        count = len(next(iter(ordered.values())))
        rows, half = torch.arange(count), count // 2
        order = torch.randperm(count, generator=torch.Generator().manual_seed(next(seeds)))
        control = _alike_rows(mixed, order[:half], order[half : 2 * half])
        for who, (left, right) in zip(found, ((rows[0::2], rows[1::2]), (rows, rows[half:])), strict=True):
            pairs = _alike_rows(ordered, left[:half], right[:half])
            found[who][0] += int((pairs & ~control).sum())
            found[who][1] += int((control & ~pairs).sum())
    for who, (more, fewer) in found.items():
        if _chance(more, fewer) < ALPHA / len(found):
            counts = f"{who} alone draw the same {more} times, and two random rows alone {fewer} times"
            return Failure("same-draws", f"equal rows of one call depend on each other: {counts}; {ADVICE_FOR_ROWS}")
    return None


def _alike_rows(outputs: Mapping[str, torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Which pairs of rows have equal outputs: bool [pairs], on the CPU."""
    values = [value.cpu() for value in outputs.values()]
    return torch.stack([(value[left] == value[right]).reshape(len(left), -1).all(1) for value in values]).all(0)


def _chance(more: int, fewer: int) -> float:
    """Twice the probability that one side of as many fair coins shows as seldom as the rarer of two."""
    coins = more + fewer
    return float(2 * sum(math.comb(coins, rarer) for rarer in range(min(more, fewer) + 1)) / 2**coins)
