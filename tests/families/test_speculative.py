"""Speculative decoding, sparse attention and latent attention's copies: what is special, and how kernels are called."""

from __future__ import annotations

import sys

import emulated_speculative
import hypothesis
import pytest
import torch
from changed_references import changed, wrong_kernel
from drawn_plans import drawn, small_twin
from emulated_runs import assert_kernel_passes
from hypothesis import strategies as st

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.sparse_attention.rows import ROOM, Rows
from flashinfer_trace.families.speculative import sampling
from flashinfer_trace.families.speculative.greedy import children_of, drawn_parents, links
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.judging.judge import judge

NAMES = (
    "concat_mla_k_h128_nope128_kpe64",
    "concat_mla_absorb_q_h16_ckv512_kpe64",
    "mla_rope_quantize_fp8_h16_ckv512_kpe64",
    "hadamard_transform_d128",
    "fast_topk_v2_topk2048",
    "fast_topk_transform_fused_topk2048",
    "fast_topk_transform_ragged_fused_topk2048",
    "fast_topk_topk1_v129280",
    "fast_topk_topk4_v129280",
    "build_tree_kernel_efficient_topk4_s3_dt8",
    "verify_tree_greedy_s3_dt8",
    "tree_speculative_sampling_target_only_s3_dt8_v129280",
    "store_cache_d128",
    "set_mla_kv_buffer_ckv512_kpe64",
    "softmax_temperature_v129280",
    "fused_qknorm_h4_kv1_d128",
    "mla_paged_decode_page_table_h16_ckv512_kpe64_ps64",
    "mla_paged_decode_h16_ckv512_kpe64_ps64",
    "mla_ragged_prefill_causal_h16_qk192_vo128",
)
SAMPLING = "tree_speculative_sampling_target_only_s3_dt8_v129280"
#: Kernels of attention that other tests emulate.
ELSEWHERE = (
    *("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "flash_mla_with_kvcache"),
    *("flash_attn_with_kvcache", "flash_attn_varlen_func"),
)
TARGETS = [
    pytest.param(name, kernel, id=f"{name}-{kernel.label}")
    for name in NAMES
    for kernel in family_of(flashinfer_trace.load(name)).kernels
    if not kernel.path.endswith(ELSEWHERE)
]


@pytest.fixture
def libraries(monkeypatch):
    for name, module in emulated_speculative.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("name", "kernel"), TARGETS)
def test_a_kernel_with_the_real_signature_passes(name, kernel, libraries):
    assert_kernel_passes(flashinfer_trace.load(name), kernel, real=5)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("fast_topk_") and "2048" in name])
@pytest.mark.parametrize("crowded", [True, False])
def test_kernels_get_no_row_that_crowds_one_of_their_bins(name, crowded):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    request = PlanRequest(definition, {}, True, Rows(crowded=crowded))
    plans, longest = drawn(family.plans(request), 60, seed=3), []
    for plan in plans:
        assert sum(plan["rows"]) == len(plan["lengths"])
        if plan["values"] in ("close", "minute"):
            longest.extend(plan["lengths"])
    assert (max(longest) <= ROOM) == (not crowded)


@pytest.mark.parametrize("kind", ["normal", "large", "ties"])
def test_what_kernels_get_leaves_room_in_the_bin_of_the_last_listed_score(kind):
    """The kernels keep 4096 scores of the bin, by the upper byte of float16, in which the 2048th score is."""
    definition = flashinfer_trace.load("fast_topk_v2_topk2048")
    family = family_of(definition)
    plan = {"lengths": [32768], "rows": [1], "starts": "zero", "values": kind, "slack": 0}
    scores = family.inputs(definition, plan, 1, "cpu")["scores"][0]
    bits = scores.half().view(torch.int16).int() & 0xFFFF
    coarse = torch.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000) >> 8
    last = scores.argsort(descending=True)[2047]
    assert int((coarse == coarse[last]).sum()) <= ROOM


def test_a_hadamard_matrix_is_symmetric_and_its_own_inverse():
    definition = flashinfer_trace.load("hadamard_transform_d128").with_const_axes({"head_dim": 16})
    matrix = definition.compiled(torch.eye(16), 1.0)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, 16 * torch.eye(16))
    assert torch.equal(matrix.abs(), torch.ones(16, 16))


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
def test_links_say_the_tree_that_was_drawn(shape):
    parents = drawn_parents(shape, 9, 3, Draws(2, "cpu"))
    children = children_of(*links(parents))
    assert [sorted(each) for each in children] == children
    assert all(parents[child] == node for node, each in enumerate(children) for child in each)
    assert sum(map(len, children)) == 8


def greedy(candidates, target, parents):
    definition = flashinfer_trace.load("verify_tree_greedy_s3_dt4")
    first, following = links(parents)
    rows = (candidates, range(4), first, following, target)
    return definition.compiled(*(torch.tensor([list(row)]) for row in rows))


def test_the_first_of_two_siblings_with_the_same_token_is_accepted():
    predicts, index, count = greedy([9, 5, 5, 7], [5, 1, 2, 3], [-1, 0, 0, 2])
    assert (index.tolist(), count.tolist(), predicts.tolist()) == ([[0, 1, -1, -1]], [1], [5, 1, -1, -1])


def test_a_chain_is_accepted_as_far_as_the_tokens_agree():
    predicts, index, count = greedy([9, 5, 6, 7], [5, 6, 8, 3], [-1, 0, 1, 2])
    assert (index.tolist(), count.tolist(), predicts.tolist()) == ([[0, 1, 2, -1]], [2], [5, 6, 8, -1])


