"""DeepSeek-V3 routing with experts in nvfp4: the exact products, what Blackwell's kernel rounds, and the record."""

from __future__ import annotations

import torch

from flashinfer_trace.families.moe.deepseek import PLAN, draw_bias, draw_logits
from flashinfer_trace.families.moe.deepseek_kernels import TRTLLM_GEN
from flashinfer_trace.families.moe.experts import Arithmetic, chosen, expert_outputs
from flashinfer_trace.families.moe.inputs import CORNER_VALUES, VALUES, experts_family
from flashinfer_trace.families.moe.kernels import bound, experts_kernel
from flashinfer_trace.families.moe.nvfp4 import BLOCK, E4M3_MAX, LARGEST, UNVERIFIED, drawn_tensor, scaled_values
from flashinfer_trace.families.moe.oracle import route
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import Expected

#: Standard deviation of what `drawn_tensor` draws: codes of 2.93 times scales of 4.7, both as root mean squares.
SIGMA = 13.8
#: Rows that trtllm-gen's epilogue permutes together.
EPILOGUE_ROWS = 128
#: Distance of the codes of e2m1, by magnitude: below 2, below 4, and up to 6.
STEPS = (0.5, 1.0, 2.0)
#: Relative error of an e4m3 scale, and its absolute error below the smallest normal number.
SCALE_ROUNDING, SMALLEST_SCALE = 2.0**-4, 2.0**-10


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Random codes; the factors of the experts give the gates and the activations their planned magnitudes.

    An activation of the typical magnitude is a thirtieth of the largest number of nvfp4, 448 x 6: few blocks have a
    scale that is cut off or too small for e4m3.
    """
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
    """Rounding to e2m1 in blocks of 16: a twelfth of the squared distance of codes, and what a small scale cuts off."""
    blocks = y.view(*y.shape[:-1], y.shape[-1] // BLOCK, BLOCK).abs()
    scale = blocks.amax(dim=-1, keepdim=True) / LARGEST
    off = (scale * SCALE_ROUNDING).clamp_min(SMALLEST_SCALE)
    low, high = (scale - off).clamp_min(0.0), scale + off
    step = torch.where(blocks < 2 * high, STEPS[0], torch.where(blocks < 4 * high, STEPS[1], STEPS[2])) * high
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


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return expert_outputs(NVFP4, definition, inputs, route(definition, inputs))


BLACKWELL = bound(
    "blackwell",
    "8 standard deviations of what trtllm-gen rounds: the activation to e2m1 in groups of 16 with e4m3 scales, and "
    "results to bf16; for the scale of all elements, 5 standard deviations",
    0.0,
)


def shuffled(weights: torch.Tensor, scales: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
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


def run_trtllm_gen(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.fused_moe import RoutingMethodType, trtllm_fp4_block_scale_moe

    axes = definition.const_axes
    gemm1, gemm1_scale = shuffled(inputs["gemm1_weights"], inputs["gemm1_weights_scale"], True)
    gemm2, gemm2_scale = shuffled(inputs["gemm2_weights"], inputs["gemm2_weights_scale"], False)
    found = trtllm_fp4_block_scale_moe(
        routing_logits=inputs["routing_logits"],
        routing_bias=inputs["routing_bias"],
        hidden_states=inputs["hidden_states"].view(torch.uint8),
        hidden_states_scale=inputs["hidden_states_scale"],
        gemm1_weights=gemm1,
        gemm1_weights_scale=gemm1_scale,
        gemm1_bias=None,
        gemm1_alpha=None,
        gemm1_beta=None,
        gemm1_clamp_limit=None,
        gemm2_weights=gemm2,
        gemm2_weights_scale=gemm2_scale,
        gemm2_bias=None,
        **{name: inputs[name] for name in inputs if name.startswith("output")},
        num_experts=axes["num_experts"],
        top_k=axes["top_k"],
        n_group=axes["n_group"],
        topk_group=axes["topk_group"],
        intermediate_size=axes["intermediate_size"],
        local_expert_offset=int(inputs["local_expert_offset"]),
        local_num_experts=axes["num_local_experts"],
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        routing_method_type=RoutingMethodType.DeepSeekV3.value,
    )
    return {"output": found[0]}


FAMILIES = (
    experts_family(
        "moe_nvfp4_ds_routing",
        {
            "num_experts": 32,
            "num_local_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "hidden_size": 160,
            "intermediate_size": 96,
            "gemm1_out_size": 192,
            "hidden_bytes": 80,
            "intermediate_bytes": 48,
            "num_hidden_blocks": 10,
            "num_intermediate_blocks": 6,
        },
        PLAN,
        make_inputs,
        oracle,
        (
            experts_kernel(
                "flashinfer.fused_moe.trtllm_fp4_block_scale_moe", run_trtllm_gen, BLACKWELL, options=TRTLLM_GEN
            ),
        ),
        UNVERIFIED,
    ),
)
