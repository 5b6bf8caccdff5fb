"""One product of the experts that tokens chose, in bf16 and in fp8 blocks.

Errors of one element, with p its products: float32 sums lose 8 sqrt(k) u sum |p|. Hopper's tensor cores add fp8
products with 13 bits after the leading bit, and drop the rest: see `TRUNCATION_VARIANCE`. Where an activation lies
halfway between two codes, the oracle takes the number itself, and the code is off by half the distance between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from flashinfer_trace.families.calls import called
from flashinfer_trace.families.gemm import positive_product
from flashinfer_trace.families.moe.inputs import drawn_ids
from flashinfer_trace.families.moe.kernels import GAIN_CONFIDENCE, LAUNCHABLE
from flashinfer_trace.families.moe.oracle import TRUNCATION_VARIANCE
from flashinfer_trace.families.moe.rows import TRITON_MODULE
from flashinfer_trace.families.moe.sorting import CHOICES
from flashinfer_trace.families.quantized import (
    BLOCK,
    CODE_SIGMA,
    blocks_of,
    dequantized,
    float_variance,
    normal_codes,
    varied_scales,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import SCALES_SPREAD, Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    ErrorBound,
    Expected,
    rounding_error,
    summation_error,
    unit_roundoff,
)

U32 = unit_roundoff(torch.float32)
#: Roundings of one term other than its sum: two scales, their product with a code, and the routing weight.
TERM_ROUNDINGS = 6
#: Dropped bits shrink a sum of products coherently: see TRUNCATION_GAIN of whole experts, which have three products.
PRODUCT_SHRINK = 2.0**-10
#: Quotients this close to halfway between two codes, relative to themselves, may round either way: x, its scale and a
#: reciprocal are rounded to float32 in between.
HALFWAY = 8 * U32
E4M3_MAX = 448.0

#: expert -> its weights in float64 [n, k].
Weights = Callable[[int], torch.Tensor]


def e4m3_groups(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [m, k] rounded to e4m3 in groups of BLOCK by the exponents of the quotients, float64, and half the distance
    of codes where a quotient is halfway, which stays as it is."""
    groups = blocks_of(rows.double())
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    quotient = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX)
    exponent = (torch.frexp(quotient.abs().clamp_min(2.0**-6)).exponent - 1).double()
    spacing = torch.exp2(exponent - 3)
    steps = quotient / spacing
    halfway = ((steps.abs() % 1) - 0.5).abs() <= HALFWAY * steps.abs()
    codes = torch.where(halfway, quotient, steps.round() * spacing)
    half = torch.where(halfway, spacing / 2, 0.0)
    return (codes * scales).flatten(1), (half * scales).flatten(1)


def products(
    rows: torch.Tensor,
    of_expert: Iterable[tuple[int, torch.Tensor, torch.Tensor]],
    weights: Weights,
    shape: tuple[int, int],
    spread: torch.Tensor | None = None,
    squared: bool = False,
) -> Expected:
    """rows [m, k] float64 times the weights of their experts; zero where nobody writes.

    Args:
        of_expert: (expert, rows of the output, rows of `rows`), for experts with at least one.
        shape: of the output.
        spread: how far each element of `rows` may be off, [m, k].
        squared: whether a kernel truncates; its bound then needs ``squares``.

    Returns:
        Parts ``magnitude``, ``squares`` and ``spread`` are bounds: see `positive_product`.
    """
    value, magnitude, off, squares = (rows.new_zeros(shape) for _ in range(4))
    magnitudes = rows.abs().float()
    for expert, to, source in of_expert:
        own, x = weights(expert), magnitudes[source]
        value[to] = rows[source] @ own.T
        sizes = own.float().abs_()
        magnitude[to] = positive_product(x, sizes)
        if spread is not None:
            off[to] = positive_product(spread[source].float(), sizes)
        if squared:
            squares[to] = positive_product(x.square(), sizes.square_())
    parts = {"magnitude": magnitude, "spread": off, "length": torch.tensor(float(rows.shape[1]))}
    return Expected(value, {**parts, "squares": squares} if squared else parts)


