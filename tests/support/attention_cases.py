"""Cases of all attention families: their Definitions by kind, inputs with given lengths, and drawn plans."""

from __future__ import annotations

import torch
from drawn_plans import drawn_plans, small_twin

DECODE = ["gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged_decode_h32_kv8_d128_ps64"]
PREFILL = ["gqa_paged_prefill_causal_h32_kv8_d128_ps1", "gqa_paged_prefill_causal_h32_kv8_d128_ps64"]
LATENT_DECODE = ["mla_paged_decode_h16_ckv512_kpe64_ps1", "mla_paged_decode_h16_ckv512_kpe64_ps64"]
LATENT_PREFILL = ["mla_paged_prefill_causal_h16_ckv512_kpe64_ps1", "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64"]
RAGGED = ["gqa_ragged_prefill_causal_h32_kv8_d128", "mla_ragged_prefill_causal_h16_qk192_vo128"]

LATENT = LATENT_DECODE + LATENT_PREFILL
PAGED = DECODE + PREFILL + LATENT
CAUSAL = PREFILL + LATENT_PREFILL + RAGGED
NAMES = PAGED + RAGGED
PAGES = {"shared_prefix": 0, "num_pages": 60, "unused": "nan"}


def plan(name, kv_lens, q_lens=None, logits="normal", **rest):
    """A plan with these lengths; `q_lens` matters only if requests may have any number of queries."""
    lengths = {"kv_lens": kv_lens, "logits": logits, "scale": 1.0}
    if name in CAUSAL:
        lengths["q_lens"] = q_lens or [1] * len(kv_lens)
    return {**(PAGES if name in PAGED else {}), **lengths, **rest}


def case(name, kv_lens, q_lens=None, seed=3, **rest):
    """(family, twin, inputs) with these lengths."""
    family, definition = small_twin(name)
    return family, definition, family.inputs(definition, plan(name, kv_lens, q_lens, **rest), seed, "cpu")


def caches(inputs):
    """The names of the caches or of the ragged keys and values."""
    return [name for name in inputs if name.endswith("cache") or name in ("k", "v")]


def queries(inputs):
    """Queries over whole keys: [queries, heads, features]."""
    return inputs["q"] if "q" in inputs else torch.cat([inputs["q_nope"], inputs["q_pe"]], -1)


def keys_and_values(inputs):
    """Keys and values of all slots, or of all tokens of ragged tensors: [..., key-value heads, features]."""
    if "ckv_cache" in inputs:
        ckv, kpe = (inputs[name].unsqueeze(-2) for name in ("ckv_cache", "kpe_cache"))
        return torch.cat([ckv, kpe], -1), ckv
    return tuple(next(inputs[name] for name in (f"{x}_cache", x) if name in inputs) for x in ("k", "v"))


def slots(inputs, page_size, kv_lens):
    """The positions of all tokens in the flattened cache, request after request."""
    pages = inputs["kv_indptr"].tolist()
    return [
        int(inputs["kv_indices"][pages[request] + j // page_size]) * page_size + j % page_size
        for request, kv_len in enumerate(kv_lens)
        for j in range(kv_len)
    ]


def drawn(name, kernel=None):
    """(twin, plans): what is drawn for a kernel, or for the reference."""
    family, definition = small_twin(name)
    return definition, drawn_plans(family, definition, kernel)
