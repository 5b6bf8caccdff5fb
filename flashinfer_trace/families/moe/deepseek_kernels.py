"""The kernels of DeepSeek routing with experts in fp8 blocks."""

from __future__ import annotations

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.moe.kernels import HOPPER, blackwell_kernel, hopper_pipeline, trtllm_gen
from flashinfer_trace.families.moe.pipeline import fp8_products, run_experts
from flashinfer_trace.harness.family import Inputs, Outputs


def ds_gate(definition: Definition, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and ids int32 of the experts that DeepSeek's gate chooses, both [seq_len, top_k]."""
    import sgl_kernel

    axes = definition.const_axes
    weights, ids = sgl_kernel.moe_fused_gate(
        inputs["routing_logits"],
        inputs["routing_bias"].float(),
        axes["n_group"],
        axes["topk_group"],
        axes["top_k"],
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        apply_routed_scaling_factor_on_output=True,
    )
    return weights, ids


def run_ds_pipeline(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """sgl-kernel's pipeline with DeepSeek's gate."""
    return run_experts(definition, inputs, outputs, *ds_gate(definition, inputs), fp8_products)


def run_ds_trtllm_gen(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.fused_moe import RoutingMethodType

    return trtllm_gen(
        definition,
        inputs,
        n_group=definition.const_axes["n_group"],
        topk_group=definition.const_axes["topk_group"],
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        routing_method_type=RoutingMethodType.DeepSeekV3.value,
    )


def unsupported_by_fused_gate(definition: Definition) -> str | None:
    """Why sgl_kernel.moe_fused_gate does not route this Definition, or None."""
    experts, groups = definition.const_axes["num_experts"], definition.const_axes["n_group"]
    if experts & (experts - 1):
        return f"moe_fused_gate needs a power of two as the number of experts, not {experts}"
    return (
        f"moe_fused_gate takes up to 32 experts per group, not {experts // groups}" if experts > 32 * groups else None
    )


KERNELS = (
    hopper_pipeline(
        "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
        "sglang-kernel",
        run_ds_pipeline,
        "pipeline: moe_fused_gate, prepare_moe_input, shuffle_rows, silu_and_mul, group_quant, shuffle_mul_sum",
        HOPPER,
        unsupported_by_fused_gate,
    ),
    blackwell_kernel(run_ds_trtllm_gen),
)
