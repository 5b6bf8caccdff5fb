"""Where the inputs of a workload come from, when an evaluator makes them itself.

flashinfer-bench draws tensors of normal values, of fp8 codes up to 2, of integers up to 1024 and of any bytes. Inputs
that may have any values are left to it, so that an export stays small. What has structure is given: offsets, pages,
positions and routes by the family, scales and probabilities by a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.tensors import torch_dtype

__all__ = ["Probabilities", "Random", "Scales", "Source", "source"]

#: 16-bit and 8-bit inputs that have structure: scales, zero points, sums, and scores without ties.
_STRUCTURED = frozenset({"a_scales", "a_sums", "routing_logits", "scales", "w_scales", "w_szeros", "zeros"})
#: 8-bit inputs whose bytes are no codes: exponents; and codes, float32 scales and bfloat16 features side by side.
_NO_CODES = frozenset({"kv_cache", "weights_scale"})
#: float32 inputs that may be anything: matrices, weights, rotations, and logarithms of sums.
_ANY_FLOAT32 = frozenset(
    {"A", "B", "bias", "cos_sin_cache", "input", "logits", "s_a", "s_b", "sinks", "topk_weights", "weight"}
)
#: Scales -> the codes that they belong to, and whether these are weights: products with them are sums of k terms.
_SCALES = {"A_scale": ("A", False), "a_scale": ("a", False), "B_scale": ("B", True), "b_scale": ("b", True)}
_WEIGHTS = frozenset(codes for codes, are_weights in _SCALES.values() if are_weights)
#: Standard deviation of the codes that flashinfer-bench draws: normal ones cut at 2, and uniform ones; of two 4-bit
#: codes in a byte, each is uniform in -8..7.
_FP8_SIGMA, _INT8_SIGMA, _INT4_SIGMA = 0.88, 73.9, 4.6
#: Of the logits of a row of probabilities: nine tenths of the mass are on some hundreds of tokens, as in a model.
_LOGIT_SIGMA = 4.0


@dataclass(frozen=True)
class Random:
    """Any values of the dtype; floating-point ones are normal.

    `sigma` is their standard deviation where a formula draws them: flashinfer-bench draws them itself, with 1.
    """

    shape: tuple[int, ...]
    dtype: str
    sigma: float = 1.0

    @property
    def code(self) -> str:
        """An expression that draws it with torch."""
        shape = list(self.shape)
        if self.dtype == "int8":
            return f"torch.randint(-128, 128, {shape}, dtype=torch.int8)"
        if self.dtype.startswith("float8"):
            return f"torch.randn({shape}).clamp_(-2, 2).to(torch.{self.dtype})"
        drawn = f"torch.randn({shape}, dtype=torch.{self.dtype})"
        return drawn if self.sigma == 1 else f"{drawn} * {self.sigma:.6g}"


@dataclass(frozen=True)
class Scales:
    """Positive scales, log-uniform within a factor of 4 of `typical`, so that products are of the order of 1."""

    shape: tuple[int, ...] | None
    dtype: str
    typical: float

    @property
    def code(self) -> str:
        """An expression that draws it with torch."""
        drawn = f"torch.exp2(4 * torch.rand({list(self.shape or ())}) - 2) * {self.typical:.6g}"
        return f"({drawn}).to(torch.{self.dtype})" if self.shape is not None else f"({drawn}).item()"

    def value(self, draws: Draws) -> torch.Tensor | float:
        """The scales themselves."""
        drawn = torch.exp2(draws.uniform(self.shape or (), -2.0, 2.0)) * self.typical
        return drawn.item() if self.shape is None else drawn.to(torch_dtype(self.dtype))


@dataclass(frozen=True)
class Probabilities:
    """float32 rows that sum to 1: the softmax of normal logits."""

    shape: tuple[int, ...]

    @property
    def code(self) -> str:
        """An expression that draws it with torch."""
        return f"torch.softmax({_LOGIT_SIGMA} * torch.randn({list(self.shape)}), dim=-1)"

    def value(self, draws: Draws) -> torch.Tensor:
        """The rows themselves."""
        return torch.softmax(draws.normal(self.shape, scale=_LOGIT_SIGMA), dim=-1)


#: A formula, or what a family gives: a tensor, or a number.
Source = Random | Scales | Probabilities | torch.Tensor | bool | int | float


def source(definition: Definition, name: str, shape: tuple[int, ...] | None) -> Random | Scales | Probabilities | None:
    """The formula of an input, or None if the family has to give it."""
    spec = definition.inputs[name]
    if name in _SCALES:
        return _scales(definition, name, shape)
    if shape is None:
        return None
    if name == "temperature":  # of logits that are normal: as if those of a model were divided by 1 or so
        return Scales(shape, spec.dtype, 1 / _LOGIT_SIGMA)
    if name == "probs":
        return Probabilities(shape)
    if not _may_be_anything(name, spec.dtype, len(shape)):
        return None
    no_codes = torch_dtype(spec.dtype).itemsize > 1  # those have scales
    return Random(shape, spec.dtype, shape[-1] ** -0.5 if no_codes and name in _WEIGHTS else 1.0)


def _may_be_anything(name: str, dtype: str, dimensions: int) -> bool:
    if dtype == "float32":
        return name in _ANY_FLOAT32
    if name in _NO_CODES and torch_dtype(dtype).itemsize == 1:
        return False
    if dtype == "int8":
        return dimensions > 1 and name not in _STRUCTURED
    return dtype.startswith(("bfloat", "float")) and name not in _STRUCTURED


def _scales(definition: Definition, name: str, shape: tuple[int, ...] | None) -> Scales:
    codes, are_weights = _SCALES[name]
    dtype = definition.inputs[codes].dtype
    packed = "k_bytes" in (definition.inputs[codes].shape or ())
    sigma = _INT4_SIGMA if packed else _FP8_SIGMA if dtype.startswith("float8") else _INT8_SIGMA
    terms = definition.const_axes["k"] if are_weights else 1
    return Scales(shape, definition.inputs[name].dtype, terms**-0.5 / sigma)
