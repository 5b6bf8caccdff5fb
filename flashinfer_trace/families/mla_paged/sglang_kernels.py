"""The kernels of latent attention that SGLang's Triton and FlashMLA backends call, on Hopper.

FlashMLA takes pages of 64 tokens and a table of them. It keeps its partial outputs in float32, sums weights before it
rounds them to bf16, and returns the natural lse. Its lse of a request without keys is +inf; SGLang never has such a
request, so plans do not draw any. Its wheel (sgl-flash-mla 1.0.0) calls all kernels for Hopper legacy.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention import triton
from flashinfer_trace.families.attention.cases import kv_lengths
from flashinfer_trace.families.attention.kernels import BATCHES, PAGES, WITH_KEYS, table_of
from flashinfer_trace.families.attention.policies import LOG2_E, kernel_policies
from flashinfer_trace.families.mla_paged.inputs import queries_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs

PAGE_SIZE = 64


def cache_of(inputs: Inputs) -> torch.Tensor:
    """The cache of concatenated keys [num_pages, page_size, 1, 576], which models store."""
    return torch.cat((inputs["ckv_cache"], inputs["kpe_cache"]), dim=-1).unsqueeze(2)


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's Triton kernel: values are the first part of the keys, which it loads once."""
    keys = cache_of(inputs).flatten(0, 1)
    values = keys[..., : definition.const_axes["head_dim_ckv"]]
    arguments = (inputs["kv_indptr"], inputs["kv_indices"], float(inputs["sm_scale"]))
    return triton.attend(queries_of(inputs), keys, values, *arguments, outputs["output"], has_mla=True)


def run_flash_mla(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang's decode calls it: one query per request, and metadata that split its keys over the GPU."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    axes, lengths = definition.const_axes, kv_lengths(inputs, PAGE_SIZE)
    output, lse = flash_mla_with_kvcache(
        q=queries_of(inputs).unsqueeze(1),
        k_cache=cache_of(inputs),
        block_table=table_of(inputs, PAGE_SIZE),
        cache_seqlens=lengths,
        head_dim_v=axes["head_dim_ckv"],
        tile_scheduler_metadata=get_mla_metadata()[0],
        softmax_scale=float(inputs["sm_scale"]),
        causal=True,
        use_legacy=True,
    )
    return {"output": output.squeeze(1), "lse": lse.squeeze(2) * LOG2_E}


TRITON_DECODE = triton.decode_kernel(run_triton)
FLASH_MLA = Kernel(
    "flash_mla.flash_mla_with_kvcache",
    run_flash_mla,
    variant="with get_mla_metadata",
    limits={**BATCHES, **PAGES},
    plan_options=WITH_KEYS,
    compare=kernel_policies(triton.ROUNDING),
)
