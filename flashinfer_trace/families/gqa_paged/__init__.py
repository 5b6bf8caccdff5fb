"""Grouped-query attention over a paged cache: decode and causal prefill, page size 1 and others.

`families/attention/kernels.py` describes what flashinfer's wrappers do with rows without keys. In addition:

- flashinfer's decode on CUDA cores is compiled for 1, 2, 3, 4 and 8 query heads per key-value head; SGLang uses the
  tensor cores (fa2) from 4 on.
- get_seq_lens counts kv_last_page_len even for a request without pages, so it must be 0 there.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention import cases, flash_attention, kernels, triton
from flashinfer_trace.families.attention.oracle import Memory, any_chunks, expected_outputs
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.layouts import LAYOUT, NAN_ROW
from flashinfer_trace.verdict.compare import Expected


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    device, axes = draws.device, definition.const_axes
    heads, kv_heads, dim = (axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim"))
    q_lens, kind, sm_scale = cases.query_lengths(plan), plan["logits"], cases.softmax_scale(dim, plan["scale"])
    table = cases.page_table(definition, plan, draws)
    shape = (table.num_pages, table.page_size, kv_heads, dim)
    k_cache, v_cache = (draws.normal(shape, torch.bfloat16, cases.value_scale(kind)) for _ in range(2))
    if kind == "positive":
        v_cache.abs_()
    q = draws.normal([sum(q_lens), heads, dim], scale=cases.query_scale(kind))
    cases.give_signs(kind, q, k_cache)
    cases.add_peaks(kind, q, k_cache.flatten(0, 1), q_lens, plan["kv_lens"], sm_scale, draws, table.slots)
    used = table.used(device)
    for cache in (k_cache, v_cache):
        cases.spoil_unused(cache, used, plan["unused"])
    if plan.get(LAYOUT) == NAN_ROW:
        cases.spoil_request(table, q_lens, q, (k_cache, v_cache))
    inputs = {"q": q.to(torch.bfloat16), "k_cache": k_cache, "v_cache": v_cache, "sm_scale": sm_scale}
    inputs |= cases.index_inputs(table, plan, device)
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    page_size = definition.const_axes["page_size"]
    causal = "qo_indptr" in inputs
    return expected_outputs(inputs["q"], memory(inputs, page_size), inputs["sm_scale"], causal, any_chunks(page_size))


def memory(inputs: Inputs, page_size: int) -> Memory:
    return cases.paged_memory(inputs, inputs["k_cache"].flatten(0, 1), inputs["v_cache"].flatten(0, 1), page_size)


SIZES = "num_qo_heads num_kv_heads head_dim page_size"
DTYPES = f"{kernels.DTYPES}k_cache.dtype"
DECODE_PLANNED = kernels.Planned(
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper",
    f"kv_indptr kv_indices last {SIZES} {DTYPES} sm_scale=",
    f"q caches {kernels.RESULTS}",
    "use_tensor_cores=True backend=",
)
PREFILL_PLANNED = kernels.Planned(
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper",
    f"qo_indptr kv_indptr kv_indices last {SIZES} causal=True sm_scale= {DTYPES}",
    f"q caches {kernels.RESULTS}",
)


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    keys, values = (inputs[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    arguments = (inputs["kv_indptr"], inputs["kv_indices"], float(inputs["sm_scale"]))
    return triton.attend(inputs["q"], keys, values, *arguments, outputs["output"])


DECODE_LIMITS = {**kernels.BATCHES, **kernels.PAGES}
TENSOR_CORES = (kernels.FA2, kernels.FA3)
DECODE = DECODE_PLANNED.kernels((kernels.CUDA_CORES, *TENSOR_CORES), limits=DECODE_LIMITS, common=kernels.WITH_KEYS)
PREFILL = PREFILL_PLANNED.kernels(
    TENSOR_CORES, limits={**DECODE_LIMITS, **kernels.QUERIES}, plan_options=kernels.SEEING
)
TRITON_DECODE = triton.decode_kernel(run_triton)

#: Three query heads per group, so h // 3, h % 2 and h // 2 differ.
TWIN = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64}


def family(name: str, page_size: int, kernels: tuple[Kernel, ...]) -> Family:
    twin = {**TWIN, "page_size": page_size}
    return cases.paged_family(name, "gqa_paged", twin, make_inputs, oracle, kernels, (cases.usual_scale(),))


FAMILIES = (
    family("gqa_paged_decode_ps1", 1, (*DECODE, flash_attention.DECODE, TRITON_DECODE)),
    family("gqa_paged_decode", 4, (*DECODE, flash_attention.DECODE)),
    family("gqa_paged_prefill_causal_ps1", 1, (*PREFILL, flash_attention.PREFILL)),
    family("gqa_paged_prefill_causal", 4, (*PREFILL, flash_attention.PREFILL)),
)
