"""flashinfer's MLA kernels: one wrapper class with a backend for Ampere and later (fa2) and one for Hopper (fa3).

The following is from their source (flashinfer 0.6.12, include/flashinfer/attention), and plans respect it:

- MLAPlan (scheduler.cuh) divides by the batch size, so an empty batch ends the process.
- Keys from kv_len on are not loaded but filled with zeros (load_kv: kFillZero beyond packed_kv_bound), so that NaN in
  the tail of the last page, or in pages that belong to no request, does not leak.
- Masked logits are -5e4 *before* scaling (math.cuh: inf = 5e4), so keys whose q.k comes near -5e4 would be confused
  with masked ones; the plans' q.k stays below 5e3. A row whose maximum is -5e4 attends to nothing; its output is 0
  and its lse -inf (-5e4 where the keys of its request are split).
- Requests with more queries than keys, whose first rows see no keys, are computed correctly, so plans draw them.
- kv_len_arr counts tokens: 0 for a request without pages, as paged_kv_t::get_length returns whatever last_page_len is.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention.cases import AttentionOptions
from flashinfer_trace.families.attention.kernels import (
    BATCHES,
    EMPTY,
    PAGES,
    QUERIES,
    WITH_KEYS,
    Backend,
    flashinfer_kernels,
    wrapper,
)
from flashinfer_trace.families.attention.paged_cases import kv_lengths
from flashinfer_trace.families.attention.policies import Rounding
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs

PATH = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
#: Both split keys, and merge the partial outputs in one step.
BACKENDS = (
    Backend("fa2", Rounding(weights=True, sum=True, partial=1), EMPTY),
    Backend("fa3", Rounding(weights=True, sum=False, partial=1), EMPTY),
)


def run_flashinfer(backend: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """flashinfer's wrapper for latent attention, for decode and for prefill."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    axes, q_nope = definition.const_axes, inputs["q_nope"]
    causal = "qo_indptr" in inputs
    one_each = torch.arange(q_nope.shape[0] + 1, dtype=torch.int32, device=q_nope.device)
    mla = wrapper(BatchMLAPagedAttentionWrapper, q_nope.device, backend=backend)
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
    return outputs


DECODE, PREFILL = (
    flashinfer_kernels(PATH, run_flashinfer, BACKENDS, limits=limits, plan_options=AttentionOptions(), common=WITH_KEYS)
    for limits in ({**BATCHES, **PAGES}, {**BATCHES, **PAGES, **QUERIES})
)
