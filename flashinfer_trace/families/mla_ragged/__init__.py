"""DeepSeek multi-head latent attention with keys and values expanded (MHA mode) in ragged tensors, causal."""

from __future__ import annotations

from flashinfer_trace.families.attention.policies import LSE, OUTPUT
from flashinfer_trace.families.attention.ragged import make_inputs, oracle, plan_for_axes, plans, ragged_kernels
from flashinfer_trace.harness.family import Family

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(
        name="mla_ragged_prefill_causal",
        op_type="mla_ragged",
        twin={"num_qo_heads": 4, "head_dim_qk": 96, "head_dim_vo": 64},
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=ragged_kernels({"head_dim_qk": 192, "head_dim_vo": 128}),
    ),
)
