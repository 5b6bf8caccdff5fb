"""Grouped-query attention over a paged cache: decode and causal prefill, page size 1 and others."""

from __future__ import annotations

from flashinfer_trace.families.attention import flash_attention
from flashinfer_trace.families.attention.cases import usual_scale
from flashinfer_trace.families.attention.paged_cases import paged_family
from flashinfer_trace.families.gqa_paged.inputs import make_inputs, oracle
from flashinfer_trace.families.gqa_paged.kernels import DECODE, PREFILL, TRITON_DECODE
from flashinfer_trace.harness.family import Family, Kernel

#: Three query heads per group, so that h // 3, h % 2 and h // 2 differ.
TWIN = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64}


def family(name: str, page_size: int, kernels: tuple[Kernel, ...]) -> Family:
    """The record of one family; `page_size` is that of its twin."""
    twin = {**TWIN, "page_size": page_size}
    return paged_family(name, "gqa_paged", twin, make_inputs, oracle, kernels, (usual_scale(),))


FAMILIES = (
    family("gqa_paged_decode_ps1", 1, (*DECODE, flash_attention.DECODE, TRITON_DECODE)),
    family("gqa_paged_decode", 4, (*DECODE, flash_attention.DECODE)),
    family("gqa_paged_prefill_causal_ps1", 1, (*PREFILL, flash_attention.PREFILL)),
    family("gqa_paged_prefill_causal", 4, (*PREFILL, flash_attention.PREFILL)),
)
