"""Wrong references that random draws accept, and corners reject."""

from __future__ import annotations

import dataclasses

import pytest
from changed_references import changed
from drawn_plans import without_corners

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.sampling import wrong_draws
from flashinfer_trace.harness import job as harness_job
from flashinfer_trace.harness.case import reference_run
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Job, prepare, verify

EXAMPLES = 6

DECODE = "gqa_paged_decode_h32_kv16_d128_ps64"
PREFILL = "gqa_paged_prefill_causal_h32_kv16_d128_ps64"
RAGGED = "gqa_ragged_prefill_causal_h32_kv8_d128"
#: The mask of every block is that of the first one.
FIRST_MASK = ("last_key = start - ", "last_key = queries[b] - ")
PAGED_VALUES = ("gather(v_cache, own_pages)", "gather(v_cache, own_pages).clamp(-65504, 65504)")
PAGED_KEYS = ("gather(k_cache, own_pages)", "gather(k_cache, own_pages).clamp(-100, 100)")
PAGES = "        pages = page_table"
VALUES = ("dim=-1), v)", "dim=-1), v.clamp(-65504, 65504))")
FAINT_LOGITS = (
    "softmax_route(routing_logits,",
    "softmax_route(torch.where(routing_logits.abs() < 1e-5, 0.0, routing_logits),",
)
FAINT_BIAS = ("scores + {0}", "scores + torch.where({0}.abs() < 1e-5, 0.0, {0})")
UNSTABLE = (
    "torch.sigmoid(routing_logits.double())",
    "(routing_logits.double().exp() / (1 + routing_logits.double().exp()))",
)
NORMS = (
    "rmsnorm_h128",
    "fused_add_rmsnorm_residual_out_h1024",
    "gemma_rmsnorm_h128",
    "gemma_fused_add_rmsnorm_h1152",
    "fused_qknorm_h8_kv1_d128",
)
BOUNDED_SQUARES = ("rsqrt(mean_square + EPS)", "rsqrt(mean_square.clamp_max(1e38) + EPS)")
SAMPLER = "sampling_from_probs_v128256"
ROUNDED_MASS = ("mass = mass + probability", "mass = mass.to(torch.bfloat16) + probability")
TOP_K = ("top_k_renorm_probs", "top_k_sampling_from_probs", "top_k_top_p_sampling_from_probs")
ANY_NEGATIVE_K = ("everything = (k < 0)", "everything = (k == -1)")
FAINT_P = ("top_p.double()", "torch.where(top_p < 1e-6, 0.0, top_p.double())")
FAINT_MIN_P = ("min_p.unsqueeze(-1)", "torch.where((min_p > 0) & (min_p < 1e-4), 2.0, min_p).unsqueeze(-1)")
TEMPERATURES = [
    ("temperature[:, None]", f"temperature[:, None].{limit}") for limit in ("clamp_min(1e-5)", "clamp_max(50)")
]
KEPT_MASS = ("u * cumulative[:, -1:]", "u * cumulative[:, -1:].clamp_min(1e-8)")
TOKEN_0 = (
    "return torch.minimum(token, last)",
    "return torch.where(probs.sum(dim=-1, keepdim=True) < 1e-6, 0, torch.minimum(token, last))",
)
#: A copy through arithmetic: it replaces NaN, bounds infinities, gives zeros one sign, or flushes subnormal numbers.
THROUGH_ARITHMETIC = (
    "{}.nan_to_num()",
    "{}.clamp(-3.3895e38, 3.3895e38)",
    "({} + 0.0)",
    "torch.where({0}.abs() < 1e-38, {0} * 0.0, {0})",
)
#: The copies that a reference makes: written rows, and those that stay.
COPIES = (
    ("store_cache_d128", "k_cache.index_copy", "k_cache"),
    ("store_cache_d128", "v_cache.index_copy", "v_cache"),
    ("store_cache_d128", "indices, k)", "k"),
    ("store_cache_d128", "indices, v)", "v"),
    ("set_mla_kv_buffer_ckv512_kpe64", "kv_buffer.index_copy", "kv_buffer"),
    ("set_mla_kv_buffer_ckv512_kpe64", "cat((cache_k_nope", "cache_k_nope"),
    ("set_mla_kv_buffer_ckv512_kpe64", "cache_k_rope), dim", "cache_k_rope"),
    ("concat_mla_k_h16_nope128_kpe64", "cat((k_nope", "k_nope"),
    ("concat_mla_k_h16_nope128_kpe64", "k_rope.expand", "k_rope"),
    ("concat_mla_absorb_q_h16_ckv512_kpe64", "cat((q_nope", "q_nope"),
    ("concat_mla_absorb_q_h16_ckv512_kpe64", "q_rope), dim", "q_rope"),
    ("moe_shuffle_rows_h2048", "input[dst2src_map]", "input"),
    ("moe_shuffle_rows_fp32_h16", "input[dst2src_map]", "input"),
    ("quantize_k_cache_ckv512_kpe64_g128", "k_rope.clone()", "k_rope"),
    ("dequantize_k_cache_ckv512_kpe64_g128", *["rows[:, end:].view(torch.bfloat16)"] * 2),
    ("rope_with_cos_sin_cache_neox_style_store_h16_kv2_d128", "k_cache.index_copy", "k_cache"),
    ("rope_with_cos_sin_cache_neox_style_store_h16_kv2_d128", "v_cache.index_copy", "v_cache"),
    ("rope_with_cos_sin_cache_neox_style_store_h16_kv2_d128", "out_loc, v)", "v"),
)
ONE_PASS_VARIANCE = (
    "torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / HIDDEN_SIZE",
    "(hidden_states.float().square().mean(dim=-1, keepdim=True)"
    " - hidden_states.float().mean(dim=-1, keepdim=True).square()).clamp_min(0)",
)
DOUBLE_THRESHOLD = (
    "probs >= probs.amax(dim=-1, keepdim=True) * min_p.unsqueeze(-1)",
    "probs.double() >= probs.amax(dim=-1, keepdim=True).double() * min_p.double().unsqueeze(-1)",
)
SPARSE = "h128_ckv512_kpe64_topk2048_ps64"
FP8_EXPERTS = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
OTHER_EXPERTS = [f"moe_{dtype}_ds_routing_topk8_ng8_kg4_e32_h7168_i2048" for dtype in ("bf16", "nvfp4")]
GROUPED = ("moe_topk_deepseek_topk8_ng8_kg4_e256", "moe_topk_deepseek_shared_experts_topk9_ng8_kg4_e256_s1")
#: A number that is added to the sum of scores, against division by zero.
ADDED = [
    *((FP8_EXPERTS, "chosen.sum(dim=1, keepdim=True)", number) for number in ("1e-10", "1e-6")),
    *((name, "scores.sum(dim=1, keepdim=True)", "1e-10") for name in (*OTHER_EXPERTS, *GROUPED)),
    ("moe_topk_sigmoid_topk8_e256", "weights.sum(dim=1, keepdim=True)", "1e-10"),
]
MXFP4_PRODUCTS = ("gather_gemm_swiglu_e128_n5760_k2880", "scatter_gemm_bias_e128_n2880_k2880")
EXPONENT = "(weights_scale[expert].int() & 255) - 127"
CLAMPED_EXPONENTS = tuple((EXPONENT, f"({EXPONENT}).clamp({ends})") for ends in ("-60, 30", "-30, 60"))


