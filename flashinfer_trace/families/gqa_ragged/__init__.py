"""Grouped-query attention, causal, over ragged keys and values."""

from __future__ import annotations

from flashinfer_trace.families.attention.ragged import ragged_family

__all__ = ["FAMILIES"]

#: Three query heads per group, so that h // 3, h % 2 and h // 2 differ.
TWIN = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64}


FAMILIES = (ragged_family("gqa_ragged_prefill_causal", "gqa_ragged", TWIN),)
