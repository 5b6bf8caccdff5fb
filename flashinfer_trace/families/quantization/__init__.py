"""Dynamic quantizers of activations: fp8 and int8 per token, and per group of a token's features.

Codes are judged exactly, with one allowance: an implementation divides, or multiplies by a reciprocal, in float32.
Where the exact quotient is so close to a boundary between two codes that these roundings can move it across, both codes
pass. Where the scale is a power of two, none of them rounds, and one code passes. Kernels keep the allowance there:
their divisions and reciprocals may be approximate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flashinfer_trace.families.calls import called, calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Exact, Expected, unit_roundoff
from flashinfer_trace.verdict.intervals import Interval

E4M3_MAX = 448.0
INT8_MAX = 127.0
#: The smallest maximum that the group quantizers scale by.
SMALLEST_MAXIMUM = 1e-10
#: float32 roundings of a quotient: the scale, its reciprocal (each up to 2 ulp if approximate) and the product.
ROUNDINGS = 8
QUOTIENT_ERROR = ROUNDINGS * unit_roundoff(torch.float32)

#: Of corners only: integers up to HALVES, whose int8 scale is 2, so odd ones are halves; and values of standard
#: deviation VAST, whose products with 127 or 448 are beyond float32. By maxima beyond 2^126, which these do not reach,
#: sgl-kernel's approximate division gives 0 (findings/kernels.json).
HALVES, VAST = 254, 2.0**121
#: ``powers``: maxima of 1.75, whose e4m3 scale is a power of two; ``outliers``: one feature is 1000 times as large as
#: the rest, which get small codes; ``vanishing``: below 1e-10.
KINDS = (*VALUE_KINDS, "powers", "outliers", "vanishing")


@dataclass(frozen=True)
class Rows:
    """Which tokens a kernel takes. Attributes: zeros: tokens of zeros."""

    zeros: bool = True


def corners(request: PlanRequest) -> list[Plan]:
    kinds = ("vanishing", "powers", "huge", "minute", "outliers", "integers", "vast")
    halves = ("halves",) if request.definition.outputs["codes"].dtype == "int8" else ()
    zeros = request.options_of(Rows).zeros
    return [{"values": kind, "zero_row": zeros and kind == "outliers"} for kind in (*kinds, *halves)]


PLAN = RowPlans(
    {"num_tokens": Count(40, 4096)},
    {"values": KINDS, "zero_row": lambda request: FLAG if request.options_of(Rows).zeros else (False,)},
    special=corners,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    shape = [plan["num_tokens"], definition.const_axes["hidden_size"]]
    kind = plan["values"]
    if kind == "outliers":
        x = draws.normal(shape, torch.bfloat16)
        x[:, shape[1] // 3] *= 1000
    elif kind == "powers":
        x = draws.integers(shape, -4, 4).float().mul_(0.4375).to(torch.bfloat16)
    elif kind == "halves":
        x = draws.integers(shape, -HALVES, HALVES).to(torch.bfloat16)
        x[:, :: definition.const_axes.get("group_size", shape[1])] = HALVES
    elif kind == "vast":
        x = draws.normal(shape, torch.bfloat16, VAST)
    elif kind == "vanishing":
        x = draws.normal(shape, torch.bfloat16, 1e-11)
    else:
        x = draws.values(shape, torch.bfloat16, kind)
    if plan["zero_row"]:
        x[plan["num_tokens"] // 2 :][:1] = 0
    return {"x": x}


#: Part of expected codes: whether the scale of each element is a power of two; a quotient by it is then exact.
EXACT = "exact"
#: The end of a reason for codes that are exact there.
UNLESS_EXACT = ", unless the scale is a power of two"
#: float64 values -> codes as float64.
Rounding = Callable[[torch.Tensor], torch.Tensor]


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float64 values rounded to the nearest e4m3 number, ties to even, as float64; at most 448."""
    exponent = (torch.frexp(values.abs().clamp_min(2.0**-6)).exponent - 1).double()
    spacing = torch.exp2(exponent - 3)
    return ((values / spacing).round() * spacing).clamp(-E4M3_MAX, E4M3_MAX)


