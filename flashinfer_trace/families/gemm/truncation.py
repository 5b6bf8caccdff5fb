"""The bits that Hopper's fp8 tensor cores drop, and the policies of kernels that use them.

An instruction multiplies 32 pairs of codes for each output. It aligns the 32 products and the running sum with the
largest of them and cuts each off, toward zero, below its 13th bit after the leading one (measured, and described in
section 3.3.2 of DeepSeek-V3's technical report, arXiv 2412.19437). Unlike rounding to nearest this has a preferred
direction: where all terms have the same sign, each loses half a unit on average, and the loss grows with the square of
the length: measured -0.5 % at k = 512, -3.1 % at 2048, -25 % at 16384. Kernels with block scales ("promotion") move the
sum to a float32 register after 128 products, and lose next to nothing.

The policies follow from that. With U the unit (2^-13 of the leading power of two) of an instruction, each of its 34
terms (32 products, the running sum, the result) loses between 0 and U of its magnitude:

- the mean loss is between 0 and U / 2 times the sum of the products' signs, added up over the instructions
  (``shift``); the running sum is a multiple of U already, unless its leading power of two has just grown;
- around it, terms of a range U have a sub-Gaussian variance proxy of U^2 / 4 (``deviation``, its root);
- it can never exceed U for each positive term, or each negative one (``most_lost``, ``most_gained``).

Products are multiples of a grain (1 for integer codes): where U does not exceed it, nothing is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashinfer_trace.verdict.compare import CONFIDENCE, Expected, rounding_error, summation_error, unit_roundoff
from flashinfer_trace.verdict.intervals import Interval

#: Products that one instruction adds.
STEP = 32
#: Bits that a term keeps after the leading one of the largest.
KEPT_BITS = 13
#: Terms of an instruction other than the products: the running sum and the result.
OTHERS = 2
#: Elements of all products that are held at once: about 0.5 GB.
LARGEST_BATCH = 2**24
#: The bits of a float32's exponent.
EXPONENT = 0x7F800000


@dataclass
class Loss:
    """A product, and what cutting its terms off can do to it; each [..., m, n]. The unit of an instruction is
    2^-KEPT_BITS times its leading power of two.

    Attributes:
        product: exact, float64; the others are float32 sums of leading powers of two over the instructions:
        units, squares: of each, and of its square.
        signed, results: times the signs of the products, and times the sign of the running sum afterwards.
    """

    product: torch.Tensor
    units: torch.Tensor
    squares: torch.Tensor
    signed: torch.Tensor
    results: torch.Tensor

    def add(self, other: Loss, factor: torch.Tensor) -> None:
        """Adds other runs of products [runs, m, n], multiplied by positive factors (float64). They are used up."""
        scale = factor.float()
        self.product += other.product.mul_(factor).sum(dim=0)
        for own, runs in ((self.units, other.units), (self.signed, other.signed), (self.results, other.results)):
            own += runs.mul_(scale).sum(dim=0)
        self.squares += other.squares.mul_(scale.square_()).sum(dim=0)


def no_loss(a: torch.Tensor, b: torch.Tensor) -> Loss:
    """A product of length 0 of a [..., m, k] and b [..., n, k]."""
    product = a.new_zeros(*a.shape[:-1], b.shape[-2], dtype=torch.float64)
    return Loss(product, *(torch.zeros_like(product, dtype=torch.float32) for _ in range(4)))


def truncated_product(a: torch.Tensor, b: torch.Tensor) -> Loss:
    """a [..., m, k] @ b [..., n, k].mT of codes (float64), in one accumulator from the first product to the last."""
    loss = no_loss(a, b)
    grain = 2.0**KEPT_BITS if bool((a == a.round()).all() & (b == b.round()).all()) else 0.0
    length = STEP * max(1, LARGEST_BATCH // max(1, loss.product.numel()))
    for start in range(0, a.shape[-1], length):
        part = slice(start, start + length)
        _add_instructions(loss, _steps(a[..., part]), _steps(b[..., part]), grain)
    return loss


def _steps(codes: torch.Tensor) -> torch.Tensor:
    """[..., rows, k] -> [instructions, ..., rows, STEP]; the last one is filled up with zeros."""
    *rows, length = codes.shape
    whole = torch.nn.functional.pad(codes, (0, -length % STEP))
    return whole.view(*rows, -(-length // STEP), STEP).movedim(-2, 0)


def _add_instructions(loss: Loss, a: torch.Tensor, b: torch.Tensor, grain: float) -> None:
    """Adds 32 products to the running sum for each instruction in turn: a [instructions, ..., m, STEP], b the same."""
    products = a @ b.mT
    products[0] += loss.product
    sums = products.cumsum(dim=0)
    after = sums.float()
    before = torch.cat([loss.product.float().unsqueeze(0), after[:-1]])
    loss.product = sums[-1].clone()
    largest = a.abs().amax(dim=-1).float().unsqueeze(-1) * b.abs().amax(dim=-1).float().unsqueeze(-2)
    torch.maximum(torch.maximum(largest, before.abs_()), after.abs(), out=largest)
    # The exponent's bits alone are the leading power of two, and 0 where all terms are 0.
    largest.view(torch.int32).bitwise_and_(EXPONENT)
    unit = largest.masked_fill_(largest <= grain, 0.0) if grain else largest
    loss.units += unit.sum(dim=0)
    loss.squares += unit.square().sum(dim=0)
    loss.signed += (a.sign().float() @ b.sign().float().mT).mul_(unit).sum(dim=0)
    loss.results += after.sign_().mul_(unit).sum(dim=0)


def truncated_parts(loss: Loss, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of `Expected` that TRUNCATED reads, of a product that is multiplied by positive scales."""
    size = scale * 2.0**-KEPT_BITS
    terms, signs = loss.units.double() * (STEP + OTHERS), loss.signed + OTHERS * loss.results
    return {
        "shift": loss.signed / 2 * size,
        "deviation": (loss.squares * ((STEP + OTHERS) / 4)).sqrt() * size,
        "most_lost": (terms + signs) / 2 * size,
        "most_gained": (terms - signs).clamp_min(0.0) / 2 * size,
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
    "fp8 tensor core: each of 34 terms of an instruction loses up to 2^-13 of the largest, toward zero; bf16 rounding",
    gain=truncated_gain,
)