def scaled(expected: Expected, factors: torch.Tensor) -> Expected:
    size = factors.abs()
    of = {"magnitude": size, "spread": size, "squares": size.square()}
    parts = {name: part * of[name] if name in of else part for name, part in expected.parts.items()}
    return Expected(expected.value * factors, parts)


def reshaped(expected: Expected, shape: tuple[int, ...], exact: bool) -> Expected:
    """The same with another shape; ``exact`` if each sum is exact in float32."""
    parts = {name: part.view(shape) if part.ndim else part for name, part in expected.parts.items()}
    return Expected(expected.value.view(shape), parts, exact)


def float32_error(expected: Expected) -> torch.Tensor:
    """One rounding to bf16, float32 sums, and activations that are halfway between two codes. The rounded number is the
    sum with its errors: wrong codes can make it much larger than the expected value."""
    parts = expected.parts
    inside = summation_error(parts["magnitude"], int(parts["length"])) + TERM_ROUNDINGS * U32 * parts["magnitude"]
    off = inside + parts["spread"]
    return rounding_error(expected.value.abs() + off, torch.bfloat16) + off


def truncated_gain(expected: Expected) -> float:
    """The shrinkage by dropped bits, plus 5 standard deviations of the mean of independent errors of all elements."""
    parts, value = expected.parts, expected.value
    variance = parts["squares"] * TRUNCATION_VARIANCE + float_variance(value, torch.bfloat16) + parts["spread"].square()
    size = value.square().sum().clamp_min(1e-300)
    return PRODUCT_SHRINK + GAIN_CONFIDENCE * math.sqrt(float((variance * value.square()).sum() / size.square()))


PRODUCT = ErrorBound(
    float32_error,
    "one bf16 rounding, u = 2^-8, of a float32 sum: (8 sqrt(k) + 6) 2^-24 of the terms; exact for small integers",
)
QUANTIZED = ErrorBound(
    float32_error,
    "one bf16 rounding, u = 2^-8, of a float32 sum: (8 sqrt(k) + 6) 2^-24 of the terms; half the distance of codes for "
    "activations halfway between two",
)
TRUNCATED = ErrorBound(
    lambda expected: float32_error(expected) + CONFIDENCE * (expected.parts["squares"] * TRUNCATION_VARIANCE).sqrt(),
    "as the reference, and 8 standard deviations of fp8 products that are added with 13 bits; for the scale of all "
    "elements, 2^-10 for dropped bits and 5 standard deviations",
    gain=truncated_gain,
)

#: ``positive``: activations of one sign. ``integers``: sums are exact in float32, so a kernel must round correctly.
#: ``spread``: rows, and scales of rows of weights, whose magnitudes differ widely.
KINDS = ("normal", "large", "tiny", "positive", "integers", "spread")
#: ``vanishing``: far below the smallest scale, so codes have few bits left.
FP8_KINDS = ("normal", "large", "tiny", "positive", "vanishing", "spread")

#: How tokens choose on a GPU. Most cases are of few experts: where all are chosen, the weights of all are read several
#: times, although each expert is judged by itself.
CHOICES_OF_MANY = (*CHOICES, *("neighbors",) * 7)
#: About 7 times the smallest e4m3 number, in units of the smallest scale, 1e-10 / 448.
VANISHING = 3e-15
#: Rows of one expert, more than tiles of kernels have.
MANY = 300


def plans_of(kinds: tuple[str, ...], on_cpu: Sequence[Plan] = ()) -> RowPlans:
    """Plans with activations of these kinds. On a CPU, values are also beyond float16's range, where no kernel has
    been run, and one expert has `MANY` rows: a GPU draws up to 300."""
    return RowPlans(
        {"seq_len": Count(24, 300)},
        {
            "choice": lambda request: CHOICES_OF_MANY if request.large else CHOICES,
            "values": kinds,
            "zero_row": FLAG,
            "mul": FLAG,
        },
        special=[{"seq_len": 1, "mul": True}],
        on_cpu=[
            {"seq_len": 5, "values": "huge", "choice": "elsewhere", "mul": True},
            {"seq_len": MANY, "choice": "one_expert", "mul": True},
            *on_cpu,
        ],
        many_rows=300,
    )


