"""The kernels of DeepSeek routing with experts in fp8 blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_trace.families.moe.gating_kernels import run_kimi_k2, run_router
from flashinfer_trace.families.moe.kernels import BLACKWELL, HOPPER, TRTLLM_FP8, experts_kernel, trtllm_gen
from flashinfer_trace.families.moe.pipeline import fp8_products, run_experts
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs


@dataclass(frozen=True)
class RoutingOptions:
    """What a kernel takes.

    Attributes:
        ties: whether experts may have equal scores; otherwise it need not choose the lower index.
        faint: whether logits may be below -17. trtllm-gen computes a sigmoid as 0.5 tanh(x / 2) + 0.5, which is 0 there
            in float32 (RoutingKernel.cuh, sigmoid_accurate), and divides by the sum of such zeros.
    """

    ties: bool = True
    faint: bool = True


TRTLLM_GEN = RoutingOptions(faint=False)


def ds_gate(definition: Definition, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and ids int32 of the experts that DeepSeek's gate chooses, both [seq_len, top_k]."""
    chosen = run_router(definition, inputs, {})
    return chosen["topk_weights"], chosen["topk_ids"]


def run_ds_pipeline(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """sgl-kernel's pipeline with DeepSeek's gate."""
    return run_experts(definition, inputs, outputs, *ds_gate(definition, inputs), fp8_products)


def run_one_group_pipeline(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """sgl-kernel's pipeline with the gate of Kimi-K2, whose experts are in one group."""
    chosen = run_kimi_k2(definition, inputs, {})
    return run_experts(definition, inputs, outputs, chosen["topk_weights"], chosen["topk_ids"], fp8_products)


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


GROUPED_PRODUCT = "sgl_kernel.fp8_blockwise_scaled_grouped_mm"
STEPS = "prepare_moe_input, shuffle_rows, silu_and_mul, group_quant, shuffle_mul_sum"

#: What SGLang's gates take; see `gating_kernels`.
WITHOUT_TIES = RoutingOptions(ties=False)

KERNELS = (
    *(
        experts_kernel(GROUPED_PRODUCT, run, HOPPER, f"pipeline: {gate}, {STEPS}", WITHOUT_TIES)
        for run, gate in ((run_ds_pipeline, "moe_fused_gate"), (run_one_group_pipeline, "kimi_k2_moe_fused_gate"))
    ),
    experts_kernel(TRTLLM_FP8, run_ds_trtllm_gen, BLACKWELL, options=TRTLLM_GEN),
)
