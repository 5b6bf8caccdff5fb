"""Building blocks of valid inputs. Everything is drawn from seeds, never from global random state."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

from flashinfer_trace.sandbox.shared_memory import memory_of
from flashinfer_trace.verdict.random_words import of_words
from flashinfer_trace.verdict.tensors import INTEGERS, as_integers

#: How the elements of a floating-point input are distributed: see `Draws.values`.
VALUE_KINDS = ("normal", "integers", "large", "tiny", "constant_rows", "spread")
#: Exponents of the powers of two by which rows of ``spread`` values are larger, from the smallest row to the largest.
ROWS_SPREAD = -10, 10
#: Exponents of those by which ``spread`` scales are larger than usual ones of about 1e-4: real checkpoints have scales
#: from 1e-8 on, within a tensor.
SCALES_SPREAD = -17, 19
#: Factors of the rows of ``vast`` values, one after the other: squares of the last ones are beyond float32's range.
VAST = (1e8, 1e16, 1e19)
#: 16 of every 32 bits; mean of the sum of four integers, each uniform in 0..65535; standard deviation of these sums,
#: one of 16 being 1.5 times as large.
HALVES = 0x0000FFFF0000FFFF
MEAN_OF_FOUR, SIGMA = 131_070, math.sqrt(4 * (65536**2 - 1) / 12 * (15 + 1.5**2) / 16)


def special_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Numbers that arithmetic changes and a copy of bits does not: zeros, infinities, NaN, subnormals, the largest.

    The last NaN has a sign and a payload. Where a dtype has no infinity, its NaN takes the place.
    """
    info = torch.finfo(dtype)
    subnormals = info.smallest_normal * info.eps, info.smallest_normal * (1 - info.eps)
    numbers = (0.0, math.inf, info.max, *subnormals)
    known = torch.tensor([math.nan, *numbers, *(-number for number in numbers)], dtype=torch.float32).to(dtype)
    every_bit = torch.full([dtype.itemsize], 0xFF, dtype=torch.uint8).view(INTEGERS[dtype.itemsize])
    return torch.cat((as_integers(known), every_bit)).view(dtype)


