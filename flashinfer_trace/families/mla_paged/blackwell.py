"""The kernels of latent attention that need Blackwell, called as SGLang calls them.

None of them has been run here. flashinfer's kernels for Hopper prove the same functions. The roundings of these kernels
are not known. The bounds allow those of flashinfer's fa2: the weights before they are summed, and partial outputs.
"""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.families.attention.cases import AttentionOptions, kv_lengths
from flashinfer_trace.families.attention.kernels import BATCHES, PAGES, table_of
from flashinfer_trace.families.attention.policies import Rounding, kernel_policies
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs

ROUNDING = Rounding(weights=True, sum=True, partial=1)
#: Workspace that SGLang gives trtllm-gen; it must be zeros before the first call.
WORKSPACE_BYTES = 150 * 2**20
#: The dimension of a head before absorption, which only names the model to trtllm-gen.
HEAD_DIM_NOPE = 128


@functools.cache
def workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def call_trtllm(
    definition: Definition,
    inputs: Inputs,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    *,
    return_lse: bool,
) -> tuple[torch.Tensor, ...]:
    """trtllm-gen's decode over a cache of concatenated keys [num_pages, page_size, 576]: the output, and its lse."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    query = torch.cat((inputs["q_nope"], inputs["q_pe"]), dim=-1).unsqueeze(1)
    found = trtllm_batch_decode_with_kv_cache_mla(
        query=query,
        kv_cache=kv_cache.unsqueeze(1),
        workspace_buffer=workspace(query.device),
        qk_nope_head_dim=HEAD_DIM_NOPE,
        kv_lora_rank=definition.const_axes["head_dim_ckv"],
        qk_rope_head_dim=definition.const_axes["head_dim_kpe"],
        block_tables=page_table,
        seq_lens=seq_lens,
        max_seq_len=page_table.shape[1] * definition.const_axes["page_size"],
        bmm1_scale=float(inputs["sm_scale"]),
        backend="trtllm-gen",
        return_lse=return_lse,
    )
    output, *rest = found if return_lse else (found,)
    return output.view_as(inputs["q_nope"]), *rest


def run_trtllm_decode(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    page_size = definition.const_axes["page_size"]
    cache = torch.cat((inputs["ckv_cache"], inputs["kpe_cache"]), dim=-1)
    table = table_of(inputs, page_size)
    output, lse = call_trtllm(definition, inputs, cache, kv_lengths(inputs, page_size), table, return_lse=True)
    return {"output": output, "lse": lse}


TRTLLM_DECODE = Kernel(
    "flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla",
    run_trtllm_decode,
    limits={**BATCHES, **PAGES},
    plan_options=AttentionOptions(),
    compare=kernel_policies(ROUNDING),
)