PLAN = plans_of(KINDS)
#: Activations far below the smallest scale as well, with and without routing weights; a GPU draws them often.
FP8_PLAN = plans_of(FP8_KINDS, [{"seq_len": 9, "values": "vanishing", "mul": mul} for mul in FLAG])


def drawn_activations(shape: list[int], kind: str, zero_row: bool, draws: Draws) -> torch.Tensor:
    if kind == "integers":
        rows = draws.values(shape, torch.bfloat16, kind)
    else:
        blocks = torch.exp2(draws.uniform([*shape[:-1], -(-shape[-1] // BLOCK)], -0.5, 0.5))
        if kind == "vanishing":
            normal = draws.normal(shape, scale=VANISHING)
        else:
            normal = draws.values(shape, torch.float32, "normal" if kind == "positive" else kind)
        values = normal * blocks.repeat_interleave(BLOCK, dim=-1)[..., : shape[-1]]
        rows = (values.abs() if kind == "positive" else values).to(torch.bfloat16)
    if zero_row and len(rows):
        rows[len(rows) // 2] = 0
    return rows


def routed_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """The inputs that do not depend on the format of weights; for integers, topk_weights are powers of two."""
    axes, count = definition.const_axes, plan["seq_len"]
    weights = draws.uniform([count, axes["top_k"]], 0.05, 2.5)
    if plan["values"] == "integers":
        weights = torch.exp2(draws.integers(weights.shape, -3, 1).float())
    shape = [count, axes["rows_per_token"], axes["k"]]
    return {
        "hidden_states": drawn_activations(shape, plan["values"], plan["zero_row"], draws),
        "topk_weights": weights,
        "topk_ids": drawn_ids(count, axes["top_k"], axes["num_experts"], plan["choice"], draws),
        "mul_routed_weight": plan["mul"],
    }


def bf16_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    known = routed_inputs(definition, plan, draws)
    kind = plan["values"] if plan["values"] in ("integers", "spread") else "normal"
    shape = [axes["num_experts"], axes["n"], axes["k"]]
    known["weights"] = draws.matrices(shape, torch.bfloat16, kind, axes["k"] ** -0.5)
    return {name: known[name] for name in definition.inputs}


def fp8_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    known = routed_inputs(definition, plan, draws)
    known["weights"] = normal_codes(draws, [axes["num_experts"], axes["n"], axes["k"]])
    shape = [axes["num_experts"], axes["num_n_blocks"], axes["num_k_blocks"]]
    spread = SCALES_SPREAD if plan["values"] == "spread" else (0, 0)
    known["weights_scale"] = varied_scales(draws, shape, 1 / (CODE_SIGMA * axes["k"] ** 0.5), spread)
    return {name: known[name] for name in definition.inputs}


def expected_output(
    definition: Definition,
    inputs: Inputs,
    rows: torch.Tensor,
    weights: Weights,
    spread: torch.Tensor | None = None,
    exact: bool = False,
) -> dict[str, Expected]:
    """The products of all pairs, and their routing weights if they count; activations in fp8 have a spread."""
    axes, ids = definition.const_axes, inputs["topk_ids"]
    choices = axes["top_k"] // axes["rows_per_token"]
    order = ids.flatten().argsort(stable=True)
    # The first count is of -1. Experts are not asked one by one which pairs are theirs: each would wait for the GPU.
    ends = torch.bincount(ids.flatten() + 1, minlength=axes["num_experts"] + 1).cumsum(0).tolist()
    pairs = [(expert, order[first:end]) for expert, (first, end) in enumerate(itertools.pairwise(ends)) if end > first]
    to_from = [(expert, own, own // choices) for expert, own in pairs]
    found = products(rows, to_from, weights, (ids.numel(), axes["n"]), spread, squared=spread is not None)
    if inputs["mul_routed_weight"]:
        found = scaled(found, inputs["topk_weights"].double().flatten().unsqueeze(1))
    return {"output": reshaped(found, (*ids.shape, axes["n"]), exact)}


def bf16_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Small integers have exact sums; powers of two as routing weights keep them exact."""
    rows, weights = inputs["hidden_states"].flatten(0, 1).double(), inputs["weights"]
    whole = bool((rows == rows.round()).all()) and bool((weights == weights.round()).all())
    small = whole and rows.numel() > 0 and float(rows.abs().max()) * 4 * rows.shape[1] < 2**24
    powers = bool((torch.frexp(inputs["topk_weights"]).mantissa == 0.5).all())
    exact = small and (powers or not inputs["mul_routed_weight"])
    return expected_output(definition, inputs, rows, lambda expert: weights[expert].double(), exact=exact)


def fp8_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    codes, scales = inputs["weights"], inputs["weights_scale"]
    rows, spread = e4m3_groups(inputs["hidden_states"].flatten(0, 1))

    def weights(expert: int) -> torch.Tensor:
        return dequantized(codes[expert], scales[expert], torch.float64)

    return expected_output(definition, inputs, rows, weights, spread)


def default_config(tokens: int, experts: int, fp8: bool) -> dict[str, int]:
    """The tiles that SGLang takes where it has no tuned ones (get_default_config)."""
    if fp8:
        tiles = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": BLOCK, "BLOCK_SIZE_K": BLOCK, "GROUP_SIZE_M": 32}
        return {**tiles, "num_warps": 4, "num_stages": 3}
    if tokens <= experts:
        return {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}


def run_fused_moe(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The rows are sorted by expert first, in blocks of the kernel's tiles."""
    import triton.language as tl
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    axes, ids, fp8 = definition.const_axes, inputs["topk_ids"], "weights_scale" in inputs
    config = default_config(len(ids), axes["num_experts"], fp8)
    sorted_ids, expert_ids, padded = moe_align_block_size(ids, config["BLOCK_SIZE_M"], axes["num_experts"])
    given = {
        **{"rows": inputs["hidden_states"].flatten(0, 1), "config": config, "type": tl.bfloat16, "padded": padded},
        **{"sorted": sorted_ids, "experts": expert_ids, "choices": axes["top_k"] // axes["rows_per_token"]},
        **{"fp8": fp8, "blocks": [BLOCK, BLOCK] if fp8 else None},
    }
    text = (
        "A=rows B=weights bias=None C=output A_scale=None B_scale=weights_scale|None B_zp=None topk_weights= topk_ids= "
        "sorted_token_ids=sorted expert_ids=experts num_tokens_post_padded=padded mul_routed_weight= top_k=choices "
        "config= compute_type=type use_fp8_w8a8=fp8 use_int8_w8a8=False use_int8_w8a16=False use_int4_w4a16=False "
        "per_channel_quant=False block_shape=blocks filter_expert=True"
    )
    called(f"{TRITON_MODULE}.invoke_fused_moe_kernel", text, definition, {**inputs, **outputs, **given})
    return outputs


FUSED_MOE = f"{TRITON_MODULE}.fused_moe_kernel"
BF16 = Kernel(FUSED_MOE, run_fused_moe, limits=LAUNCHABLE)
FP8 = Kernel(FUSED_MOE, run_fused_moe, "fp8 blocks", limits=LAUNCHABLE, compare={"output": TRUNCATED})
TWIN = {"num_experts": 11}
FAMILIES = (
    Family(
        name="moe_bf16_expert_gemm",
        op_type="moe",
        twin={**TWIN, "n": 24, "k": 80},
        plan=PLAN,
        make_inputs=bf16_inputs,
        strided=("hidden_states",),
        isolated=("hidden_states",),
        oracle=bf16_oracle,
        compare={"output": PRODUCT},
        kernels=(BF16,),
    ),
    Family(
        name="moe_fp8_block_scale_expert_gemm",
        op_type="moe",
        twin={**TWIN, "n": 256, "k": 384, "num_n_blocks": 2, "num_k_blocks": 3},
        plan=FP8_PLAN,
        make_inputs=fp8_inputs,
        isolated=("hidden_states",),  # its quantizer takes dense rows
        oracle=fp8_oracle,
        compare={"output": QUANTIZED},
        kernels=(FP8,),
    ),
)
