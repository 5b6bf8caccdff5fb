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
#: The running maximum starts at 0 instead of -inf.
WITH_ZERO = "torch.nn.functional.pad(logits, (0, 1)).amax(dim=-1, keepdim=True)"
FROM_ZERO = (
    "torch.softmax(logits, dim=-1)",
    f"torch.exp(logits - {WITH_ZERO}).div(torch.exp(logits - {WITH_ZERO}).sum(dim=-1, keepdim=True))",
)
#: Hidden keys have a finite logit; queries that see no key are treated apart.
HIDDEN = "masked_fill(position > last, -math.inf)"
FINITE = "masked_fill(position > last, -1e4).masked_fill(last < 0, -math.inf)"
#: More queries than keys are aligned with the start of the keys.
ALIGNED = {PREFILL: "k.shape[0]", LATENT: "keys.shape[0]"}
LSE = "torch.logsumexp(logits, dim=-1)"
#: Where all pages, or slots, follow each other, the first one is read again and again.
OWN_PAGES = "        own_pages = kv_indices[pages[b] : pages[b + 1]]\n"
OWN_SLOTS = "        slots = kv_indices[cached[b] : cached[b + 1]]\n"
SAME_PAGE = f"""{OWN_PAGES}        if (kv_indices.diff() == 1).all():
            own_pages = own_pages[:1].expand_as(own_pages)
"""
SAME_SLOT = f"""{OWN_SLOTS}        if len(slots) > 0 and (kv_indices.diff() == 1).all():
            slots = slots[:1].expand_as(slots)
"""
#: A request without pages takes its length from its entry in last_page_len.
LAST_PAGE = OWN_PAGES.replace("pages[b + 1]]", "max(pages[b + 1], pages[b] + 1)]")
#: Requests after one without keys are left out.
LEFT_OUT = f"""{OWN_PAGES}        if own_pages.shape[0] == 0:
            lse[FIRST:] = -math.inf
            break
"""
#: Nothing is computed where no request has cached tokens, or for the requests after one without new ones.
ALL_CACHED = f"{OWN_SLOTS}        if kv_indices.numel() == 0:\n            continue\n"
NO_QUERIES = f"{OWN_SLOTS}        if queries[b] == queries[b + 1]:\n            break\n"
SCALED = "k, v = k * k_scale, v * v_scale\n"
OWN_OUTPUT = "        output[b], lse[b] = attend(q[b][None], k, v, sm_scale)\n"
ROUNDED = f"""k = k * k_scale
{OWN_OUTPUT.replace("output[b]", "own_output", 1)}        output[b] = own_output.bfloat16() * v_scale
"""
SINKS = "gqa_paged_prefill_causal_h16_kv2_d64_ps64_sinks"
MUTANTS = [
    *((name, FROM_ZERO) for name in (PREFILL, LATENT, RAGGED, DECODE, EXTEND, SINKS, f"dsa_sparse_attention_{SPARSE}")),
    (PREFILL, (HIDDEN, FINITE)),
    (EXTEND, (HIDDEN, HIDDEN.replace("-math.inf", "-1e4"))),
    (f"dsa_sparse_attention_{SPARSE}", ("nothing.unsqueeze(1), -math.inf)", "nothing.unsqueeze(1), -1e4)")),
    *((name, (OWN_PAGES, LAST_PAGE)) for name in (PREFILL, LATENT)),
    *((name, (OWN_PAGES, LEFT_OUT.replace("FIRST", "queries[b]"))) for name in (PREFILL, LATENT)),
    *((name, (OWN_PAGES, LEFT_OUT.replace("FIRST", "b"))) for name in (DECODE, FP8)),
    *(
        (name, (f"- queries[b + 1] + {keys}", f"- queries[b + 1] + max({keys}, int(queries[b + 1] - queries[b]))"))
        for name, keys in ALIGNED.items()
    ),
    *((name, (LSE, f"{LSE}.nan_to_num(neginf=0.0)")) for name in (PREFILL, DECODE, FP8)),
    (PREFILL, (LSE, f"{LSE}.nan_to_num(neginf=math.log(1e-6))")),
    *((name, (OWN_PAGES, SAME_PAGE)) for name in (PREFILL, DECODE, LATENT, FP8)),
    *((EXTEND, (OWN_SLOTS, wrong)) for wrong in (SAME_SLOT, ALL_CACHED, NO_QUERIES)),
    (FP8, ("v * v_scale", "v.clamp(-240, 240) * v_scale")),
    (FP8, ("v * v_scale", "(v * v_scale).clamp(-65504, 65504)")),
    (FP8, (SCALED, SCALED.replace("k_scale", "_scale").replace("v_scale", "k_scale").replace(" _scale", " v_scale"))),
    (FP8, ("v * v_scale", "(v * v_scale).bfloat16().float()")),
    (FP8, (f"{SCALED}{OWN_OUTPUT}", ROUNDED)),
    (FP8, ("k * k_scale", "(k * k_scale).bfloat16().float()")),
    (FP8, ("[pages[b] : pages[b + 1]]", "[pages[b] : pages[b + 1]].to(torch.int16).int()")),
]


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_corner_rejects_it_whatever_is_drawn(name, change):
    definition = changed(name, *change)
    report = verify(Job(definition, family_of(definition)), examples=0)
    assert report.status == "failed" and report.message.startswith("reference: output "), report.message


@pytest.mark.parametrize("name", [PREFILL, DECODE, LATENT, RAGGED, EXTEND, FP8])
def test_these_corners_pass_what_is_right(name):
    definition = flashinfer_trace.load(name)
    report = verify(Job(definition, family_of(definition)), examples=1)
    assert report.status == "passed", report.message


def test_scales_of_keys_are_not_those_of_bfloat16():
    """Drawn cases have them: a scale that is rounded to bfloat16 moves large logits."""
    definition = changed(FP8, "k * k_scale", "k * float(torch.tensor(k_scale).bfloat16())")
    plan = {"kv_lens": [40], "logits": "large", "num_pages": 40, "scale": 1.0, "shared_prefix": 0, "unused": "nan"}
    assert verify(Job(definition, family_of(definition)), examples=0, plan=plan).status == "failed"