def formatted(change, name):
    return tuple(text.format(name) for text in change)


MUTANTS = [
    *((name, change) for name in (PREFILL, DECODE) for change in (PAGED_VALUES, PAGED_KEYS)),
    (RAGGED, VALUES),
    ("gqa_extend_causal_h32_kv8_qk128_vo128", VALUES),
    ("mla_paged_decode_h16_ckv512_kpe64_ps64", VALUES),
    *((f"{family}_{SAMPLER}", KEPT_MASS) for family in ("top_k", "top_k_top_p", "top_k_top_p_joint", "min_p")),
    *((f"{family}_{SAMPLER}", TOKEN_0) for family in ("top_k", "top_p", "top_k_top_p", "top_k_top_p_joint")),
    *((f"{family}_v128256", ANY_NEGATIVE_K) for family in TOP_K),
    *((f"{family}_{SAMPLER}", FAINT_P) for family in ("top_p", "top_k_top_p", "top_k_top_p_joint")),
    ("min_p_sampling_from_probs_v128256", FAINT_MIN_P),
    *(("softmax_temperature_v128256", change) for change in TEMPERATURES),
    *((name, BOUNDED_SQUARES) for name in NORMS),
    ("layernorm_h128", tuple(text.replace("mean_square", "variance") for text in BOUNDED_SQUARES)),
    *((name, ONE_PASS_VARIANCE) for name in ("layernorm_h128", "layernorm_h4096_eps1e5")),
    ("min_p_sampling_from_probs_v129280", DOUBLE_THRESHOLD),
    *((name, (total, f"({total} + {number})")) for name, total, number in ADDED),
    ("fp8_mqa_logits_h64_d128", ("& (key < k_end[:, None])", "& (key < k_end[:, None].clamp_max(4096))")),
    ("tree_speculative_sampling_target_only_s3_dt8_v129280", ROUNDED_MASS),
    ("moe_topk_softmax_topk8_e128", FAINT_LOGITS),
    ("moe_topk_deepseek_topk8_ng8_kg4_e256", formatted(FAINT_BIAS, "routing_bias")),
    ("moe_topk_sigmoid_topk8_e256", formatted(FAINT_BIAS, "correction_bias")),
    ("moe_topk_deepseek_topk8_ng8_kg4_e256", UNSTABLE),
    ("moe_topk_sigmoid_topk8_e256", UNSTABLE),
    (f"dsa_sparse_attention_{SPARSE}", ("q_nope[own].float()", "q_nope[own].half().float()")),
    (f"dsa_sparse_attention_{SPARSE}", ("dim=-1) @ ckv)", "dim=-1) @ ckv.clamp(-65504, 65504))")),
    (f"dsa_sparse_attention_fp8_cache_{SPARSE}", ("kpe.float()", "kpe.half().float()")),
    ("mla_rope_quantize_fp8_h16_ckv512_kpe64", ("encoded(q_nope,", "encoded(q_nope.half(),")),
    ("moe_w4a8_grouped_gemm_e32_n7168_k2048", ("b_scale[expert])", "b_scale[expert].half())")),
    *((f"moe_mxfp4_{product}", change) for product in MXFP4_PRODUCTS for change in CLAMPED_EXPONENTS),
    (
        "mla_paged_decode_page_table_h16_ckv512_kpe64_ps64",
        (PAGES, f"        if kv_len > 4000:\n            continue\n{PAGES}"),
    ),
    ("build_tree_kernel_efficient_topk4_s3_dt8", ("positions.flatten()", "positions.flatten().clamp(max=65535)")),
    ("moe_topk_softmax_sorted_topk8_e128", ("counts.to(", "counts.clamp(max=1024).to(")),
    ("moe_prepare_input_topk8_e32_h7168_i2048", ("counts[1:]", "counts[1:].clamp(max=1024)")),
]