class Draws:
    """A stream of random tensors: the same seed gives the same bits on every device and with every torch.

    Draw n is the same whatever the sizes of the others were.
    """

    def __init__(self, seed: int, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._seed, self._draws = seed, 0

    def bits(self, count: int) -> torch.Tensor:
        """int64 [count], all 64 bits of each random."""
        return self._drawn([count], lambda words, library: words, torch.int64)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Values with mean 0 and standard deviation `scale`, rounded to `dtype`.

        They are sums of four uniform numbers, and one of 16 is 1.5 times as large. So their fourth moment is close to
        that of the normal distribution, and of a vocabulary some are beyond 4 standard deviations; none is beyond 5.01.
        """

        def of(words: Any, library: Any) -> Any:
            pairs = ((words & HALVES) + ((words >> 16) & HALVES)).view(library.int32)
            sums = pairs[0::2] + pairs[1::2] - MEAN_OF_FOUR
            sums += (sums >> 1) * ((sums & 15) == 0)
            return library.asarray(sums, dtype=library.float32) * (scale / SIGMA)

        return self._drawn(shape, of, dtype)

    def uniform(self, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """float32 values, uniform in [low, high): 2^24 different ones."""

        def of(words: Any, library: Any) -> Any:
            drawn = library.asarray((words.view(library.int32) >> 8) & 0xFFFFFF, dtype=library.float32)
            return drawn * (2.0**-24 * (high - low)) + low

        return self._drawn(shape, of, torch.float32, each=2)

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers, uniform in low..high inclusive, up to 2^-32 times their number, which is at most 2^31."""
        return self._drawn(shape, _between(low, high), dtype)

    def permutation(self, n: int) -> torch.Tensor:
        """A random order of 0..n-1 (int64)."""
        return self.bits(n).sort(stable=True).indices

    def exponents(self, count: int, low: int, high: int) -> torch.Tensor:
        """int64 [count]: from low on in even steps up to high, in a random order."""
        return self.permutation(count) * (high - low) // max(1, count - 1) + low

    def powers(self, count: int, low: int, high: int) -> torch.Tensor:
        """float32 [count]: 2 to the power of `exponents`."""
        return torch.exp2(self.exponents(count, low, high).float())

    def host_integers(self, count: int, low: int, high: int) -> list[int]:
        """`count` integers in low..high inclusive, for index structures."""
        return self._drawn([count], _between(low, high), torch.int64, device=torch.device("cpu")).tolist()

    def _drawn(
        self,
        shape: Sequence[int],
        of: Callable[[Any, Any], Any],
        dtype: torch.dtype,
        each: int = 1,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The next draw: see `of_words`."""
        self._draws += 1
        made = "float32" if dtype.is_floating_point else "int64"
        # Out of reach of `ExactOperations`, which takes longer than a small draw. Huge values may become infinite.
        with torch._C._DisableTorchDispatch(), numpy.errstate(over="ignore"):
            found = of_words(self._seed, self._draws, math.prod(shape), device or self.device, of, made, each)
            return found.view(tuple(shape)).to(dtype)

    def values(self, shape: Sequence[int], dtype: torch.dtype, kind: str, scale: float = 1.0) -> torch.Tensor:
        """A matrix of activations or weights.

        Kinds: ``normal``; ``integers`` (-4..4: products and short sums are exact, so a kernel must round correctly);
        ``large`` (1000 times larger); ``tiny`` (1000 times smaller); ``huge`` and ``minute`` (factors 1e5 and 1e-6, for
        corners: at the ends of float16's range); ``vast`` (for corners: rows that are 1e8, 1e16 and 1e19 times larger,
        in turn); ``constant_rows`` (one value per row: its mean square is that value's square); ``spread``
        (rows that are 2^-10 to 2^10 times as large, in a random order: what is scaled or clamped for all rows alike
        loses some); ``special`` (for corners of copies: two thirds are `special_numbers`).
        """
        if kind == "special":
            return self._special(shape, dtype, scale)
        if kind == "integers":
            return self.integers(shape, -4, 4, torch.int8).to(dtype)
        if kind == "constant_rows":
            return self.normal([*shape[:-1], 1], torch.float32, scale).expand(*shape).to(dtype)
        if kind == "spread":
            rows = self.powers(math.prod(shape[:-1]), *ROWS_SPREAD).view(*shape[:-1], 1)
            return self.normal(shape, dtype, scale).mul_(rows)
        if kind == "vast":
            rows = torch.arange(math.prod(shape[:-1]), device=self.device).view(*shape[:-1], 1)
            factors = torch.tensor(VAST, device=self.device)[rows % len(VAST)]
            return self.normal(shape, scale=scale).mul_(factors).to(dtype)
        factor = {"normal": 1.0, "large": 1000.0, "tiny": 0.001, "huge": 1e5, "minute": 1e-6}[kind]
        return self.normal(shape, dtype, scale * factor)

    def _special(self, shape: Sequence[int], dtype: torch.dtype, scale: float) -> torch.Tensor:
        special = as_integers(special_numbers(dtype)).to(self.device)
        # In a random order, but each equally often: a few rows have them all.
        place = self.permutation(math.prod(shape)).view(*shape) % (3 * len(special) // 2)
        usual = as_integers(self.normal(shape, dtype, scale))
        return torch.where(place < len(special), special[place % len(special)], usual).view(dtype)

    def matrices(self, shape: Sequence[int], dtype: torch.dtype, kind: str, scale: float = 1.0) -> torch.Tensor:
        """As `values`, one matrix after the other, where float32 numbers of all of them would take too much memory."""
        drawn = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        for matrix in drawn:
            matrix.copy_(self.values(shape[1:], dtype, kind, scale))
        return drawn


class HollowDraws(Draws):
    """The same index structures and lengths, with zeros for elements: for sizes, which depend on no element."""

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        self._draws += 1
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def uniform(self, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        self._draws += 1
        return torch.full(tuple(shape), float(low), device=self.device)


def _between(low: int, high: int) -> Callable[[Any, Any], Any]:
    different = high + 1 - low
    if not 0 < different <= 1 << 31:
        raise RuntimeError(f"there are no integers to draw from {low} to {high}")
    return lambda words, library: (((words >> 32) & 0xFFFFFFFF) * different >> 32) + low


@functools.cache
def sizes(low: int, high: int) -> st.SearchStrategy[int]:
    """Sizes from low to high inclusive, with more weight on the ends, small numbers and neighbors of powers of two.

    Cached, because hypothesis validates a strategy once, and some are asked for in every draw.
    """
    corners = {low, high, *range(low, min(low + 4, high + 1))}
    power = 8
    while power <= high + 1:
        corners |= {size for size in (power - 1, power, power + 1) if low <= size <= high}
        power *= 2
    return st.one_of(st.sampled_from(sorted(corners)), st.integers(low, high))


def indptr(lengths: Sequence[int], device: str | torch.device) -> torch.Tensor:
    """Offsets of consecutive segments: int32 [len(lengths) + 1], starting with 0."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def split(total: int, parts: int, draws: Draws) -> list[int]:
    """`total` split at random into `parts` non-negative integers. Empty parts are likely, for uneven batches."""
    if parts == 0:
        return []
    cuts = sorted(draws.host_integers(parts - 1, 0, total)) if parts > 1 else []
    edges = [0, *cuts, total]
    return [end - start for start, end in itertools.pairwise(edges)]


def clone_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """A copy of the inputs in separate memory that a kernel may overwrite. The memory between rows is also copied."""
    return {name: _copy(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _copy(value: torch.Tensor) -> torch.Tensor:
    if value.is_contiguous():
        return value.clone()
    return memory_of(value).clone().view(value.dtype).as_strided(value.shape, value.stride())
