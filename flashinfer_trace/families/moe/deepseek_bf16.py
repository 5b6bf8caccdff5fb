"""DeepSeek-V3 routing with experts in bfloat16: the kernels, and the record."""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.families.moe.deepseek import PLAN, make_inputs
from flashinfer_trace.families.moe.deepseek_kernels import TRTLLM_GEN, WITHOUT_TIES, ds_gate
from flashinfer_trace.families.moe.experts import BF16, expert_outputs
from flashinfer_trace.families.moe.inputs import TWIN, experts_family
from flashinfer_trace.families.moe.kernels import experts_kernel
from flashinfer_trace.families.moe.oracle import route
from flashinfer_trace.families.moe.pipeline import bf16_products, run_experts
from flashinfer_trace.families.moe.softmax import bf16_experts
from flashinfer_trace.families.moe.softmax_kernels import BF16_HOPPER
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs
from flashinfer_trace.verdict.compare import Expected

#: Rows that trtllm-gen's epilogue permutes together, and input features of one block of its weights.
EPILOGUE_ROWS, BLOCK_K = 128, 128


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return expert_outputs(BF16, definition, inputs, route(definition, inputs))


def run_pipeline(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return run_experts(definition, inputs, outputs, *ds_gate(definition, inputs), bf16_products)


def shuffled(weights: torch.Tensor, gated: bool) -> torch.Tensor:
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


def run_trtllm_gen(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.fused_moe import RoutingMethodType, WeightLayout, trtllm_bf16_moe

    axes = definition.const_axes
    output = trtllm_bf16_moe(
        routing_logits=inputs["routing_logits"],
        routing_bias=inputs["routing_bias"],
        hidden_states=inputs["hidden_states"],
        gemm1_weights=shuffled(inputs["gemm1_weights"], True),
        gemm2_weights=shuffled(inputs["gemm2_weights"], False),
        num_experts=axes["num_experts"],
        top_k=axes["top_k"],
        n_group=axes["n_group"],
        topk_group=axes["topk_group"],
        intermediate_size=axes["intermediate_size"],
        local_expert_offset=int(inputs["local_expert_offset"]),
        local_num_experts=axes["num_local_experts"],
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        routing_method_type=RoutingMethodType.DeepSeekV3.value,
        use_shuffled_weight=True,
        weight_layout=WeightLayout.BlockMajorK,
    )
    return {"output": output}


FAMILIES = (
    experts_family(
        "moe_bf16_ds_routing",
        {**TWIN, "n_group": 4, "topk_group": 2},
        PLAN,
        functools.partial(make_inputs, bf16_experts),
        oracle,
        (
            experts_kernel(
                "torch.nn.functional.grouped_mm",
                run_pipeline,
                BF16_HOPPER,
                "pipeline with sgl_kernel: moe_fused_gate, prepare_moe_input, shuffle_rows, silu_and_mul, "
                "shuffle_mul_sum",
                WITHOUT_TIES,
            ),
            experts_kernel("flashinfer.fused_moe.trtllm_bf16_moe", run_trtllm_gen, BF16_HOPPER, options=TRTLLM_GEN),
        ),
    ),
)