def assert_a_corner_rejects(definition):
    """And drawn cases do not."""
    family = family_of(definition)
    drawn_only = dataclasses.replace(family, plan=without_corners(family.plan), checks=())
    assert verify(Job(definition, drawn_only), examples=EXAMPLES).status == "passed"
    report = verify(Job(definition, family), examples=0)
    assert report.status == "failed"
    assert "repeat: flashinfer-trace verify" in report.message


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_corner_rejects_what_drawn_cases_accept(name, change):
    assert_a_corner_rejects(changed(name, *change))


MARKED_BY_ZERO = ("masked_fill(dropped.unsqueeze(2), -torch.inf)", "masked_fill(dropped.unsqueeze(2), 0.0)")
OWN_PAGES = "        own_pages = kv_indices[pages[b] : pages[b + 1]]\n"
#: A request whose first page another one has too is left out; pages follow each other, but those of the first request.
SHARED_LEFT_OUT = f"""{OWN_PAGES}        if len(own_pages) > 0 and own_pages[0] in kv_indices[pages[:b]]:
            continue
"""
IN_A_ROW = f"""{OWN_PAGES}        if b > 0 and len(own_pages) > 0:
            own_pages = (own_pages[0] + torch.arange(len(own_pages))).clamp_max(CACHE.shape[0] - 1)
"""
PAGED = [(f"gqa_paged_{phase}_h6_kv2_d128_ps64", "k_cache") for phase in ("decode", "prefill_causal")]
PAGED += [(f"mla_paged_{phase}_h16_ckv512_kpe64_ps64", "ckv_cache") for phase in ("decode", "prefill_causal")]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (FP8_EXPERTS, tuple(text.replace("torch", "math") for text in MARKED_BY_ZERO)),
        *((name, MARKED_BY_ZERO) for name in OTHER_EXPERTS),
        *((name, (OWN_PAGES, SHARED_LEFT_OUT)) for name, _ in PAGED),
        *((name, (OWN_PAGES, IN_A_ROW.replace("CACHE", cache))) for name, cache in PAGED),
    ],
)
def test_a_corner_rejects_what_few_drawn_cases_show(name, change):
    definition = changed(name, *change)
    job = Job(definition, family_of(definition))
    plans = [plan for plan in job.corners if plan.get("shared_prefix") or plan.get("bias") == "negative"]
    assert len(plans) == 1 and verify(job, plan=plans[0]).status == "failed"


