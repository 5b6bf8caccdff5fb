"""flashinfer's MLA kernels: one wrapper class with a backend for Ampere and later (fa2) and one for Hopper (fa3).

The following is from their source (flashinfer 0.7.2, mla/ and include/flashinfer/attention), and plans respect it:

- MLAPlan (scheduler.cuh) divides by the batch size, so an empty batch ends the process.
- Keys from kv_len on are not loaded but filled with zeros (load_kv: kFillZero beyond packed_kv_bound). So NaN in
  the tail of the last page, or in pages that belong to no request, does not leak.
- A row that attends to nothing has an output of 0 and an lse of -inf, also where the keys of its request are split.
  (0.6.12 masked logits by -5e4 before it scaled them, and returned -5e4 where keys are split.)
- Requests with more queries than keys, whose first rows see no keys, are computed correctly, so plans draw them.
- kv_len_arr counts tokens: 0 for a request without pages.
- Since 0.7.2 plan() refuses a causal batch in which a tile of 64 or 128 rows ends within a query's heads at a key that
  begins a tile, because the kernels would omit that key. With 128 heads, or as many as divide 64, there are none.
- Since 0.7.2 plan() refuses more than 16384 tiles of rows and splits of keys.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention.cases import AttentionOptions, kv_lengths
from flashinfer_trace.families.attention.kernels import (
    BATCHES,
    PAGES,
    QUERIES,
    WITH_KEYS,
    Backend,
    flashinfer_kernels,
    wrapper,
)
from flashinfer_trace.families.attention.policies import Rounding
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs

PATH = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
#: Both split keys, and merge the partial outputs in one step.
BACKENDS = (
    Backend("fa2", Rounding(weights=True, sum=True, partial=1)),
    Backend("fa3", Rounding(weights=True, sum=False, partial=1)),
)


def run_flashinfer(backend: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    axes, q_nope = definition.const_axes, inputs["q_nope"]
    causal = "qo_indptr" in inputs
    one_each = torch.arange(q_nope.shape[0] + 1, dtype=torch.int32, device=q_nope.device)
    mla = wrapper(BatchMLAPagedAttentionWrapper, q_nope.device, backend=backend)
    mla.plan(
        metadata=MLAPlanMetadata.csr(
            inputs["qo_indptr"] if causal else one_each,
            inputs["kv_indptr"],
            inputs["kv_indices"],
            kv_lengths(inputs, axes["page_size"]),
        ),
        num_heads=axes["num_qo_heads"],
        head_dim_ckv=axes["head_dim_ckv"],
        head_dim_kpe=axes["head_dim_kpe"],
        page_size=axes["page_size"],
        causal=causal,
        sm_scale=float(inputs["sm_scale"]),
        q_data_type=q_nope.dtype,
        kv_data_type=inputs["ckv_cache"].dtype,
        query_layout="split",
        kv_cache_layout="split",
        lse_mode="base2",
    )
    mla.run(
        query=(q_nope, inputs["q_pe"]),
        kv_cache=(inputs["ckv_cache"], inputs["kpe_cache"]),
        out=outputs["output"],
        lse=outputs["lse"],
        return_lse=True,
    )
    return outputs


DECODE, PREFILL = (
    flashinfer_kernels(PATH, run_flashinfer, BACKENDS, limits=limits, plan_options=AttentionOptions(), common=WITH_KEYS)
    for limits in ({**BATCHES, **PAGES}, {**BATCHES, **PAGES, **QUERIES})
)
