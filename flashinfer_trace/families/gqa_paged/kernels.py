"""Kernels of grouped-query attention over a paged cache: flashinfer's batch wrappers.

`families/attention/kernels.py` describes what they do with rows without keys. In addition:

- flashinfer's decode on CUDA cores is compiled for 1, 2, 3, 4 and 8 query heads per key-value head; SGLang uses the
  tensor cores (fa2) from 4 on.
- get_seq_lens counts kv_last_page_len even for a request without pages, so it must be 0 there.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention import triton
from flashinfer_trace.families.attention.kernels import (
    BATCHES,
    CUDA_CORES,
    FA2,
    FA3,
    PAGES,
    QUERIES,
    SEEING,
    WITH_KEYS,
    flashinfer_kernels,
    masking,
    wrapper,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs

DECODE_PATH = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"
PREFILL_PATH = "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper"


def last_page_len(inputs: Inputs) -> torch.Tensor:
    """Tokens in the last page of each request: int32 [batch_size]; 0 for a request without pages."""
    pages = inputs["kv_indptr"].diff()
    return torch.where(pages > 0, inputs.get("kv_last_page_len", 1), 0).to(torch.int32)


def sizes(definition: Definition) -> list[int]:
    return [definition.const_axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")]


def run_decode(backend: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """flashinfer's decode wrapper."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    q = inputs["q"]
    options = {} if backend == CUDA_CORES.name else {"use_tensor_cores": True, "backend": backend}
    decode = wrapper(BatchDecodeWithPagedKVCacheWrapper, q.device, kv_layout="NHD", **options)
    decode.plan(
        inputs["kv_indptr"],
        inputs["kv_indices"],
        last_page_len(inputs),
        *sizes(definition),
        q_data_type=q.dtype,
        kv_data_type=inputs["k_cache"].dtype,
        sm_scale=float(inputs["sm_scale"]),
        **masking(definition),
    )
    caches = (inputs["k_cache"], inputs["v_cache"])
    decode.run(q, caches, out=outputs["output"], lse=outputs["lse"], return_lse=True)
    return outputs


def run_prefill(backend: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """flashinfer's paged prefill wrapper."""
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    q = inputs["q"]
    prefill = wrapper(BatchPrefillWithPagedKVCacheWrapper, q.device, kv_layout="NHD", backend=backend)
    prefill.plan(
        inputs["qo_indptr"],
        inputs["kv_indptr"],
        inputs["kv_indices"],
        last_page_len(inputs),
        *sizes(definition),
        causal=True,
        sm_scale=float(inputs["sm_scale"]),
        **masking(definition),
        q_data_type=q.dtype,
        kv_data_type=inputs["k_cache"].dtype,
    )
    caches = (inputs["k_cache"], inputs["v_cache"])
    prefill.run(q, caches, out=outputs["output"], lse=outputs["lse"], return_lse=True)
    return outputs


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's Triton kernel, for slots of one token."""
    keys, values = (inputs[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    arguments = (inputs["kv_indptr"], inputs["kv_indices"], float(inputs["sm_scale"]))
    return triton.attend(inputs["q"], keys, values, *arguments, outputs["output"])


DECODE_LIMITS = {**BATCHES, **PAGES}
DECODE = flashinfer_kernels(DECODE_PATH, run_decode, (CUDA_CORES, FA2, FA3), limits=DECODE_LIMITS, common=WITH_KEYS)
PREFILL = flashinfer_kernels(
    PREFILL_PATH, run_prefill, (FA2, FA3), limits={**DECODE_LIMITS, **QUERIES}, plan_options=SEEING
)
TRITON_DECODE = triton.decode_kernel(run_triton)
