"""DeepSeek multi-head latent attention with keys and values expanded (MHA mode) in ragged tensors, causal."""

from __future__ import annotations

from flashinfer_trace.families.attention.ragged import ragged_family
from flashinfer_trace.families.mla_ragged.blackwell import TRTLLM_RAGGED

TWIN = {"num_qo_heads": 4, "num_kv_heads": 4, "qk_dim": 96, "vo_dim": 64}

FAMILIES = (ragged_family("mla_ragged_prefill_causal", "mla_ragged", TWIN, (TRTLLM_RAGGED,)),)
