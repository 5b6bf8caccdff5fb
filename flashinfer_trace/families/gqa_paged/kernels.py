"""Kernels of grouped-query attention over a paged cache: flashinfer's batch wrappers.

`families/attention/kernels.py` says what they do with rows without keys. Besides:

- flashinfer's decode on CUDA cores is compiled for 1, 2, 3, 4 and 8 query heads a key-value head; SGLang takes the
  tensor cores (fa2) from 4 on.
- get_seq_lens counts kv_last_page_len for a request without pages, so that it must be 0 there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.attention.kernels import (
    CUDA_CORES,
    EMPTY,
    FA2,
    FA3,
    LAUNCHABLE,
    MASKED,
    SEEING,
    wrapper,
)
from flashinfer_trace.families.attention.policies import kernel_policies
from flashinfer_trace.harness.family import Kernel

DECODE_PATH = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"
PREFILL_PATH = "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper"
COMPILED_GROUPS = (1, 2, 3, 4, 8)
#: Head size that the compiled modules have.
HEAD_DIM = {"head_dim": 128}


def last_page_len(inputs: dict[str, Any]) -> torch.Tensor:
    """Tokens in the last page of each request: int32 [batch_size]; 0 for a request without pages."""
    pages = inputs["kv_indptr"].diff()
    return torch.where(pages > 0, inputs.get("kv_last_page_len", 1), 0).to(torch.int32)


def sizes(definition: Definition) -> list[int]:
    return [definition.const_axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")]


def run_decode(tensor_cores: str, definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    """flashinfer's decode wrapper; `tensor_cores` is a backend, or empty for CUDA cores."""
    q = inputs["q"]
    arguments = (("use_tensor_cores", True), ("backend", tensor_cores)) if tensor_cores else ()
    decode = wrapper(DECODE_PATH, q.device, *arguments)
    decode.plan(
        inputs["kv_indptr"],
        inputs["kv_indices"],
        last_page_len(inputs),
        *sizes(definition),
        q_data_type=q.dtype,
        kv_data_type=inputs["k_cache"].dtype,
        sm_scale=float(inputs["sm_scale"]),
    )
    caches = (inputs["k_cache"], inputs["v_cache"])
    decode.run(q, caches, out=outputs["output"], lse=outputs["lse"], return_lse=True)
    return outputs  # type: ignore[no-any-return]


def run_prefill(backend: str, definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    """flashinfer's paged prefill wrapper."""
    q = inputs["q"]
    prefill = wrapper(PREFILL_PATH, q.device, ("backend", backend))
    prefill.plan(
        inputs["qo_indptr"],
        inputs["kv_indptr"],
        inputs["kv_indices"],
        last_page_len(inputs),
        *sizes(definition),
        causal=True,
        sm_scale=float(inputs["sm_scale"]),
        q_data_type=q.dtype,
        kv_data_type=inputs["k_cache"].dtype,
    )
    caches = (inputs["k_cache"], inputs["v_cache"])
    prefill.run(q, caches, out=outputs["output"], lse=outputs["lse"], return_lse=True)
    return outputs  # type: ignore[no-any-return]


def uncompiled_group(definition: Definition) -> str | None:
    group = definition.const_axes["num_qo_heads"] // definition.const_axes["num_kv_heads"]
    known = ", ".join(map(str, COMPILED_GROUPS))
    return None if group in COMPILED_GROUPS else f"is compiled for {known} query heads a key-value head, not {group}"


DECODE = (
    Kernel(
        DECODE_PATH,
        "flashinfer-python",
        functools.partial(run_decode, ""),
        variant="CUDA cores",
        min_capability=(8, 0),
        limits=LAUNCHABLE,
        const_axes=HEAD_DIM,
        supports=uncompiled_group,
        compare=kernel_policies(CUDA_CORES, MASKED),
    ),
    Kernel(
        DECODE_PATH,
        "flashinfer-python",
        functools.partial(run_decode, "fa2"),
        variant="fa2",
        min_capability=(8, 0),
        limits=LAUNCHABLE,
        const_axes=HEAD_DIM,
        compare=kernel_policies(FA2, MASKED),
    ),
    Kernel(
        DECODE_PATH,
        "flashinfer-python",
        functools.partial(run_decode, "fa3"),
        variant="fa3",
        min_capability=(9, 0),
        max_capability=(9, 0),
        limits=LAUNCHABLE,
        const_axes=HEAD_DIM,
        compare=kernel_policies(FA3, EMPTY),
    ),
)
PREFILL = (
    Kernel(
        PREFILL_PATH,
        "flashinfer-python",
        functools.partial(run_prefill, "fa2"),
        variant="fa2",
        min_capability=(8, 0),
        limits=SEEING,
        const_axes=HEAD_DIM,
        compare=kernel_policies(FA2, MASKED),
    ),
    Kernel(
        PREFILL_PATH,
        "flashinfer-python",
        functools.partial(run_prefill, "fa3"),
        variant="fa3",
        min_capability=(9, 0),
        max_capability=(9, 0),
        limits=SEEING,
        const_axes=HEAD_DIM,
        compare=kernel_policies(FA3, EMPTY),
    ),
)