@pytest.mark.parametrize("name", [name for name, _ in PAGED if "prefill" in name])
def test_a_corner_has_blocks_of_more_queries_than_a_twin(name):
    lines = flashinfer_trace.load(name).reference.splitlines(keepends=True)
    line = next(line for line in lines if line.lstrip().startswith("output[start:stop], lse[start:stop] ="))
    last = "                output[start + 16 : stop] = output[start + 15]\n"
    repeated = f"{line}            if stop - start > 16:\n{last}"
    definition = changed(name, line, repeated)
    job = Job(definition, family_of(definition))
    assert verify(job, examples=EXAMPLES).status == "passed"
    report = Twins().verify(job, examples=2, seed=0)
    assert report.status == "failed" and '"shared_prefix":2' in report.message


@pytest.mark.parametrize("arithmetic", THROUGH_ARITHMETIC)
@pytest.mark.parametrize(("name", "place", "copied"), COPIES)
def test_a_corner_rejects_a_copy_through_arithmetic(name, place, copied, arithmetic):
    assert_a_corner_rejects(changed(name, place, place.replace(copied, arithmetic.format(copied))))


@pytest.mark.parametrize("name", [PREFILL, RAGGED])
def test_blocks_of_few_queries_show_what_one_block_hides(name, monkeypatch):
    definition = changed(name, *FIRST_MASK)
    family = family_of(definition)
    report = verify(Job(definition, family), examples=EXAMPLES)
    assert report.status == "failed" and report.message.startswith("reference: output output")
    monkeypatch.setattr(harness_job, "SMALL_BLOCK", "QUERY_BLOCK = 64")
    assert verify(Job(definition, family), examples=EXAMPLES).status == "passed"


