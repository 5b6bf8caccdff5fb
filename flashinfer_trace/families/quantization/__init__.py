"""Dynamic quantizers of activations: fp8 and int8 per token, and per group of a token's features."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from flashinfer_trace.families.quantization.cases import (
    CODES_E4M3,
    CODES_INT8,
    CODES_OF_POWERS,
    E4M3_MAX,
    INT8_MAX,
    PLAN,
    SCALES,
    SMALLEST_MAXIMUM,
    UNLESS_EXACT,
    code_limits,
    make_inputs,
    of_kernels,
    quantized,
    quantized_by_powers,
)
from flashinfer_trace.families.quantization.kernels import (
    GROUP_FP8,
    GROUP_INT8,
    GROUP_UE8M0,
    PER_TOKEN_FP8,
    PER_TOKEN_INT8,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel
from flashinfer_trace.verdict.compare import Exact, Expected
from flashinfer_trace.verdict.intervals import Interval


def oracle_per_token(
    largest_code: float, smallest: float, definition: Definition, inputs: Inputs
) -> dict[str, Expected]:
    expected = quantized(inputs["x"], definition.const_axes["hidden_size"], largest_code, smallest)
    return {**expected, "scales": Expected(expected["scales"].value.squeeze(1))}


def oracle_per_group(largest_code: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return quantized(inputs["x"], definition.const_axes["group_size"], largest_code, SMALLEST_MAXIMUM)


def oracle_ue8m0(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return quantized_by_powers(inputs["x"], definition.const_axes["group_size"])


def nearest_integer(values: torch.Tensor) -> torch.Tensor:
    """float64 values rounded to the nearest integer, halves away from zero, within 127."""
    nearest: torch.Tensor = torch.sign(values) * torch.floor(values.abs() + 0.5)
    return nearest.clamp(-INT8_MAX, INT8_MAX)


def nearest_limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    return code_limits(nearest_integer, expected)


#: Of SGLang's Triton kernel for w8a8 models. From its source (SGLang 0.5.23, kernels/ops/quantization/int8_kernel.py):
#: it multiplies by 127 / max(max |x|, 1e-10), and rounds with CUDA's round(), halves away from zero, unlike the
#: quantizer per group, which drops the fraction.
NEAREST_INT8 = Interval(
    nearest_limits,
    f"the nearest integer; its neighbor too where 8 float32 roundings move the quotient past a half{UNLESS_EXACT}",
    codes=True,
)
quantizer = functools.partial(Family, op_type="quantization", plan=PLAN, make_inputs=make_inputs, isolated=("x",))
GROUPS = {"hidden_size": 96, "group_size": 32, "num_groups": 3}


def with_codes(codes: Interval, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels, whose quotients need not be exact."""
    return tuple(replace(kernel, compare={"codes": of_kernels(codes)}) for kernel in kernels)


FAMILIES = (
    quantizer(
        name="per_token_quant_fp8",
        twin={"hidden_size": 96},
        oracle=functools.partial(oracle_per_token, E4M3_MAX, 0.0),
        compare={"codes": CODES_E4M3, "scales": SCALES},
        kernels=with_codes(CODES_E4M3, PER_TOKEN_FP8),
    ),
    quantizer(
        name="per_token_quant_int8",
        twin={"hidden_size": 96},
        oracle=functools.partial(oracle_per_token, INT8_MAX, SMALLEST_MAXIMUM),
        compare={"codes": NEAREST_INT8, "scales": SCALES},
        kernels=with_codes(NEAREST_INT8, PER_TOKEN_INT8),
    ),
    quantizer(
        name="per_token_group_quant_fp8",
        twin=GROUPS,
        oracle=functools.partial(oracle_per_group, E4M3_MAX),
        compare={"codes": CODES_E4M3, "scales": SCALES},
        kernels=with_codes(CODES_E4M3, GROUP_FP8),
    ),
    quantizer(
        name="per_token_group_quant_fp8_ue8m0",
        twin={"hidden_size": 256, "group_size": 32, "num_groups": 8, "num_words": 2},
        oracle=oracle_ue8m0,
        compare={"codes": CODES_OF_POWERS, "scales": Exact("exponents are integers")},
        kernels=GROUP_UE8M0,
    ),
    quantizer(
        name="per_token_group_quant_int8",
        twin=GROUPS,
        oracle=functools.partial(oracle_per_group, INT8_MAX),
        compare={"codes": CODES_INT8, "scales": SCALES},
        kernels=with_codes(CODES_INT8, GROUP_INT8),
    ),
)
