"""Dynamic quantisation to int8 per token, as SGLang's Triton kernel does it for w8a8 models.

From its source (SGLang 0.5.11, srt/layers/quantization/int8_kernel.py): it multiplies by 127 / max(max |x|, 1e-10), and
rounds with CUDA's round(), halves away from zero, unlike the quantiser per group, which drops the fraction.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.quantization.cases import (
    INT8_MAX,
    PLAN,
    SCALES,
    SMALLEST_MAXIMUM,
    UNLESS_EXACT,
    code_limits,
    make_inputs,
    of_kernels,
    quantised,
)
from flashinfer_trace.families.quantization.kernels import SGLANG_INT8, sglang_kernel
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Outputs
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.intervals import Interval

__all__ = ["FAMILIES"]


def nearest_integer(values: torch.Tensor) -> torch.Tensor:
    """float64 values rounded to the nearest integer, halves away from zero, within 127."""
    nearest: torch.Tensor = torch.sign(values) * torch.floor(values.abs() + 0.5)
    return nearest.clamp(-INT8_MAX, INT8_MAX)


def limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    return code_limits(nearest_integer, expected)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    expected = quantised(inputs["x"], definition.const_axes["hidden_size"], INT8_MAX, SMALLEST_MAXIMUM)
    return {**expected, "scales": Expected(expected["scales"].value.squeeze(1))}


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.srt.layers.quantization.int8_kernel import per_token_quant_int8

    codes, scales = per_token_quant_int8(inputs["x"])
    return {"codes": codes, "scales": scales.squeeze(1)}


CODES = Interval(
    limits,
    f"the nearest integer; its neighbour too where 8 float32 roundings move the quotient past a half{UNLESS_EXACT}",
    codes=True,
)
FAMILIES = (
    Family(
        name="per_token_quant_int8",
        op_type="quantization",
        twin={"hidden_size": 96},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"codes": CODES, "scales": SCALES},
        kernels=(
            replace(
                sglang_kernel(SGLANG_INT8, "per_token_quant_int8", run_triton), compare={"codes": of_kernels(CODES)}
            ),
        ),
    ),
)
