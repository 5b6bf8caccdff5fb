"""DeepSeek multi-head latent attention over a paged cache: decode and causal prefill, page size 1 and others."""

from __future__ import annotations

from flashinfer_trace.families.mla_paged.kernels import FLASHINFER
from flashinfer_trace.families.mla_paged.oracle import oracle
from flashinfer_trace.families.mla_paged.plans import make_inputs, plan_for_axes, plans
from flashinfer_trace.families.mla_paged.policies import LSE, OUTPUT
from flashinfer_trace.harness.family import Family

__all__ = ["FAMILIES"]

TWIN = {"num_qo_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16}


def family(name: str, page_size: int) -> Family:
    """The record of one family; `page_size` is its twin's."""
    return Family(
        name=name,
        op_type="mla_paged",
        twin={**TWIN, "page_size": page_size},
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=FLASHINFER,
    )


FAMILIES = (
    family("mla_paged_decode_ps1", page_size=1),
    family("mla_paged_decode", page_size=4),
    family("mla_paged_prefill_causal_ps1", page_size=1),
    family("mla_paged_prefill_causal", page_size=4),
)
