"""Wrong references of attention that an expert could write: corners reject each of them, whatever is drawn."""

from __future__ import annotations

import pytest
from changed_references import changed

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify

PREFILL = "gqa_paged_prefill_causal_h6_kv2_d128_ps64"
DECODE = "gqa_paged_decode_h6_kv2_d128_ps64"
LATENT = "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64"
RAGGED = "gqa_ragged_prefill_causal_h32_kv8_d128"
EXTEND = "gqa_extend_causal_h4_kv1_qk128_vo128"
FP8 = "gqa_paged_decode_fp8_cache_h32_kv8_d128_ps1"
SPARSE = "h128_ckv512_kpe64_topk2048_ps64"
NOTHING_TO_DO = "            continue\n"
#: The running maximum starts at 0 instead of -inf.
FROM_ZERO = ("nan_to_num(neginf=0.0)", "nan_to_num(neginf=0.0).clamp_min(0.0)")
SOFTMAX_FROM_ZERO = (
    "torch.softmax(logits, dim=-1)",
    "torch.exp(logits - logits.amax(dim=-1, keepdim=True).clamp_min(0.0)).div("
    "torch.exp(logits - logits.amax(dim=-1, keepdim=True).clamp_min(0.0)).sum(dim=-1, keepdim=True))",
)
#: Hidden keys have a finite logit; queries that see no key are treated apart.
HIDDEN = "    return weighted(causal(logits_of(q, k, sm_scale), last_key), v, q.shape[0])"
FINITE = """    seen = causal(logits_of(q, k, sm_scale), last_key)
    hidden = seen == -math.inf
    seen = seen.masked_fill(hidden & ~hidden.all(dim=-1, keepdim=True), -1e4)
    return weighted(seen, v, q.shape[0])"""
OWN_LENGTH = "kv_len = (own_pages.shape[0] - 1) * PAGE_SIZE + last_page_len[b]"
SKIPPED = f"        if own_pages.shape[0] == 0:\n{NOTHING_TO_DO}        {OWN_LENGTH}"
#: A request without pages takes its length from its entry in last_page_len.
LAST_PAGE = f"""        kv_len = max(0, own_pages.shape[0] - 1) * PAGE_SIZE + last_page_len[b]
        if kv_len == 0:
{NOTHING_TO_DO.rstrip()}"""
#: More queries than keys are aligned with the start of the keys.
ALIGNED = ("- queries[b + 1] + kv_len", "- queries[b + 1] + max(kv_len, stop - start)")
SCALED = "sm_scale * k_scale), v)\n        output[b] = own_output * v_scale"
NO_QUERIES = f"if queries[b] == queries[b + 1]:\n{NOTHING_TO_DO}"
#: Where all pages, or slots, follow each other, the first one is read again and again.
OWN_PAGES = "        own_pages = kv_indices[pages[b] : pages[b + 1]]\n"
OWN_SLOTS = "        slots = kv_indices[cached[b] : cached[b + 1]]\n"
SAME_PAGE = f"""{OWN_PAGES}        if (kv_indices.diff() == 1).all():
            own_pages = own_pages[:1].expand_as(own_pages)
"""
SAME_SLOT = f"""{OWN_SLOTS}        if len(slots) > 0 and (kv_indices.diff() == 1).all():
            slots = slots[:1].expand_as(slots)
"""
#: Nothing is computed where no request has cached tokens.
ALL_CACHED = f"{OWN_SLOTS}        if kv_indices.numel() == 0:\n{NOTHING_TO_DO}"
SINKS = "gqa_paged_prefill_causal_h16_kv2_d64_ps64_sinks"
MUTANTS = [
    *((name, FROM_ZERO) for name in (PREFILL, LATENT, RAGGED)),
    *((name, SOFTMAX_FROM_ZERO) for name in (DECODE, EXTEND, f"dsa_sparse_attention_{SPARSE}")),
    (SINKS, ("dim=-1, keepdim=True), sink)\n", "dim=-1, keepdim=True), sink).clamp_min(0.0)\n")),
    (PREFILL, (HIDDEN, FINITE)),
    (EXTEND, ("hidden, -math.inf)", "hidden, -1e4)")),
    (f"dsa_sparse_attention_{SPARSE}", ("nothing.unsqueeze(1), -math.inf)", "nothing.unsqueeze(1), -1e4)")),
    *((name, (SKIPPED, LAST_PAGE)) for name in (PREFILL, LATENT)),
    *((name, (NOTHING_TO_DO, NOTHING_TO_DO.replace("continue", "break"))) for name in (PREFILL, DECODE, LATENT, FP8)),
    *(
        (name, ("- queries[b + 1] + kv_len", "- queries[b + 1] + max(kv_len, stop - start)"))
        for name in (PREFILL, LATENT)
    ),
    *((name, ("torch.full(q.shape[:2], -math.inf", "torch.full(q.shape[:2], 0.0")) for name in (PREFILL, DECODE, FP8)),
    (PREFILL, ("torch.log(total)", "torch.log(total + 1e-6)")),
    *((name, (OWN_PAGES, SAME_PAGE)) for name in (PREFILL, DECODE, LATENT, FP8)),
    *((EXTEND, (OWN_SLOTS, wrong)) for wrong in (SAME_SLOT, ALL_CACHED)),
    (FP8, ("sm_scale * k_scale), v)", "sm_scale * k_scale), v.clamp(-240, 240))")),
    (FP8, (SCALED, SCALED.replace("k_scale", "_scale").replace("v_scale", "k_scale").replace(" _scale", " v_scale"))),
    (
        FP8,
        (SCALED, SCALED.replace(", v)", ", (v * v_scale).bfloat16().float())").replace("output * v_scale", "output")),
    ),
    (FP8, ("own_output * v_scale", "own_output.bfloat16() * v_scale")),
    (
        FP8,
        (
            "decode_logits(q[b], k, sm_scale * k_scale)",
            "decode_logits(q[b], (k * k_scale).bfloat16().float(), sm_scale)",
        ),
    ),
    (FP8, ("[pages[b] : pages[b + 1]]", "[pages[b] : pages[b + 1]].to(torch.int16).int()")),
    (EXTEND, (NO_QUERIES, NO_QUERIES.replace("continue", "break"))),
]


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_corner_rejects_it_whatever_is_drawn(name, change):
    definition = changed(name, *change)
    assert verify(Job(definition, family_of(definition)), examples=0).status == "failed"


@pytest.mark.parametrize("name", [PREFILL, DECODE, LATENT, RAGGED, EXTEND, FP8])
def test_these_corners_pass_what_is_right(name):
    definition = flashinfer_trace.load(name)
    report = verify(Job(definition, family_of(definition)), examples=1)
    assert report.status == "passed", report.message


def test_scales_of_keys_are_not_those_of_bfloat16():
    """Drawn cases have them: a scale that is rounded to bfloat16 moves large logits."""
    definition = changed(FP8, "sm_scale * k_scale", "sm_scale * float(torch.tensor(k_scale).bfloat16())")
    plan = {"kv_lens": [40], "logits": "large", "num_pages": 40, "scale": 1.0, "shared_prefix": 0, "unused": "nan"}
    assert verify(Job(definition, family_of(definition)), examples=0, plan=plan).status == "failed"
