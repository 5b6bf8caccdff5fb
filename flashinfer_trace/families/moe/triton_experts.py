"""SGLang's Triton experts (fused_experts), which SGLang runs for bfloat16 weights unless it is told otherwise.

Their first product is [gate, up], where the Definitions have [up, gate], as flashinfer's kernels take it: the halves
are exchanged before the call. Experts of other ranks have the id -1, and rows of theirs are left out.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.family import Inputs

__all__ = ["FUSED_EXPERTS", "fused_experts"]

FUSED_EXPERTS = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"


def fused_experts(definition: Definition, inputs: Inputs, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the local experts among the chosen ones: weights float32 and ids int32, [tokens, top_k]."""
    from sglang.srt import server_args
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    # The functions ask a running server for these two settings.
    settings = SimpleNamespace(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
    server_args.set_global_server_args_for_scheduler(settings)
    axes, first = definition.const_axes, inputs["gemm1_weights"]
    local = ids - int(inputs["local_expert_offset"])
    local = torch.where((local >= 0) & (local < axes["num_local_experts"]), local, -1).to(torch.int32)
    config = MoeRunnerConfig(
        num_experts=axes["num_experts"],
        num_local_experts=axes["num_local_experts"],
        hidden_size=axes["hidden_size"],
        intermediate_size_per_partition=axes["intermediate_size"],
        top_k=axes["top_k"],
        inplace=False,
    )
    chosen = StandardTopKOutput(weights, local, inputs["routing_logits"])
    gate_up = first.roll(axes["intermediate_size"], dims=1)
    result: torch.Tensor = fused_moe.fused_experts(
        inputs["hidden_states"], gate_up, inputs["gemm2_weights"], chosen, config
    )
    return result
