"""flashinfer's MLA kernels: one wrapper class with a backend for Ampere and later (fa2) and one for Hopper (fa3).

What their source says (flashinfer 0.6.12, include/flashinfer/attention), and plans keep to:

- MLAPlan (scheduler.cuh) divides by the batch size: a batch of none ends the process.
- Keys from kv_len on are not loaded but filled with zeros (load_kv: kFillZero beyond packed_kv_bound), so that NaN in
  the tail of the last page, or in pages that no request has, does not leak.
- Masked logits are -5e4 *before* scaling (math.cuh: inf = 5e4), so keys whose q.k comes near -5e4 would be confused
  with masked ones; the plans' q.k stays below 5e3. A row whose maximum is -5e4 attends to nothing: output 0, lse -inf
  (-5e4 where the keys of its request are split).
- kv_len_arr counts tokens: 0 for a request without pages, as paged_kv_t::get_length says whatever last_page_len is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.mla_paged.policies import kernel_policies
from flashinfer_trace.harness.family import Kernel

PATH = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
WORKSPACE_BYTES = 128 * 2**20
LAUNCHABLE = {"len_indptr": (2, 1 << 20), "num_pages": (1, 1 << 30)}
#: Head sizes that the compiled modules have.
HEAD_DIMS = {"head_dim_ckv": 512, "head_dim_kpe": 64}


@functools.cache
def wrapper(backend: str, device: torch.device) -> Any:
    """One wrapper, with its workspace, for each backend and GPU; every call plans anew."""
    import flashinfer.mla

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)


def kv_lengths(inputs: dict[str, Any], page_size: int) -> torch.Tensor:
    """Tokens of each request: int32 [batch_size]; 0 for a request without pages."""
    pages = inputs["kv_indptr"].diff()
    last = inputs.get("kv_last_page_len", 1)
    lengths = torch.where(pages > 0, (pages - 1) * page_size + last, 0)
    return lengths.to(torch.int32)


def run_flashinfer(backend: str, definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    axes, q_nope = definition.const_axes, inputs["q_nope"]
    causal = "qo_indptr" in inputs
    one_each = torch.arange(q_nope.shape[0] + 1, dtype=torch.int32, device=q_nope.device)
    mla = wrapper(backend, q_nope.device)
    mla.plan(
        inputs["qo_indptr"] if causal else one_each,
        inputs["kv_indptr"],
        inputs["kv_indices"],
        kv_lengths(inputs, axes["page_size"]),
        axes["num_qo_heads"],
        axes["head_dim_ckv"],
        axes["head_dim_kpe"],
        axes["page_size"],
        causal,
        float(inputs["sm_scale"]),
        q_nope.dtype,
        inputs["ckv_cache"].dtype,
    )
    mla.run(
        q_nope,
        inputs["q_pe"],
        inputs["ckv_cache"],
        inputs["kpe_cache"],
        out=outputs["output"],
        lse=outputs["lse"],
        return_lse=True,
    )
    return outputs  # type: ignore[no-any-return]


FLASHINFER = (
    Kernel(
        PATH,
        "flashinfer-python",
        functools.partial(run_flashinfer, "fa2"),
        variant="fa2",
        min_capability=(8, 0),
        limits=LAUNCHABLE,
        const_axes=HEAD_DIMS,
        compare=kernel_policies(rounds_sum=True),
    ),
    Kernel(
        PATH,
        "flashinfer-python",
        functools.partial(run_flashinfer, "fa3"),
        variant="fa3",
        min_capability=(9, 0),
        max_capability=(9, 0),
        limits=LAUNCHABLE,
        const_axes=HEAD_DIMS,
        compare=kernel_policies(rounds_sum=False),
    ),
)
