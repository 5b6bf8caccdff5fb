"""DeepSeek-V3 routing with experts in fp8 blocks, in bfloat16, and in nvfp4."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import called
from flashinfer_trace.families.moe import kernels
from flashinfer_trace.families.moe.gating import KIMI_K2_CALL, ROUTER_CALL
from flashinfer_trace.families.moe.inputs import (
    CORNER_VALUES,
    FEW_TOKENS,
    FP8_TWIN,
    ROUTINGS,
    SPARE_ROWS,
    TWIN,
    VALUES,
    clear_rows,
    experts_family,
    faint_logits,
    fp8_experts,
    ranks_of,
    spoil_unchosen,
    tied_logits,
)
from flashinfer_trace.families.moe.nvfp4 import BLOCK, E4M3_MAX, LARGEST, UNVERIFIED, drawn_tensor, scaled_values
from flashinfer_trace.families.moe.oracle import (
    BF16,
    FP8_BLOCKS,
    Arithmetic,
    chosen,
    experts_oracle,
    grouped_choice,
    route,
)
from flashinfer_trace.families.moe.softmax import BF16_HOPPER, bf16_experts
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans


@dataclass(frozen=True)
class RoutingOptions:
    """The inputs that a kernel accepts: `ties`, equal scores, where it chooses the lower index; `faint`, logits
    below -17, where trtllm-gen's sigmoid, 0.5 tanh(x / 2) + 0.5, is 0 (RoutingKernel.cuh) and it divides by sums of
    these."""

    ties: bool = True
    faint: bool = True


TRTLLM_GEN = RoutingOptions(faint=False)


def run_pipeline(
    gate: tuple[str, str], products: kernels.Products, definition: Definition, inputs: Inputs, outputs: Outputs
) -> Outputs:
    """sgl-kernel's pipeline with a gate: weights float32 and ids int32 of the chosen experts, [seq_len, top_k]."""
    weights, ids = called(*gate, definition, inputs)
    return kernels.run_experts(definition, inputs, outputs, weights, ids, products)


STEPS = "prepare_moe_input, shuffle_rows, silu_and_mul, group_quant, shuffle_mul_sum"
#: Options of SGLang's gates; see `gating`.
WITHOUT_TIES = RoutingOptions(ties=False)

KERNELS = (
    *(
        kernels.experts_kernel(
            kernels.GROUPED_PRODUCT,
            functools.partial(run_pipeline, gate, kernels.fp8_products),
            kernels.HOPPER,
            f"pipeline: {gate[0].rpartition('.')[2]}, {STEPS}",
            WITHOUT_TIES,
        )
        for gate in (ROUTER_CALL, KIMI_K2_CALL)
    ),
    kernels.experts_kernel(
        kernels.TRTLLM_FP8,
        functools.partial(kernels.trtllm_gen, kernels.DEEPSEEK, "DeepSeekV3"),
        kernels.BLACKWELL,
        options=TRTLLM_GEN,
    ),
)

#: ``large`` biases dwarf the scores, as those of trained models may: s + bias then loses bits in float32. With
#: ``negative`` ones all s + bias are below zero, so a kernel must not mark dropped experts by zero.
BIASES = ("zero", "small", "large", "negative")
FACTORS = (2.5, 1.0, 0.75)
#: Smallest gap between a chosen and a rejected score, over 1 + |bias|: several float32 roundings of a sum of two.
GAP = 2.0**-18


def few_stay_local(request: PlanRequest, plan: Plan) -> Plan:
    """Few tokens choose local experts only; otherwise most would choose none on this rank, and prove nothing."""
    few = plan["seq_len"] < FEW_TOKENS and plan["routing"] != "elsewhere"
    return {**plan, "routing": "local"} if few else plan


