"""Grouped-query attention, causal, over ragged keys and values."""

from __future__ import annotations

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.attention.ragged import ragged_family

__all__ = ["FAMILIES"]

#: Three query heads per group, so that h // 3, h % 2 and h // 2 differ.
TWIN = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64}


def known_head_dim(definition: Definition) -> str | None:
    """flashinfer's ragged prefill is compiled for head sizes 64, 128 and 256; 64 was never run here."""
    return None if definition.const_axes["head_dim"] in (128, 256) else "needs head_dim 128 or 256"


FAMILIES = (ragged_family("gqa_ragged_prefill_causal", "gqa_ragged", TWIN, compiled={}, supports=known_head_dim),)