@pytest.mark.parametrize("name", [PREFILL, RAGGED])
def test_corners_of_a_twin_have_blocks_of_one_query_and_of_several(name):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    twin = prepare(definition, family, "cpu", full=False)
    assert harness_job.SMALL_BLOCK in twin.reference and not harness_job.BLOCK.search(twin.reference)
    assert prepare(definition, family, "cpu", full=True).reference == definition.reference
    longest = [max(plan["q_lens"]) for plan in Job(definition, family).corners if not plan.get("shared_prefix")]
    assert longest and all(queries > 2 and queries % 2 for queries in longest)


ALWAYS_LAST = (
    "return torch.minimum(token, last)",
    "return last if probs.shape[0] == 1 and probs.shape[1] > 1000 else torch.minimum(token, last)",
)


@pytest.mark.parametrize("family", ["top_k", "top_p", "top_k_top_p", "top_k_top_p_joint", "min_p"])
def test_one_row_of_thousands_of_tokens_is_drawn_exactly(family):
    definition = changed(f"{family}_{SAMPLER}", *ALWAYS_LAST)
    twin = prepare(definition, family_of(definition), "cpu", full=False)
    lines = wrong_draws(twin, reference_run())
    assert lines and all("1 rows of 4099 tokens" in line for line in lines)


def test_one_row_of_a_whole_vocabulary_is_sampled_from_at_real_size():
    """Of one draw only tokens that are not kept are seen: here the last one, which has no mass."""
    old = "return torch.minimum(token, last)"
    last = "torch.full_like(token, probs.shape[1] - 1)"
    new = f"return {last} if probs.shape[0] == 1 and probs.shape[1] > 5000 else torch.minimum(token, last)"
    definition = changed(f"top_k_{SAMPLER}", old, new)
    report = Twins().verify(Job(definition, family_of(definition)), examples=2, seed=0)
    assert report.status == "failed"
    assert "--full --plan" in report.message and '"rows":1' in report.message


@pytest.mark.parametrize(
    "name",
    [
        PREFILL,
        "moe_topk_softmax_topk8_e128",
        "moe_topk_deepseek_topk8_ng8_kg4_e256",
        f"dsa_sparse_attention_{SPARSE}",
        f"dsa_sparse_attention_fp8_cache_{SPARSE}",
    ],
)
def test_these_corners_are_a_gpus_too(name):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    for kernel in family.kernels_of(definition):
        plans = family.corners(PlanRequest(definition, kernel.limits, True, kernel.plan_options))
        kinds = {plan.get("logits", plan.get("routing")) for plan in plans}
        exact = kernel.plan_options is None or getattr(kernel.plan_options, "exact", True)
        assert ("beyond_float16" in kinds) == exact, kernel.label


@pytest.mark.parametrize("name", [FP8_EXPERTS, *OTHER_EXPERTS, *GROUPED, "moe_topk_sigmoid_topk8_e256"])
def test_sums_of_scores_near_zero_are_for_kernels_whose_sigmoids_are_not_0_there(name):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    by_tanh = ("flashinfer.fused_moe.trtllm_", "flashinfer.fused_moe.fused_topk_deepseek")
    for kernel in family.kernels_of(definition):
        plans = family.corners(PlanRequest(definition, kernel.limits, True, kernel.plan_options))
        taken = getattr(kernel.plan_options, "ties", True) and not kernel.path.startswith(by_tanh)
        assert ("faint" in {plan["routing"] for plan in plans}) == taken, kernel.label


def test_a_reference_keeps_the_sign_of_codes_that_round_to_zero():
    """Whether the kernel does has not been seen: its policy takes zeros of either sign."""
    definition = changed(
        "moe_nvfp4_experts_quant_e32_k2048", "8 * blocks.signbit()", "8 * (codes > 0) * blocks.signbit()"
    )
    family = family_of(definition)
    assert verify(Job(definition, family), examples=EXAMPLES).status == "failed"
    as_kernel = dataclasses.replace(family, compare=family.policies(family.kernels[0]))
    assert verify(Job(definition, as_kernel), examples=EXAMPLES).status == "passed"