def corners(request: PlanRequest) -> list[Plan]:
    """Experts with one token; negative biases; sums of scores near 1e-9 (1e-13 on a CPU) where a kernel takes them; on
    a CPU also biases and hidden states beyond float16's range (`softmax.corners` says why)."""
    options = request.options_of(RoutingOptions)
    routing = "faint" if request.large else "faintest"
    faint = [{"routing": routing, "bias": "zero"}] if options.ties and options.faint else []
    found: list[Plan] = [{"seq_len": 1, "routing": "local"}, {"routing": "local", "bias": "negative"}, *faint]
    if request.large:
        return found
    return [*found, {"bias": "beyond_float16", "values": "huge", "rank": ranks_of(request)[-1]}]


PLAN = RowPlans(
    {"seq_len": Count(96, 300)},
    {
        "routing": lambda r: [one for one in ROUTINGS if one != "ties" or r.options_of(RoutingOptions).ties],
        "bias": Drawn(lambda request: st.sampled_from(BIASES), "small"),
        "values": tuple(VALUES),
        "zero_row": FLAG,
        "rank": ranks_of,
        "factor": FACTORS,
        "ties": lambda request: (request.options_of(RoutingOptions).ties,),
    },
    special=corners,
    fit=few_stay_local,
    many_rows=300,
)


