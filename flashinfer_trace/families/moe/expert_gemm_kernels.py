"""SGLang's Triton kernel for products of chosen experts, called through SGLang's own wrapper."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.families.moe.products import TRUNCATED
from flashinfer_trace.families.moe.rows import TRITON_MODULE
from flashinfer_trace.families.quantised import BLOCK
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs

ALIGN_MODULE = "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size"


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
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_kernels import invoke_fused_moe_kernel
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    axes, ids, scales = definition.const_axes, inputs["topk_ids"], inputs.get("weights_scale")
    fp8 = scales is not None
    config: dict[str, Any] = default_config(len(ids), axes["num_experts"], fp8)
    sorted_ids, expert_ids, padded = moe_align_block_size(ids, config["BLOCK_SIZE_M"], axes["num_experts"])
    rows: torch.Tensor = inputs["hidden_states"].flatten(0, 1)
    invoke_fused_moe_kernel(
        A=rows,
        B=inputs["weights"],
        bias=None,
        C=outputs["output"],
        A_scale=None,
        B_scale=scales,
        B_zp=None,
        topk_weights=inputs["topk_weights"],
        topk_ids=ids,
        sorted_token_ids=sorted_ids,
        expert_ids=expert_ids,
        num_tokens_post_padded=padded,
        mul_routed_weight=bool(inputs["mul_routed_weight"]),
        top_k=axes["top_k"] // axes["rows_per_token"],
        config=config,
        compute_type=tl.bfloat16,
        use_fp8_w8a8=fp8,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
        block_shape=[BLOCK, BLOCK] if fp8 else None,
        filter_expert=True,
    )
    return outputs


BF16 = Kernel(f"{TRITON_MODULE}.fused_moe_kernel", run_fused_moe, limits=LAUNCHABLE)
FP8 = Kernel(
    f"{TRITON_MODULE}.fused_moe_kernel",
    run_fused_moe,
    variant="fp8 blocks",
    limits=LAUNCHABLE,
    compare={"output": TRUNCATED},
)
