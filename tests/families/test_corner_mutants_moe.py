"""Wrong references of mixtures of experts that random draws accept, and corners or sizes of twins reject."""

from __future__ import annotations

import pytest
from changed_references import changed
from test_corner_mutants import EXAMPLES, assert_a_corner_rejects

from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify

#: Sums of scores that are clamped, as by torch.nn.functional.normalize, whose least divisor is 1e-12.
LEAST_SUM = ("scores.sum(dim=1, keepdim=True)", "scores.sum(dim=1, keepdim=True).clamp_min(1e-12)")
ROUTED = (
    "moe_topk_deepseek_topk8_ng8_kg4_e256",
    "moe_topk_deepseek_shared_experts_topk9_ng8_kg4_e256_s1",
    "moe_nvfp4_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
    "moe_bf16_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
)
GROUPED = [f"moe_{weights}_grouped_gemm_e32_n7168_k2048" for weights in ("fp8_block_scale", "w4a8", "nvfp4")]
#: Only the first rows of an expert are multiplied.
FIRST_ROWS = ("output[first:last] = rows[first:last] @", "output[first:last][:256] = rows[first:last][:256] @")
FIRST_CHOICES = ("order[ends[expert] : ends[expert + 1]]", "order[ends[expert] : ends[expert + 1]][:256]")
EXPERT_GEMMS = (
    "moe_bf16_expert_gemm_topk8_r8_e32_n7168_k2048",
    "moe_fp8_block_scale_expert_gemm_topk8_r8_e32_n7168_k2048",
)
#: All choices of a token take its first row, or the row of another choice.
OTHER_ROWS = (
    (".expand(seq_len, TOP_K, K)", "[:, :1].expand(seq_len, TOP_K, K)"),
    ("rows[token, slot] @", "rows.flip(1)[token, slot] @"),
)

MUTANTS = [
    *((name, LEAST_SUM) for name in ROUTED),
    ("moe_topk_sigmoid_topk8_e256", tuple(text.replace("scores", "weights", 1) for text in LEAST_SUM)),
    (
        "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
        tuple(text.replace("scores", "chosen", 1) for text in LEAST_SUM),
    ),
    *((name, FIRST_ROWS) for name in GROUPED),
    *((name, FIRST_CHOICES) for name in EXPERT_GEMMS),
    ("moe_align_block_size_topk8_e256_b64", ("order.to(torch.int32)", "order.to(torch.int16).to(torch.int32)")),
    ("moe_w4a8_problem_sizes_topk8_e32_h7168_i2048", ("counts.cumsum(0)", "counts.cumsum(0).to(torch.int16)")),
]


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_corner_rejects_what_drawn_cases_accept(name, change):
    assert_a_corner_rejects(changed(name, *change))


@pytest.mark.parametrize("change", OTHER_ROWS)
@pytest.mark.parametrize("name", EXPERT_GEMMS)
def test_a_twin_keeps_the_rows_of_choices(name, change):
    definition = changed(name, *change)
    assert verify(Job(definition, family_of(definition)), examples=EXAMPLES).status == "failed"
