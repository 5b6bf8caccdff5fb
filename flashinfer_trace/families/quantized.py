"""Building blocks for fp8 block-scaled matrices and for routing: inputs, exact products, models of rounding errors.

Rounding models. An error of rounding to nearest is close to uniform between plus and minus half the distance between
neighboring numbers, so its variance is a third of that half-distance squared (as is its sub-Gaussian variance proxy: a
weighted sum of independent such errors exceeds L times the root of its summed proxies with probability at most
2 exp(-L^2 / 2), Hoeffding's inequality for sub-Gaussian terms). Functions in this module return such variances.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from flashinfer_trace.harness.inputs import Draws

BLOCK = 128
E4M3_MAX = 448.0
#: Standard deviation of `normal_codes`, in units of one code's value: 4 sigma is the largest e4m3 number.
CODE_SIGMA = E4M3_MAX / 4
#: Smallest maximum that a group is scaled by, as in the quantizers of sgl-kernel and of DeepSeek.
SMALLEST_MAXIMUM = 1e-10
_CHUNK = 1 << 24


def blocks_of(values: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n / BLOCK, BLOCK], also for zero rows."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)


# Inputs


def normal_codes(draws: Draws, shape: Sequence[int]) -> torch.Tensor:
    """float8_e4m3fn codes that look like trained weights: close to normal, standard deviation CODE_SIGMA, no NaN.
    Random bytes index the 256 quantiles of the normal distribution, two at a time, so a gigabyte takes seconds on a
    CPU. The number of elements must be a multiple of 8."""
    pairs = _pairs_of_quantiles().to(draws.device)
    codes = torch.empty(tuple(shape), dtype=torch.uint8, device=draws.device)
    for part in torch.split(codes.view(-1).view(torch.int16), _CHUNK):
        torch.index_select(pairs, 0, draws.bits(part.numel() // 4).view(torch.uint16).to(torch.int32), out=part)
    return codes.view(torch.float8_e4m3fn)


@functools.cache
def _pairs_of_quantiles() -> torch.Tensor:
    """All pairs of the codes of the normal distribution's 256 quantiles, int16 [65536]."""
    quantiles = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256) * CODE_SIGMA
    table = quantiles.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cartesian_prod(table, table).view(torch.int16).flatten()


def varied_scales(draws: Draws, shape: Sequence[int], typical: float, spread: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """float32 scales, log-uniform within a factor of sqrt(2) of `typical`: varied, to make a transposition show. In
    addition, rows of [..., rows, columns] differ by powers of two, with exponents between the two of `spread`."""
    found = torch.exp2(draws.uniform(shape, -0.5, 0.5)).mul_(typical)
    if spread != (0, 0):
        found *= draws.powers(math.prod(shape[:-1]), *spread).view(*shape[:-1], 1)
    return found


def group_scales(values: torch.Tensor) -> torch.Tensor:
    """Scale of each BLOCK consecutive values of a row: largest magnitude / 448; [..., n] -> [..., n / BLOCK]."""
    return blocks_of(values).abs().amax(dim=-1).clamp_min(SMALLEST_MAXIMUM) / E4M3_MAX


def quantize_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, n] -> float8_e4m3fn codes [rows, n] and scales [rows, n / BLOCK], rounded to nearest."""
    scales = group_scales(values)
    codes = blocks_of(values) / scales.unsqueeze(2)
    return codes.clamp(-E4M3_MAX, E4M3_MAX).flatten(1).to(torch.float8_e4m3fn), scales


# Exact arithmetic


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    byte = packed.double() % 256
    return torch.stack([byte % 16, (byte / 16).floor()], dim=-1).flatten(-2)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes [..., rows, columns] times their BLOCK x BLOCK scales [..., rows / BLOCK, columns / BLOCK]."""
    *matrices, rows, columns = scales.shape
    blocks = codes.to(dtype, copy=True).view(*matrices, rows, BLOCK, columns, BLOCK)
    return blocks.mul_(scales.to(dtype)[..., :, None, :, None]).view(codes.shape)


def blockwise_product(
    x: torch.Tensor, x_scales: torch.Tensor | None, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """x @ weights.T in float64, scaled after the products: each block's codes are multiplied, then scaled, then summed.

    Args:
        x: float64 [..., rows, n]; the values of codes if x_scales is given.
        x_scales: [..., rows, n / BLOCK], or None.
        codes, scales: weights [..., m, n] and their BLOCK x BLOCK scales.
    """
    blocks = blocks_of(codes).transpose(-2, -3).to(torch.float64, memory_format=torch.contiguous_format)
    partial = blocks_of(x).transpose(-2, -3).contiguous() @ blocks.mT
    partial *= scales.double().mT.repeat_interleave(BLOCK, dim=-1).unsqueeze(-2)
    if x_scales is not None:
        partial *= x_scales.double().mT.unsqueeze(-1)
    return partial.sum(dim=-3)


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """How many elements along the last axis come before each: larger ones, and equal ones of lower index."""
    mine, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    index = torch.arange(scores.shape[-1], device=scores.device)
    ahead = (other > mine) | ((other == mine) & (index < index.unsqueeze(1)))
    return ahead.sum(dim=-1)


def chosen_by_rank(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Which elements along the last axis are the `count` largest, by counting ranks; equals by lower index."""
    return ranks(scores) < count


# Models of rounding errors


def float_variance(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Variance of one rounding of `values` (float64) to a binary floating-point dtype, subnormals included."""
    info = torch.finfo(dtype)
    spacing = torch.exp2(_exponent(values.abs().clamp_min(info.smallest_normal))) * info.eps
    return spacing.square() / 12


def e4m3_variance(values: torch.Tensor) -> torch.Tensor:
    """Variance of rounding `values` [..., n] (float64) to e4m3 in groups of BLOCK along a row. e4m3 has three mantissa
    bits; below 2^-6, in units of the group's scale, the spacing stays 2^-9. Values are taken 1/64 larger, for kernels
    that quantize values that were already rounded."""
    scale = group_scales(values).repeat_interleave(BLOCK, dim=-1)
    spacing = torch.exp2(_exponent((values.abs() / scale * (1 + 2**-6)).clamp_min(2.0**-6)) - 3)
    return (spacing * scale).square() / 12


def _exponent(values: torch.Tensor) -> torch.Tensor:
    """Exponent of the leading bit of positive values, exactly."""
    return (torch.frexp(values).exponent - 1).to(values.dtype)
