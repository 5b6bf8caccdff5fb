"""Wrong references which only corners, cases of many rows or checks of references reject."""

from __future__ import annotations

import pytest
from test_corner_mutants import changed

from flashinfer_trace.families import family_of
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Job, verify

HALF_AWAY = ".contiguous().view(torch.int32).add(0x8000).bitwise_and(-65536).view(torch.float32)"
FUSED = ("fused_add_rmsnorm_residual_out_h1024", "gemma_fused_add_rmsnorm_h1152")
ROOT = "x.mul_(torch.rsqrt(variance + EPS))"
POSITIONED = (
    ("rope_with_cos_sin_cache_neox_style_h12_kv1_d128_rd64", "positions"),
    ("rope_with_cos_sin_cache_gptj_style_h16_kv1_d64_rd64", "positions"),
    ("rope_with_cos_sin_cache_neox_style_store_h16_kv2_d128", "positions"),
    ("mla_rope_quantize_fp8_h16_ckv512_kpe64", "pos_ids"),
)
#: Definition, a place in its reference that uses slots, and their name.
SLOTS = (
    ("store_cache_d128", "index_copy(0, indices, k)", "indices"),
    ("set_mla_kv_buffer_ckv512_kpe64", "index_copy(0, loc,", "loc"),
    ("dequantize_k_cache_ckv512_kpe64_g128", "[slots]", "slots"),
    ("rope_with_cos_sin_cache_neox_style_store_h16_kv2_d128", "index_copy(0, out_loc, v)", "out_loc"),
)
#: Definition, a place in its reference, and what is wrong there from row 1024 on.
ROWS = (
    ("silu_and_mul_i2048", "return activated.mul_(up)", "activated[1024:] = 0\n    {}"),
    ("per_token_group_quant_fp8_h512_g128", "scales = groups", "groups[1024:] = 1\n    {}"),
    ("rmsnorm_h128", "mean_square = torch", "x[1024:] = 1\n    {}"),
    ("store_cache_d128", "index_copy(0, indices, k)", "index_copy(0, indices[:1024], k[:1024])"),
    ("softmax_temperature_v128256", "return torch", "logits[1024:] = 0\n    {}"),
)
#: Products of experts, whose output is wrong from row 256 on.
EXPERTS = (
    *(f"moe_{weights}_ds_routing_topk8_ng8_kg4_e32_h7168_i2048" for weights in ("bf16", "fp8_block_scale", "nvfp4")),
    "moe_bf16_softmax_routing_topk2_e8_h4096_i14336",
    "moe_fp8_block_scale_softmax_routing_topk2_e8_h4096_i14336",
)
TREES = [f"tree_speculative_sampling_target_only_s3_{size}_v129280" for size in ("dt4", "dt8")]
PARTLY_ROTATED = (
    "rope_with_cos_sin_cache_neox_style_h12_kv1_d128_rd64",
    "rope_with_cos_sin_cache_gptj_style_h16_kv1_d64_rd64",
    "rope_with_cos_sin_cache_neox_style_d128_rd64",
)
REST = "states[..., ROTARY_DIM:]"

MUTANTS = [
    # Halves of the sum's last place are rounded away from zero, or the epsilon is outside of the root, or has no
    # effect.
    *((name, ("residual_out = x.to(", f"residual_out = x{HALF_AWAY}.to(")) for name in FUSED),
    *(
        (name, (ROOT, f"x.{scaled}"))
        for name in ("layernorm_h128", "layernorm_h4096_eps1e5")
        for scaled in (
            "div_(variance.sqrt() + EPS)",
            "mul_(torch.where(variance > 0, torch.rsqrt(variance), 0.0))",
            "mul_(torch.rsqrt(variance.clamp_min(EPS)))",
        )
    ),
    *((name, ("1 + weight.float()", "1 + weight.half().float()")) for name in ("gemma_rmsnorm_h128", FUSED[1])),
    *((name, ("mul_(weight)", "mul_(weight.abs())")) for name in ("rmsnorm_h128", FUSED[0], "layernorm_h128")),
    ("fused_qknorm_h8_kv1_d128", ("EPS) * weight)", "EPS) * weight.abs())")),
    *((name, (f"cache[{ids}]", f"cache[{ids} & 0x7FFF]")) for name, ids in POSITIONED),
    *((name, (f"cache[{ids}]", f"cache[{ids} & 0xFFFF]")) for name, ids in POSITIONED),
    ("top_p_renorm_probs_v128256", ("above < limit[rows]", "above <= limit[rows]")),
    *((name, (place, place.replace(ids, f"{ids} & 0x7FFF", 1))) for name, place, ids in SLOTS),
    ("verify_tree_greedy_s3_dt8", ("== target[place]", "& 0xFFFF == target[place] & 0xFFFF")),
    *(
        (name, change)
        for name in TREES
        for change in (
            ("< mass / bound", "< (mass / bound).clamp_max(0.999)"),
            ("likely &= probability > 0", "likely &= True"),
        )
    ),
    *((name, ("return output", "output[256:] = 0\n    return output")) for name in EXPERTS),
    (PARTLY_ROTATED[2], ("rotate(q, cos", "rotate(q * (torch.arange(q.shape[1]) < 4)[:, None], cos")),
    (PARTLY_ROTATED[2], ("rotate(k, cos", "rotate(k * (torch.arange(k.shape[1]) < 2)[:, None], cos")),
]


@pytest.mark.parametrize(
    ("name", "change"), [*MUTANTS, *((name, (place, wrong.format(place))) for name, place, wrong in ROWS)]
)
def test_a_corner_or_a_case_of_many_rows_rejects(name, change):
    definition = changed(name, *change)
    report = verify(Job(definition, family_of(definition)), examples=0)
    assert report.status == "failed" and "repeat: flashinfer-trace verify" in report.message


@pytest.mark.parametrize("family", ["top_k_sampling_from", "top_k_top_p_joint_sampling_from", "top_k_renorm"])
def test_a_k_of_more_than_1024_is_not_cut(family):
    k = "k = top_k.long().unsqueeze(-1)"
    cut = f"{k}\n    k = torch.where(k >= probs.shape[-1], k, k.clamp_max(1024))"
    definition = changed(f"{family}_probs_v128256", k, cut)
    job = Job(definition, family_of(definition))
    assert Twins().verify(job, examples=2, seed=0).status == "failed"


@pytest.mark.parametrize("arithmetic", ["({} + 0.0)", "({}.float() * 1).to(states.dtype)", "{}.nan_to_num()"])
@pytest.mark.parametrize("name", PARTLY_ROTATED)
def test_features_that_are_not_rotated_are_copied_bit_for_bit(name, arithmetic):
    definition = changed(name, f"(rotated, {REST})", f"(rotated, {arithmetic.format(REST)})")
    report = verify(Job(definition, family_of(definition)), examples=0)
    assert report.status == "failed" and "features beyond rotary_dim: copy them" in report.message
