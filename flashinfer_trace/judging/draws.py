"""Whether a sampler draws at random: not twice the same from equal inputs, and each row by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

import torch

from flashinfer_trace.harness.case import poisoned_outputs
from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.harness.verify import SEEDED_ROWS, Job
from flashinfer_trace.judging.process import SubmissionProcess
from flashinfer_trace.judging.verdict import Failure

__all__ = ["unrandom"]

#: Of equal rows that are drawn from in one call: at most so many, of at most so many elements together.
ROWS, ELEMENTS = 1024, 1 << 24

#: Probability that a sampler whose rows are independent is said to have others.
ALPHA = 1e-8

#: What a sampler may take its randomness from, for messages.
ADVICE = (
    "draw from torch's generators, which each call finds in another state, or take a seed from the system's entropy"
)


def unrandom(
    job: Job, process: SubmissionProcess, begin: Callable[[], SubmissionProcess] | None, seed: int, *, rows: bool
) -> Failure | None:
    """How a sampler's draws are not random, which chance cannot explain; None of a sampler whose draws are.

    Args:
        job, process: what is judged, and its process.
        begin: starts another process with the same submission; None where it would begin in a state that this one had.
        seed: of the inputs, and of the calls.
        rows: whether to look at rows of one call, too.

    Raises:
        Failed: it gave no outputs.
    """
    size = dict.fromkeys(job.sized.var_axes, SEEDED_ROWS)
    inputs = job.family.inputs_for_axes(job.sized, size, seed, job.device)
    seeds = iter(random.Random(seed).sample(range(1 << 31), 9))
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
    return _dependent(job, process, _of_one_row(job, inputs), seeds) if rows else None


def _draw(job: Job, process: SubmissionProcess, inputs: Inputs, seeds: Iterator[int]) -> dict[str, torch.Tensor]:
    return process.call(inputs, poisoned_outputs(job.sized, inputs), next(seeds)).outputs


def _alike(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def _of_one_row(job: Job, inputs: Inputs) -> Inputs:
    """The first row of the inputs, many times."""
    by_row = [name for name, spec in job.sized.inputs.items() if spec.shape and spec.shape[0] in job.sized.var_axes]
    count = min(ROWS, max(SEEDED_ROWS, ELEMENTS // sum(inputs[name][0].numel() for name in by_row)))
    return {
        name: value[:1].expand(count, *value.shape[1:]).contiguous() if name in by_row else value
        for name, value in inputs.items()
    }


def _dependent(job: Job, process: SubmissionProcess, inputs: Inputs, seeds: Iterator[int]) -> Failure | None:
    """The failure of a sampler whose draws of equal rows depend on each other.

    If they do not, two rows draw the same with one probability, whichever they are: pairs of neighbours of one call as
    often as pairs of random rows of another, but for chance (Fisher's exact test).
    """
    ordered, mixed = (_draw(job, process, inputs, seeds) for _ in range(2))
    count = len(next(iter(ordered.values())))
    generator = torch.Generator().manual_seed(next(seeds))
    order = torch.randperm(count, generator=generator)
    rows, half = torch.arange(count), count // 2
    control = _equal(mixed, order[:half], order[half : 2 * half])
    pairs = {"neighbours": (rows[0::2], rows[1::2]), "rows half a batch apart": (rows[:half], rows[half:])}
    for who, (left, right) in pairs.items():
        found = _equal(ordered, left[:half], right[:half])
        if _chance(found, control, half) < ALPHA / len(pairs):
            message = f"{who} of {count} equal rows draw the same in {found} of {half} pairs, random rows in {control}"
            return Failure("same-draws", f"rows of one call depend on each other: {message}; each needs its own number")
    return None


def _equal(outputs: Mapping[str, torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> int:
    """How many pairs of rows have equal outputs."""
    found = [(value.cpu()[left] == value.cpu()[right]).reshape(len(left), -1).all(1) for value in outputs.values()]
    return int(torch.stack(found).all(0).sum())


def _chance(found: int, control: int, pairs: int) -> float:
    """The probability of two counts that differ so much or more, of as many pairs each that are alike: both tails."""
    total = found + control
    more = range(max(found, control), min(total, pairs) + 1)
    return 2 * sum(math.comb(pairs, one) * math.comb(pairs, total - one) for one in more) / math.comb(2 * pairs, total)