def small_sampling(**changes):
    definition = flashinfer_trace.load("tree_speculative_sampling_target_only_s3_dt4_v129280")
    small = definition.with_const_axes({"vocab_size": 4})
    first, following = links([-1, 0, 0, 1])
    target = torch.tensor([0.5, 0.25, 0.125, 0.125]).repeat(1, 4, 1)
    inputs = {
        "candidates": torch.tensor([[0, 1, 2, 3]]),
        "retrive_index": torch.arange(4).view(1, 4),
        "retrive_next_token": torch.tensor([first]),
        "retrive_next_sibling": torch.tensor([following]),
        "uniform_samples": torch.full((1, 4), 0.9375),
        "uniform_samples_for_final_sampling": torch.zeros(1),
        "target_probs": target,
        "draft_probs": torch.zeros(1, 4, 4),
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        **changes,
    }
    return dict(zip(definition.outputs, small.compiled(*inputs.values()), strict=True))


@pytest.mark.parametrize(
    ("number", "accepted"), [(0.2499999, [0, 1]), (0.25, [0, 2]), (0.3749999, [0, 2]), (0.375, [0])]
)
def test_a_sibling_is_accepted_by_the_probability_of_all_that_were_tried(number, accepted):
    """The children of the root have probabilities 0.25 and 0.125; those below are rejected by 0.9375."""
    numbers = torch.tensor([[number, 0.9375, 0.9375, 0.9375]])
    outputs = small_sampling(uniform_samples=numbers)
    assert outputs["accept_index"][0, : len(accepted)].tolist() == accepted
    assert outputs["accept_token_num"].tolist() == [len(accepted) - 1]


def test_rejected_tokens_are_not_drawn():
    outputs = small_sampling(uniform_samples_for_final_sampling=torch.tensor([0.9375]))
    assert outputs["predicts"].tolist() == [3, -1, -1, -1]
    assert outputs["draft_probs_out"][0, 0].tolist() == [0, 0.25, 0.125, 0]


def test_a_single_likely_token_is_accepted_whatever_the_number_says():
    assert small_sampling(threshold_single=0.25)["accept_index"].tolist() == [[0, 1, -1, -1]]


IMPOSSIBLE = torch.tensor([0.5, 0.0, 0.125, 0.375]).repeat(1, 4, 1)


@pytest.mark.parametrize(
    "given",
    [
        {"uniform_samples": torch.zeros(1, 4)},
        {"threshold_single": 0.0},
        {"threshold_single": 0.0, "threshold_acc": 0.0},
        {"threshold_acc": 0.0, "uniform_samples": torch.zeros(1, 4)},
    ],
)
def test_a_token_of_probability_0_is_never_accepted(given):
    """The first child of the root has probability 0, the second 0.125."""
    outputs = small_sampling(target_probs=IMPOSSIBLE, **given)
    assert outputs["accept_index"].tolist() == [[0, 2, -1, -1]]


POSITIVE = "likely &= probability > 0"


@pytest.mark.parametrize("size", ["dt4", "dt8"])
@pytest.mark.parametrize("accepted", ["uniform_samples[tree, last] == 0", "threshold_single == 0"])
def test_cases_show_a_kernel_that_accepts_tokens_of_probability_0(size, accepted):
    """As sglang-kernel 0.4.2 does, where the number or the threshold is 0."""
    definition = flashinfer_trace.load(SAMPLING.replace("dt8", size))
    kernel = wrong_kernel(definition, POSITIVE, f"likely &= (probability > 0) | ({accepted})")
    report = verify(Job(definition, family_of(definition), kernel), examples=1)
    assert report.status == "failed" and kernel.label in report.message


def test_a_number_that_equals_the_sum_rejects_in_the_reference_and_is_in_no_case(tmp_path):
    """Releases differ there, once in 2^24 draws: a kernel that accepts is not wrong."""
    definition = changed(SAMPLING, "< mass / bound", "<= mass / bound")
    job = Job(definition, family_of(definition))
    assert "equals the sum must reject" in verify(job, examples=0).message
    (tmp_path / "kernel.py").write_text(job.sized.reference)
    assert judge(tmp_path / "kernel.py", SAMPLING, examples=1, seed=1, twin=True).failure is None


def test_only_tokens_whose_edges_are_near_may_be_drawn():
    weights = torch.tensor([[0.3, 0.0, 0.3, 0.4]], dtype=torch.float64)
    for u, wanted in ((0.3, [0, 2]), (0.299, [0, 0]), (0.301, [2, 2])):
        ranges = sampling.token_ranges(weights, torch.tensor([u], dtype=torch.float64), sampling.FLOAT32_EDGE)
        assert ranges.tolist() == [wanted]


@hypothesis.settings(max_examples=40, database=None, deadline=None)
@hypothesis.given(st.integers(0, 10**6), st.sampled_from(sampling.VALUES), st.integers(0, 4))
def test_no_uniform_number_is_near_what_it_is_compared_with_unless_all_is_exact(seed, values, thresholds):
    """A float32 kernel decides as the reference does: it is run in float32 here, by the emulated one."""
    family, small = small_twin(SAMPLING)
    plan = {**family.plan_for_axes(small, {}, Draws(0, "cpu")), "values": values, "thresholds": thresholds}
    inputs = family.inputs(small, plan, seed, "cpu")
    wanted = reference_outputs(small, inputs, 0)
    found = {name: torch.full_like(value, -1) for name, value in wanted.items()}
    draft = inputs["draft_probs"].clone()
    arguments = [draft if name == "draft_probs" else inputs[name] for name in small.inputs]
    outputs = [found[name] for name in ("predicts", "accept_index", "accept_token_num")]
    emulated_speculative.tree_speculative_sampling_target_only(*outputs, *arguments)
    assert torch.equal(found["accept_index"], wanted["accept_index"])
    assert torch.equal(draft, wanted["draft_probs_out"])
