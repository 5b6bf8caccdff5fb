"""Grouped-query attention over a paged cache: decode and causal prefill, page size 1 and others."""

from __future__ import annotations

from flashinfer_trace.families.attention.policies import LSE, OUTPUT
from flashinfer_trace.families.gqa_paged.kernels import DECODE, PREFILL
from flashinfer_trace.families.gqa_paged.plans import make_inputs, oracle, plan_for_axes, plans
from flashinfer_trace.harness.family import Family, Kernel

__all__ = ["FAMILIES"]

#: Three query heads a group, so that h // 3, h % 2 and h // 2 differ.
TWIN = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64}


def family(name: str, page_size: int, kernels: tuple[Kernel, ...]) -> Family:
    """The record of one family; `page_size` is its twin's."""
    return Family(
        name=name,
        op_type="gqa_paged",
        twin={**TWIN, "page_size": page_size},
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=kernels,
    )


FAMILIES = (
    family("gqa_paged_decode_ps1", 1, DECODE),
    family("gqa_paged_decode", 4, DECODE),
    family("gqa_paged_prefill_causal_ps1", 1, PREFILL),
    family("gqa_paged_prefill_causal", 4, PREFILL),
)
