"""Faults that a kernel may have: each makes wrong outputs of right ones, or of inputs that were read wrongly.

A mutant of `harness.mutants` is wrong nearly everywhere, so every comparison must reject it. A fault is as small as
faults of kernels are, and a case may hide it: what counts is after how many cases a verification rejects the kernel
(see `harness.power`). Elements, rows and tiles are drawn uniformly, by the number of the case. So an element in which
a fault is below the bound is as likely as any other. Some faults say that they are in the largest element instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.tensors import INTEGERS, as_integers

#: Sides of the tile that is not written.
TILE = 16

#: How many mantissa bits are flipped, one at a time, from the top: they change a number by 25 %, 12.5 % and 6.25 % or
#: more.
TOP_BITS = 3
MANTISSA_BITS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}


@dataclass(frozen=True)
class FaultyCase:
    """One case in which a kernel is made to fail.

    Attributes:
        inputs: of the case.
        other: inputs of another case with the same plan: what the kernel worked on before.
        expected: what the oracle says.
        run: calls the kernel.
        draws: decides where the fault is.
    """

    inputs: Mapping[str, Any]
    other: Mapping[str, Any]
    expected: Mapping[str, Expected]
    run: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]]
    draws: Draws

    @functools.cached_property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The kernel's outputs."""
        return self.run(self.inputs)

    @functools.cached_property
    def before(self) -> dict[str, torch.Tensor]:
        """The outputs of the previous case, which the kernel's memory may still hold."""
        return self.run(self.other)

    def number(self, below: int) -> int:
        """A number from 0 to `below` - 1."""
        return self.draws.host_integers(1, 0, below - 1)[0]


@dataclass(frozen=True)
class Fault:
    """One way for a kernel to be wrong.

    Attributes:
        name: the name in reports.
        spoil: (a trial) -> the outputs of a kernel with this fault, or None where the fault makes no difference.
    """

    name: str
    spoil: Callable[[FaultyCase], dict[str, torch.Tensor] | None]


#: (an output, what it was in the case before, the trial) -> a wrong output; None where it cannot be wrong in this way.
Change = Callable[[torch.Tensor, torch.Tensor, FaultyCase], torch.Tensor | None]


def any_kernel(outputs: Mapping[str, tuple[torch.dtype, int]]) -> tuple[Fault, ...]:
    """The faults of outputs of these dtypes and numbers of dimensions, whatever they mean."""
    return tuple(
        Fault(f"{output}: {name}", functools.partial(changed, output, change))
        for output, (dtype, dimensions) in outputs.items()
        for name, change in changes(dtype, dimensions).items()
    )


def with_inputs(name: str, misread: Callable[[dict[str, Any], FaultyCase], dict[str, Any] | None]) -> Fault:
    """The fault of a kernel that works on other inputs than it was given: on what `misread` makes of them."""

    def spoil(trial: FaultyCase) -> dict[str, torch.Tensor] | None:
        inputs = misread(dict(trial.inputs), trial)
        return None if inputs is None else trial.run(inputs)

    return Fault(name, spoil)


def changed(output: str, change: Change, trial: FaultyCase) -> dict[str, torch.Tensor] | None:
    right, before = trial.outputs[output], trial.before[output]
    if not right.numel():
        return None
    wrong = change(right.clone(), before, trial)
    same = wrong is None or torch.equal(as_integers(wrong), as_integers(right))
    return None if same or wrong is None else {**trial.outputs, output: wrong}


def changes(dtype: torch.dtype, dimensions: int) -> dict[str, Change]:
    """The changes of one output."""
    found: dict[str, Change] = {}
    if dtype in MANTISSA_BITS:
        for bit in range(min(TOP_BITS, MANTISSA_BITS[dtype])):
            place = MANTISSA_BITS[dtype] - 1 - bit
            found[f"mantissa bit {bit + 1} of any element flipped"] = functools.partial(flipped, place, False)
            found[f"mantissa bit {bit + 1} of the largest element flipped"] = functools.partial(flipped, place, True)
    else:
        found["lowest bit of any element flipped"] = functools.partial(flipped, 0, False)
    if dimensions >= 1:
        found |= {"a stale row": stale_row, "a stale tile": stale_tile, "two rows exchanged": exchanged_rows}
    if dimensions >= 2:
        found |= {"a stale last column": stale_last_column, "last column zero": zero_last_column}
    return found


def flipped(
    bit: int, largest: bool, output: torch.Tensor, before: torch.Tensor, trial: FaultyCase
) -> torch.Tensor | None:
    """One bit flipped, of the largest number or of any element; of numbers, one that is finite and not 0."""
    values = output.contiguous()
    if values.dtype == torch.bool:
        return None
    candidates = torch.ones(values.numel(), dtype=torch.bool, device=values.device)
    if values.is_floating_point():
        numbers = values.flatten().double().abs()
        candidates = numbers.isfinite() & (numbers > 0)
        if largest:
            candidates &= numbers == numbers[candidates].amax() if candidates.any() else candidates
    places = candidates.nonzero().flatten()
    if not len(places):
        return None
    place = places[trial.number(len(places))]
    bits = values.view(INTEGERS[values.dtype.itemsize]).flatten().clone()
    bits[place] ^= 1 << bit
    return bits.view(values.dtype).view(values.shape)


def stale_row(output: torch.Tensor, before: torch.Tensor, trial: FaultyCase) -> torch.Tensor | None:
    if before.shape != output.shape:
        return None
    row = trial.number(len(output))
    output[row] = before[row]
    return output


def stale_tile(output: torch.Tensor, before: torch.Tensor, trial: FaultyCase) -> torch.Tensor | None:
    """The last TILE rows of the last TILE columns are what they were."""
    if before.shape != output.shape:
        return None
    last = (slice(-TILE, None),) if output.ndim == 1 else (slice(-TILE, None), ..., slice(-TILE, None))
    output[last] = before[last]
    return output


def stale_last_column(output: torch.Tensor, before: torch.Tensor, trial: FaultyCase) -> torch.Tensor | None:
    if before.shape != output.shape:
        return None
    output[..., -1] = before[..., -1]
    return output


def zero_last_column(output: torch.Tensor, before: torch.Tensor, trial: FaultyCase) -> torch.Tensor | None:
    output[..., -1] = 0
    return output


def exchanged_rows(output: torch.Tensor, before: torch.Tensor, trial: FaultyCase) -> torch.Tensor | None:
    if len(output) < 2:
        return None
    first, second = trial.number(len(output)), trial.number(len(output) - 1)
    second += second >= first
    rows = output[[first, second]].clone()
    output[first], output[second] = rows[1], rows[0]
    return output
