"""Grouped-query attention, causal, over ragged keys and values."""

from __future__ import annotations

from flashinfer_trace.families.attention.policies import LSE, OUTPUT
from flashinfer_trace.families.attention.ragged import make_inputs, oracle, plan_for_axes, plans, ragged_kernels
from flashinfer_trace.harness.family import Family

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(
        name="gqa_ragged_prefill_causal",
        op_type="gqa_ragged",
        twin={"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64},
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=ragged_kernels({"head_dim": 128}),
    ),
)