def code_limits(rounded: Rounding, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of quotients that are QUOTIENT_ERROR smaller and larger than the exact one; its own where `EXACT`."""
    error: torch.Tensor | float = QUOTIENT_ERROR
    if EXACT in expected.parts:
        error = expected.value.new_tensor(QUOTIENT_ERROR).where(~expected.parts[EXACT], 0.0)
    nearer, farther = (rounded(expected.value * factor) for factor in (1 - error, 1 + error))
    return torch.minimum(nearer, farther), torch.maximum(nearer, farther)


def codes_near(rounded: Rounding, reason: str) -> Interval:
    """The policy of codes, whose quotients 8 float32 roundings may move, unless the scale is a power of two."""
    return Interval(functools.partial(code_limits, rounded), f"{reason}{UNLESS_EXACT}", codes=True)


CODES_E4M3 = codes_near(
    nearest_e4m3, "the nearest e4m3 code; its neighbor too where 8 float32 roundings move the quotient past a tie"
)
CODES_OF_POWERS = Interval(
    lambda expected: (nearest_e4m3(expected.value),) * 2,
    "the nearest e4m3 code: a power of two divides exactly",
    codes=True,
)
CODES_INT8 = codes_near(
    lambda values: values.trunc().clamp(-INT8_MAX, INT8_MAX),
    "the quotient without its fraction; the next code too where 8 float32 roundings reach an integer",
)
#: Of SGLang's Triton kernel for w8a8 models. From its source (SGLang 0.5.23, kernels/ops/quantization/int8_kernel.py):
#: it multiplies by 127 / max(max |x|, 1e-10), and rounds with CUDA's round(), halves away from zero, unlike the
#: quantizer per group, which drops the fraction.
NEAREST_INT8 = codes_near(
    lambda values: (torch.sign(values) * torch.floor(values.abs() + 0.5)).clamp(-INT8_MAX, INT8_MAX),
    "the nearest integer; its neighbor too where 8 float32 roundings move the quotient past a half",
)


def of_kernels(codes: Interval) -> Interval:
    """The policy of codes for kernels. None of their quotients is known to be exact."""

    def limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
        parts = {name: part for name, part in expected.parts.items() if name != EXACT}
        return codes.limits(replace(expected, parts=parts))

    return replace(codes, limits=limits, reason=codes.reason.removesuffix(UNLESS_EXACT))


SCALES = ErrorBound(
    lambda expected: expected.value.abs() * (2 * unit_roundoff(torch.float32)),
    "a float32 quotient of an exact maximum: two roundings, u = 2^-24",
)


def quantized(x: torch.Tensor, group: int, largest_code: float, smallest: float) -> dict[str, Expected]:
    """The exact quotients and scales, float64, of groups of `group` features of x [num_tokens, hidden_size]."""
    values = x.double().reshape(len(x), x.shape[1] // group, group)
    largest = torch.maximum(values.amax(dim=2), -values.amin(dim=2)).clamp_min(smallest)
    scales = largest / largest_code
    quotients = torch.where(scales[:, :, None] > 0, values * largest_code / largest[:, :, None], 0.0)
    exact = (torch.frexp(scales).mantissa == 0.5).repeat_interleave(group, dim=1)
    return {"codes": Expected(quotients.flatten(1), {EXACT: exact}), "scales": Expected(scales)}


def quantized_by_powers(x: torch.Tensor, group: int) -> dict[str, Expected]:
    """As `quantized`, where scales are powers of two in ue8m0, four in an int32: found by trying every exponent."""
    scales = quantized(x, group, E4M3_MAX, SMALLEST_MAXIMUM)["scales"].value
    powers = torch.exp2(torch.arange(-127, 128, dtype=torch.float64, device=x.device))
    stored = torch.searchsorted(powers, scales)
    quotients = x.double().reshape(*scales.shape, group) / powers[stored].unsqueeze(2)
    each = stored.view(len(x), scales.shape[1] // 4, 4).to(torch.uint8)
    return {"codes": Expected(quotients.view(x.shape)), "scales": Expected(each.view(torch.int32).squeeze(2))}


#: No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}
FP8, INT8 = "-448.0 448.0", "-128.0 127.0"
SGLANG_FP8 = "sglang.srt.layers.quantization.fp8_kernel"
SGLANG = "sglang.kernels.ops.quantization"
SGLANG_INT8 = f"{SGLANG}.int8_kernel"
SGLANG_JIT = "sglang.jit_kernel.per_token_group_quant_8bit"
SGLANG_GROUP = f"{SGLANG}.per_token_group_quant.per_token_group_quant"


def run_aligned(options: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    given = {**outputs, "scales": aligned(outputs["scales"])}
    called(GROUPED_8BIT, f"{GROUPED} {FP8} {options}", definition, {**inputs, **given})
    return given


def run_group_of_sglang(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's own quantizer since 0.5.23: words of exponents in the layout of `run_aligned`, scales by rows."""
    words = outputs["scales"].dtype == torch.int32
    scales = aligned(outputs["scales"]) if words else outputs["scales"]
    given = {**outputs, "scales": scales}
    called(SGLANG_GROUP, f"x codes scales group_size scale_ue8m0={words}", definition, {**inputs, **given})
    return given


def aligned(scales: torch.Tensor) -> torch.Tensor:
    """The shape and the dtype of `scales`, poisoned, a column at a time, in multiples of 16 bytes."""
    rows, columns = scales.shape
    poison = torch.nan if scales.is_floating_point() else torch.iinfo(scales.dtype).min
    return torch.full((columns, -(-rows // 4) * 4), poison, dtype=scales.dtype, device=scales.device).t()[:rows]


def run_per_token_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    codes, scales = called(f"{SGLANG_INT8}.per_token_quant_int8", "x", definition, inputs)
    return {"codes": codes, "scales": scales.squeeze(1)}


def both_versions(name: str, limits: str) -> tuple[Kernel, ...]:
    """sgl_kernel's group quantizer, by default the second version."""
    text = f"{GROUPED} {limits} enable_v2="
    return tuple(kernel(f"sgl_kernel.{name}", text + str(not variant), variant) for variant in ("", "v1"))


kernel = functools.partial(calling, limits=LAUNCHABLE)
GROUPED_8BIT, GROUPED = "sgl_kernel.sgl_per_token_group_quant_8bit", f"x codes scales group_size {SMALLEST_MAXIMUM}"
GROUP = Kernel(SGLANG_GROUP, run_group_of_sglang, limits=LAUNCHABLE)
# A token of zeros gets codes of 448 from both (findings/kernels.json): they are given none.
PER_TOKEN_FP8 = tuple(
    kernel(path, "x codes scales", plan_options=Rows(zeros=False))
    for path in ("sgl_kernel.sgl_per_token_quant_fp8", f"{SGLANG}.per_token_quant_fp8.per_token_quant_fp8")
)
PER_TOKEN_INT8 = (Kernel(f"{SGLANG_INT8}.per_token_quant_int8", run_per_token_triton, limits=LAUNCHABLE),)
GROUP_FP8 = (
    *both_versions("sgl_per_token_group_quant_fp8", FP8),
    Kernel(GROUPED_8BIT, functools.partial(run_aligned, "enable_v2=True"), "column-major scales", limits=LAUNCHABLE),
    kernel(f"{SGLANG_JIT}.per_token_group_quant_8bit", f"{GROUPED} {FP8} scale_ue8m0=False"),
    kernel(f"{SGLANG_FP8}.per_token_group_quant_8bit", f"x group_size codes.dtype eps={SMALLEST_MAXIMUM}"),
    GROUP,
)
# The layout that SGLang gives DeepGEMM on Blackwell.
UE8M0 = functools.partial(run_aligned, "scale_ue8m0=True enable_v2=True")
GROUP_UE8M0 = (Kernel(GROUPED_8BIT, UE8M0, "ue8m0", limits=LAUNCHABLE), GROUP)
GROUP_INT8 = (
    *both_versions("sgl_per_token_group_quant_int8", INT8),
    kernel(GROUPED_8BIT, f"{GROUPED} {INT8} enable_v2=True"),
    kernel(f"{SGLANG_INT8}.per_token_group_quant_int8", f"x group_size {SMALLEST_MAXIMUM}"),
    GROUP,
)


def oracle_per_token(largest: float, smallest: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    expected = quantized(inputs["x"], definition.const_axes["hidden_size"], largest, smallest)
    return {**expected, "scales": Expected(expected["scales"].value.squeeze(1))}


def oracle_per_group(largest: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return quantized(inputs["x"], definition.const_axes["group_size"], largest, SMALLEST_MAXIMUM)


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
        oracle=lambda definition, inputs: quantized_by_powers(inputs["x"], definition.const_axes["group_size"]),
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