def draw_bias(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    """bfloat16 [num_experts]. Large biases are 32 or 32.25, which are neighbors in bfloat16."""
    shape = [definition.const_axes["num_experts"]]
    if plan["bias"] == "beyond_float16":
        return (torch.arange(1, shape[0] + 1, device=draws.device) * 65536.0).to(torch.bfloat16)
    if plan["bias"] == "large" and plan["routing"] != "one_expert":
        return (draws.integers(shape, 0, 1).float() * 0.25 + 32).to(torch.bfloat16)
    level = -3.0 if plan["bias"] == "negative" else 0.0
    if plan["bias"] in ("small", "negative") and plan["routing"] not in ("one_expert", "ties"):
        return draws.normal(shape, torch.bfloat16, 0.05) + level
    return torch.full(shape, level, dtype=torch.bfloat16, device=draws.device)


def decidable(definition: Definition, logits: torch.Tensor, bias: torch.Tensor, ties: bool = True) -> torch.Tensor:
    """Rows whose choice float32 cannot change: each boundary is an exact tie, unless `ties` is false, or a gap larger
    than rounding errors."""
    axes = definition.const_axes
    candidates, group_scores = grouped_choice(definition, torch.sigmoid(logits.double()) + bias.double())
    smallest = GAP * (1 + float(bias.double().abs().max()))
    clear = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for scores, count in ((group_scores, axes["topk_group"]), (candidates, axes["top_k"])):
        if count < scores.shape[1]:
            ordered = scores.sort(dim=1, descending=True).values
            gap = ordered[:, count - 1] - ordered[:, count]
            clear &= (ties & (gap == 0)) | (gap > smallest)
    return clear


def draw_logits(definition: Definition, plan: Plan, bias: torch.Tensor, draws: Draws) -> torch.Tensor:
    axes, count = definition.const_axes, plan["seq_len"]
    shape = [count + SPARE_ROWS, axes["num_experts"]]
    first = plan["rank"] * axes["num_local_experts"]
    here = slice(first, first + axes["num_local_experts"])
    logits = tied_logits(shape, draws) if plan["routing"] == "ties" else draws.normal(shape)
    if plan["routing"] in ("faint", "faintest"):
        logits = faint_logits(logits, plan["routing"])
    if plan["routing"] == "local":
        logits -= 4
        logits[:, here] += 8
    elif plan["routing"] in ("one_expert", "elsewhere"):
        logits[:, here] -= 8
    if plan["routing"] == "one_expert":
        # Its group must be kept for one good expert: experts elsewhere are weak, but better than the others here.
        logits -= 3
        logits[:, first + axes["num_local_experts"] // 2] += 19
    return clear_rows(logits, decidable(definition, logits, bias, plan["ties"]), count)


def make_inputs(
    experts: Callable[[Definition, Plan, Draws], Inputs], definition: Definition, plan: Plan, draws: Draws
) -> Inputs:
    bias = draw_bias(definition, plan, draws)
    found = {
        "routing_logits": draw_logits(definition, plan, bias, draws),
        "routing_bias": bias,
        **experts(definition, plan, draws),
        "local_expert_offset": plan["rank"] * definition.const_axes["num_local_experts"],
        "routed_scaling_factor": plan["factor"],
    }
    return spoil_unchosen(definition, plan, found, lambda: route(definition, found) > 0)


#: Rows that trtllm-gen's epilogue permutes together, and input features of one block of its weights.
EPILOGUE_ROWS, BLOCK_K = 128, 128


def shuffled_bf16(weights: torch.Tensor, gated: bool) -> torch.Tensor:
    """Weights [experts, rows, k] in the order of trtllm-gen: rows permuted, then in blocks of BLOCK_K features."""
    from flashinfer.fused_moe import convert_to_block_layout
    from flashinfer.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices, get_w2_permute_indices_with_cache

    cache: dict[object, torch.Tensor] = {}
    found = []
    for expert in weights.view(torch.uint8):
        if gated:
            order = _maybe_get_cached_w3_w1_permute_indices(cache, expert, EPILOGUE_ROWS, is_gated_act_gemm=True)
        else:
            order = get_w2_permute_indices_with_cache(cache, expert, EPILOGUE_ROWS)
        found.append(convert_to_block_layout(expert[order.to(expert.device)].contiguous(), BLOCK_K).view(weights.dtype))
    return torch.stack(found).contiguous()


def run_trtllm_bf16(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.fused_moe import RoutingMethodType, WeightLayout

    given = {
        **inputs,
        "gemm1": shuffled_bf16(inputs["gemm1_weights"], True),
        "gemm2": shuffled_bf16(inputs["gemm2_weights"], False),
        "method": RoutingMethodType.DeepSeekV3.value,
        "layout": WeightLayout.BlockMajorK,
    }
    text = f"{kernels.TRTLLM} {kernels.DEEPSEEK} gemm1_weights=gemm1 gemm2_weights=gemm2".replace(
        "hidden_states_scale= ", ""
    )
    text = f"{text} routing_method_type=method use_shuffled_weight=True weight_layout=layout"
    return {"output": called(TRTLLM_BF16, text, definition, given)}


TRTLLM_BF16 = "flashinfer.fused_moe.trtllm_bf16_moe"
BF16_KERNELS = (
    kernels.experts_kernel(
        "torch.nn.functional.grouped_mm",
        functools.partial(run_pipeline, ROUTER_CALL, kernels.bf16_products),
        BF16_HOPPER,
        "pipeline with sgl_kernel: moe_fused_gate, prepare_moe_input, shuffle_rows, silu_and_mul, shuffle_mul_sum",
        WITHOUT_TIES,
    ),
    kernels.experts_kernel(TRTLLM_BF16, run_trtllm_bf16, BF16_HOPPER, options=TRTLLM_GEN),
)

#: Standard deviation of what `drawn_tensor` draws: codes of 2.93 times scales of 4.7, both as root mean squares.
SIGMA = 13.8
#: Distance of the codes of e2m1, by magnitude: below 2, below 4, and up to 6.
FP4_STEPS = (0.5, 1.0, 2.0)
#: Relative error of an e4m3 scale, and its absolute error below the smallest normal number.
SCALE_ROUNDING, SMALLEST_SCALE = 2.0**-4, 2.0**-10


def nvfp4_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Random codes; factors of the experts give gates and activations their planned magnitudes. A typical activation is
    a thirtieth of nvfp4's largest number, 448 x 6: few blocks have a scale that e4m3 lacks."""
    axes, experts = definition.const_axes, definition.const_axes["num_local_experts"]
    bias = draw_bias(definition, plan, draws)
    hidden, hidden_scale = drawn_tensor([plan["seq_len"], axes["hidden_size"]], False, draws)
    if plan["zero_row"] and len(hidden):
        hidden[len(hidden) // 2] = 0
    gemm1, gemm1_scale = drawn_tensor([experts, axes["gemm1_out_size"], axes["hidden_size"]], False, draws)
    gemm2, gemm2_scale = drawn_tensor([experts, axes["hidden_size"], axes["intermediate_size"]], False, draws)
    size = {**VALUES, **CORNER_VALUES}[plan["values"]]
    typical = size * max(size / 4, 0.5) if size < 1 else size * size / 2
    gate, up, down = (torch.exp2(draws.uniform([experts], -0.5, 0.5)) for _ in range(3))
    quantized = E4M3_MAX * LARGEST / (30 * typical)
    product = SIGMA**2 * axes["hidden_size"] ** 0.5
    return {
        "routing_logits": draw_logits(definition, plan, bias, draws),
        "routing_bias": bias,
        "hidden_states": hidden,
        "hidden_states_scale": hidden_scale,
        "gemm1_weights": gemm1,
        "gemm1_weights_scale": gemm1_scale,
        "gemm2_weights": gemm2,
        "gemm2_weights_scale": gemm2_scale,
        "output1_scale_scalar": up * (size * quantized / product),
        "output1_scale_gate_scalar": gate * (size / product),
        "output2_scale_scalar": down / (quantized * SIGMA * axes["intermediate_size"] ** 0.5),
        "local_expert_offset": plan["rank"] * experts,
        "routed_scaling_factor": plan["factor"],
    }


def gate_up(inputs: Inputs, experts: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = scaled_values(chosen(inputs["hidden_states"], token), chosen(inputs["hidden_states_scale"], token))
    weights = scaled_values(chosen(inputs["gemm1_weights"], experts), chosen(inputs["gemm1_weights_scale"], experts))
    up, gate = (inputs[f"output1_scale_{name}"][experts].double() for name in ("scalar", "gate_scalar"))
    rows = weights.shape[1] // 2
    factors = torch.cat([up[:, None].expand(-1, rows), gate[:, None].expand(-1, rows)], dim=1)
    weights = weights * factors.unsqueeze(2)
    return x @ weights.mT, x.square() @ weights.square().mT


def down_matrix(inputs: Inputs, experts: torch.Tensor) -> torch.Tensor:
    codes, scales = chosen(inputs["gemm2_weights"], experts), chosen(inputs["gemm2_weights_scale"], experts)
    factors: torch.Tensor = inputs["output2_scale_scalar"][experts].double().view(-1, 1, 1)
    return scaled_values(codes, scales) * factors


def z_variances(z: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """trtllm-gen's first product goes through silu in float32."""
    return torch.stack([torch.zeros_like(z), torch.zeros_like(z)])


def y_variances(y: torch.Tensor) -> torch.Tensor:
    """Rounding to e2m1 in blocks of 16: a twelfth of the squared distance of codes, plus the loss to a small scale."""
    blocks = y.view(*y.shape[:-1], y.shape[-1] // BLOCK, BLOCK).abs()
    scale = blocks.amax(dim=-1, keepdim=True) / LARGEST
    off = (scale * SCALE_ROUNDING).clamp_min(SMALLEST_SCALE)
    low, high = (scale - off).clamp_min(0.0), scale + off
    step = (
        torch.where(blocks < 2 * high, FP4_STEPS[0], torch.where(blocks < 4 * high, FP4_STEPS[1], FP4_STEPS[2])) * high
    )
    cut = (blocks - LARGEST * low).clamp_min(0.0)
    rounded = (step.square() / 12 + cut.square()).flatten(-2)
    return torch.stack([torch.zeros_like(y), rounded])


NVFP4 = Arithmetic(
    models=("float32", "blackwell"),
    gate_up=gate_up,
    down=lambda inputs, experts, y: y @ down_matrix(inputs, experts).mT,
    down_weights=lambda inputs, experts: down_matrix(inputs, experts).float(),
    z_variances=z_variances,
    y_variances=y_variances,
    rounds_results=(False, True),
    rounds_weights=(False, False),
)


FP4_BLACKWELL = kernels.bound(
    "blackwell",
    "8 standard deviations of what trtllm-gen rounds: the activation to e2m1 in groups of 16 with e4m3 scales, and "
    "results to bf16; for the scale of all elements, 5 standard deviations",
    0.0,
)


def shuffled_nvfp4(weights: torch.Tensor, scales: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales [experts, rows, ...] in the order of trtllm-gen: rows permuted, scales also in tiles."""
    from flashinfer import block_scale_interleave
    from flashinfer.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices, get_w2_permute_indices_with_cache

    order_of = _maybe_get_cached_w3_w1_permute_indices if gated else get_w2_permute_indices_with_cache
    found = []
    for matrix, listed in zip(weights.view(torch.uint8), scales.view(torch.uint8), strict=True):
        rows = order_of({}, matrix, EPILOGUE_ROWS).to(matrix.device)
        of_scales = order_of({}, listed, EPILOGUE_ROWS, num_elts_per_sf=BLOCK).to(matrix.device)
        found.append((matrix[rows], block_scale_interleave(listed[of_scales].contiguous()).view(listed.shape)))
    matrices, tiles = (torch.stack(each).contiguous() for each in zip(*found, strict=True))
    return matrices, tiles.view(torch.float8_e4m3fn)


def run_trtllm_fp4(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.fused_moe import RoutingMethodType

    given = {**inputs, "method": RoutingMethodType.DeepSeekV3.value}
    given["hidden_states"] = inputs["hidden_states"].view(torch.uint8)
    for name in ("gemm1_weights", "gemm2_weights"):
        scale = f"{name}_scale"
        given[name], given[scale] = shuffled_nvfp4(inputs[name], inputs[scale], name == "gemm1_weights")
    absent = ("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")
    present = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
    words = [*(f"{name}=None" for name in absent), *(f"{name}=" for name in present)]
    words += [f"{name}=" for name in inputs if name.startswith("output")]
    text = " ".join((kernels.TRTLLM, kernels.DEEPSEEK, *words, "routing_method_type=method"))
    return {"output": called("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", text, definition, given)[0]}


TRTLLM_FP4 = "flashinfer.fused_moe.trtllm_fp4_block_scale_moe"
NVFP4_KERNELS = (kernels.experts_kernel(TRTLLM_FP4, run_trtllm_fp4, FP4_BLACKWELL, options=TRTLLM_GEN),)
BF16_TWIN = {**TWIN, "n_group": 4, "topk_group": 2}
NVFP4_SIZES = {"hidden_size": 160, "intermediate_size": 96, "gemm1_out_size": 192, "hidden_bytes": 80}
NVFP4_BLOCKS = {"intermediate_bytes": 48, "num_hidden_blocks": 10, "num_intermediate_blocks": 6}
FAMILIES = tuple(
    experts_family(
        f"moe_{name}_ds_routing", twin, PLAN, inputs, functools.partial(experts_oracle, arithmetic, route), *more
    )
    for name, twin, inputs, arithmetic, *more in (
        ("fp8_block_scale", FP8_TWIN, functools.partial(make_inputs, fp8_experts), FP8_BLOCKS, KERNELS),
        ("bf16", BF16_TWIN, functools.partial(make_inputs, bf16_experts), BF16, BF16_KERNELS),
        ("nvfp4", {**BF16_TWIN, **NVFP4_SIZES, **NVFP4_BLOCKS}, nvfp4_inputs, NVFP4, NVFP4_KERNELS, UNVERIFIED),
    )
)
