"""What Hopper's fp8 tensor cores lose, and the policies of kernels that use them.

An instruction multiplies 32 pairs of codes for each output. It aligns the 32 products and the running sum with the
largest of them and cuts each off, towards zero, below its 13th bit after the leading one (measured, and described in
section 3.3.2 of DeepSeek-V3's technical report, arXiv 2412.19437). Unlike rounding to nearest this has a preferred
direction: where all terms have the same sign, each loses half a unit on average, and the loss grows with the square of
the length: measured -0.5 % at k = 512, -3.1 % at 2048, -25 % at 16384. Kernels with block scales ("promotion") move the
sum to a float32 register after 128 products, and lose next to nothing.

The policies follow from that. With U the unit (2^-13 of the leading power of two) of an instruction, each of its 34
terms (32 products, the running sum, the result) loses between 0 and U of its magnitude:

- the mean loss is between 0 and U / 2 times the sum of the products' signs, added up over the instructions
  (``shift``); the running sum is a multiple of U already, unless its leading power of two has just grown;
- around it, terms of a range U have a sub-Gaussian variance proxy of U^2 / 4 (``variance``);
- it can never exceed U for each positive term, or each negative one (``most_lost``, ``most_gained``).

Products are multiples of a grain (1 for integer codes): where U does not exceed it, nothing is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashinfer_trace.harness.compare import (
    CONFIDENCE,
    Expected,
    rounding_error,
    summation_error,
    unit_roundoff,
)
from flashinfer_trace.harness.intervals import Interval

__all__ = ["TRUNCATED", "Loss", "truncated_parts", "truncated_product"]

#: Products that one instruction adds.
STEP = 32
#: Bits that a term keeps after the leading one of the largest.
KEPT_BITS = 13
#: Terms of an instruction beside the products: the running sum and the result.
OTHERS = 2


@dataclass
class Loss:
    """A product, and what cutting its terms off can do to it; each float64 [..., m, n]. See the module."""

    product: torch.Tensor
    shift: torch.Tensor
    variance: torch.Tensor
    most_lost: torch.Tensor
    most_gained: torch.Tensor

    def add(self, other: Loss, factor: torch.Tensor) -> None:
        """Adds another run of products, which is multiplied by positive factors."""
        self.product += other.product * factor
        self.shift += other.shift * factor
        self.variance += other.variance * factor.square()
        self.most_lost += other.most_lost * factor
        self.most_gained += other.most_gained * factor


def no_loss(a: torch.Tensor, b: torch.Tensor) -> Loss:
    """A product of length 0 of a [..., m, k] and b [..., n, k]."""
    zeros = a.new_zeros(*a.shape[:-1], b.shape[-2])
    return Loss(zeros, zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone())


def truncated_product(a: torch.Tensor, b: torch.Tensor) -> Loss:
    """a [..., m, k] @ b [..., n, k].mT of codes (float64), in one accumulator from the first product to the last."""
    loss = no_loss(a, b)
    grain = 1.0 if bool((a == a.round()).all() & (b == b.round()).all()) else 0.0
    for start in range(0, a.shape[-1], STEP):
        _add_instruction(loss, a[..., start : start + STEP], b[..., start : start + STEP], grain)
    return loss


def _add_instruction(loss: Loss, a: torch.Tensor, b: torch.Tensor, grain: float) -> None:
    before = loss.product
    loss.product = before + a @ b.mT
    largest = a.abs().amax(dim=-1).unsqueeze(-1) * b.abs().amax(dim=-1).unsqueeze(-2)
    top = torch.maximum(torch.maximum(before.abs(), loss.product.abs()), largest)
    unit = torch.exp2((torch.frexp(top).exponent - 1 - KEPT_BITS).double())
    unit = torch.where((top == 0) | (unit <= grain), 0.0, unit)
    counted = a.sign().abs() @ b.sign().abs().mT + OTHERS
    signs = a.sign() @ b.sign().mT
    loss.shift += unit * signs / 2
    loss.variance += unit.square() * counted / 4
    signs += OTHERS * loss.product.sign()
    loss.most_lost += unit * (counted + signs) / 2
    loss.most_gained += unit * (counted - signs) / 2


def truncated_parts(loss: Loss, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of `Expected` that TRUNCATED reads, of a product that is multiplied by positive scales."""
    return {
        "shift": loss.shift * scale,
        "deviation": loss.variance.sqrt() * scale,
        "most_lost": loss.most_lost * scale,
        "most_gained": loss.most_gained * scale,
    }


def truncated_limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact value less what cutting off takes, and the errors of float32 sums and of one bf16 rounding."""
    parts, value = expected.parts, expected.value
    deviation = CONFIDENCE * parts["deviation"]
    down = torch.minimum(parts["shift"].clamp_min(0.0) + deviation, parts["most_lost"])
    up = torch.minimum(parts["shift"].clamp_max(0.0).neg() + deviation, parts["most_gained"])
    rounding = rounding_error(value.abs() + up, torch.bfloat16) * (1 + 2**-8)
    rounding = rounding + summation_error(parts["magnitude"], int(parts["length"]))
    return value - down - rounding, value + up + rounding


def truncated_gain(expected: Expected) -> tuple[float, float]:
    """Limits of <actual, expected> / <expected, expected> - 1: mean losses, and eight deviations of their average."""
    value, parts = expected.value, expected.parts
    square = float(value.square().sum())
    down = float((value.abs() * (parts["shift"] * value.sign()).clamp_min(0.0)).sum())
    up = float((value.abs() * (parts["shift"] * value.sign()).clamp_max(0.0).neg()).sum())
    rounding = value.abs() * unit_roundoff(torch.bfloat16) * (1 + 2**-8)
    noise = (value.square() * (parts["deviation"].square() + rounding.square())).sum().item()
    inside = summation_error(parts["magnitude"], int(parts["length"])) * value.abs()
    spread = CONFIDENCE * math.sqrt(noise) + float(inside.sum())
    return (-down - spread) / square, (up + spread) / square


TRUNCATED = Interval(
    truncated_limits,
    "fp8 tensor core: each of 34 terms of an instruction loses up to 2^-13 of the largest, towards zero; bf16 rounding",
    gain=truncated_gain,
)
