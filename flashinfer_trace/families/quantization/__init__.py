"""Dynamic quantisers of activations: fp8 per token, fp8 and int8 per group of a token's features."""

from __future__ import annotations

import functools
from dataclasses import replace

from flashinfer_trace.families.quantization.cases import (
    CODES_E4M3,
    CODES_INT8,
    CODES_OF_POWERS,
    E4M3_MAX,
    INT8_MAX,
    PLAN,
    SCALES,
    SMALLEST_MAXIMUM,
    make_inputs,
    of_kernels,
    quantised,
    quantised_by_powers,
)
from flashinfer_trace.families.quantization.kernels import GROUP_FP8, GROUP_INT8, GROUP_UE8M0, PER_TOKEN_FP8
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel
from flashinfer_trace.verdict.compare import Exact, Expected
from flashinfer_trace.verdict.intervals import Interval


def oracle_per_token(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    expected = quantised(inputs["x"], definition.const_axes["hidden_size"], E4M3_MAX, 0.0)
    return {**expected, "scales": Expected(expected["scales"].value.squeeze(1))}


def oracle_per_group(largest_code: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return quantised(inputs["x"], definition.const_axes["group_size"], largest_code, SMALLEST_MAXIMUM)


def oracle_ue8m0(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return quantised_by_powers(inputs["x"], definition.const_axes["group_size"])


def with_codes(codes: Interval, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels, whose quotients need not be exact."""
    return tuple(replace(kernel, compare={"codes": of_kernels(codes)}) for kernel in kernels)


def group_family(name: str, codes: Interval, largest_code: float, kernels: tuple[Kernel, ...]) -> Family:
    return Family(
        name=name,
        op_type="quantization",
        twin={"hidden_size": 96, "group_size": 32, "num_groups": 3},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=functools.partial(oracle_per_group, largest_code),
        compare={"codes": codes, "scales": SCALES},
        kernels=with_codes(codes, kernels),
    )


FAMILIES = (
    Family(
        name="per_token_quant_fp8",
        op_type="quantization",
        twin={"hidden_size": 96},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle_per_token,
        compare={"codes": CODES_E4M3, "scales": SCALES},
        kernels=with_codes(CODES_E4M3, PER_TOKEN_FP8),
    ),
    group_family("per_token_group_quant_fp8", CODES_E4M3, E4M3_MAX, GROUP_FP8),
    Family(
        name="per_token_group_quant_fp8_ue8m0",
        op_type="quantization",
        twin={"hidden_size": 256, "group_size": 32, "num_groups": 8, "num_words": 2},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle_ue8m0,
        compare={"codes": CODES_OF_POWERS, "scales": Exact("exponents are integers")},
        kernels=GROUP_UE8M0,
    ),
    group_family("per_token_group_quant_int8", CODES_INT8, INT8_MAX, GROUP_INT8),
)
