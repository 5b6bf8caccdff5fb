"""What the products of fp8 matrices share: kinds of codes and scales, and the bound of their references."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashinfer_trace.families.gemm import product_bound
from flashinfer_trace.families.quantized import CODE_SIGMA, normal_codes
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound

#: ``integers``: codes -4..4 and scales that are powers of two, so that every sum is exact; ``positive``: all terms of a
#: sum have the same sign, which shows an accumulator that truncates; ``any``: every finite code, subnormal ones too;
#: ``large`` and ``tiny``: scales 1000 times larger and smaller; ``spread``: scales of rows from 1e-9 to 1e2 beside each
#: other, as checkpoints have them.
KINDS = ("normal", "integers", "positive", "any", "large", "tiny", "spread")
FACTORS = {"large": 1000.0, "tiny": 0.001, "huge": 1e6, "minute": 1e-7}

PRODUCT = ErrorBound(
    product_bound, "one bf16 rounding, u = 2^-8, of a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer codes"
)


#: The corners have sums of one sign, where a truncating accumulator loses most, and scales beyond the range of float16.
PLAN = RowPlans(
    {"m": Count(40, 256)},
    {"values": KINDS},
    special=[{"values": values} for values in ("positive", "huge", "minute", "any")],
    on_cpu=[{"values": "subnormal"}],
    many_rows=300,
)


def codes(draws: Draws, shape: Sequence[int], kind: str) -> torch.Tensor:
    """float8_e4m3fn codes of the planned kind."""
    if kind == "integers":
        return draws.integers(shape, -4, 4, torch.int8).float().to(torch.float8_e4m3fn)
    if kind == "any":
        drawn = draws.integers(shape, 0, 253, torch.int32)
        # 0x7f and 0xff are NaN: 0..126 are the positive codes, 128..254 the negative ones.
        return (drawn + (drawn > 126)).to(torch.uint8).view(torch.float8_e4m3fn)
    if kind == "subnormal":
        drawn = draws.integers(shape, 0, 15, torch.uint8)
        return (drawn % 8 + drawn // 8 * 128).view(torch.float8_e4m3fn)
    drawn = normal_codes(draws, shape)
    return (drawn.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn) if kind == "positive" else drawn


def scales(
    draws: Draws, shape: Sequence[int], kind: str, typical: float, spread: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """float32 scales within a factor of 4 of `typical` over the deviation of codes; 2^-2..2^2 for integers.

    Spread ones of rows [rows, ...] differ by powers of two beside that, of exponents between the two of `spread`.
    """
    if kind == "integers":
        return torch.exp2(draws.integers(shape, -2, 2).float())
    found = torch.exp2(draws.uniform(shape, -2.0, 2.0)).mul_(typical / CODE_SIGMA)
    if kind == "spread" and spread != (0, 0):
        found *= draws.powers(shape[0], *spread).view(-1, *[1] * (len(shape) - 1))
    return found


def factor(kind: str) -> float:
    """By how much the activations of a kind are larger than usual."""
    return FACTORS.get(kind, 1.0)


def powers_of_two(values: torch.Tensor) -> bool:
    """Whether all of the positive values are powers of two."""
    return bool((torch.frexp(values).mantissa == 0.5).all())


def whole(values: torch.Tensor) -> bool:
    """Whether all of the values are integers."""
    return bool((values == values.round()).all())
