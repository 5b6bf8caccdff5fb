"""Single steps of a mixture of experts: their rules by hand, and every adapter on emulated kernels."""

from __future__ import annotations

import sys

import emulated_moe
import pytest
import torch
from drawn_plans import drawn_plans
from emulated_runs import assert_adapter_passes
from emulated_tensor_core import cut, truncating_product
from hypothesis import find

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.gemm import SLACK, positive_product
from flashinfer_trace.families.moe import deepseek, expert_gemm, gating, grouped_gemm, nvfp4, rows, sorting
from flashinfer_trace.families.moe.expert_gemm import e4m3_groups
from flashinfer_trace.families.moe.inputs import drawn_ids
from flashinfer_trace.harness.family import Kernel
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import Job

RECORDS = [family for module in (gating, sorting, rows, expert_gemm, grouped_gemm, nvfp4) for family in module.FAMILIES]
NAMES = {family.name for family in RECORDS}
FIRST = {
    family_of(definition).name: definition
    for definition in flashinfer_trace.definitions("moe")
    if family_of(definition).name in NAMES
}
#: Functions in PyTorch are called in test_sglang_steps, and kernels that reorder rows in test_sglang_experts.
PAIRS = [
    pytest.param(family, kernel, id=kernel.label)
    for family in RECORDS
    for kernel in family.kernels
    if kernel.variant != "eager" and family.name != "moe_post_reorder"
]
#: Kernels for one group, which the twin with four groups does not fit.
ONE_GROUP = {
    f"{gating.KIMI_K2}.kimi_k2_moe_fused_gate": "moe_topk_deepseek_topk8_ng1_kg1_e384",
    "sglang.kernels.ops.moe.moe_route_radix.route_radix": "moe_topk_deepseek_topk8_ng1_kg1_e160",
    "sglang.jit_kernel.grouped_topk.grouped_topk": "moe_topk_deepseek_topk8_ng1_kg1_e160",
}


@pytest.fixture
def kernels(monkeypatch):
    """All libraries that adapters import, emulated."""
    for name, module in emulated_moe.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("flashinfer_trace.families.moe.kernels.WORKSPACE_BYTES", 16)


def twin(name):
    return FIRST[name].with_const_axes(family_of(FIRST[name]).twin)


@pytest.mark.parametrize(("family", "kernel"), PAIRS)
def test_adapters_pass_what_their_kernels_require(family, kernel: Kernel, kernels):
    whole = kernel.label in ONE_GROUP
    name = ONE_GROUP[kernel.label] if whole else FIRST[family.name].name
    assert_adapter_passes(name, kernel.label, examples=12, full=whole)


def test_the_pipeline_of_bf16_experts(sgl_kernel):
    """sgl_kernel is emulated as for the other pipelines, whose steps have their own tests."""
    path = "torch.nn.functional.grouped_mm"
    assert_adapter_passes("moe_bf16_ds_routing_topk8_ng8_kg4_e32_h7168_i2048", path, examples=6)


def outputs(definition, **inputs):
    return definition.name_outputs(definition.run(**inputs))


# Routers


def test_groups_are_chosen_by_their_two_best_experts():
    small = twin("moe_topk_deepseek")  # four groups of eight, two are kept, six experts are chosen
    logits = torch.full((1, 32), -4.0)
    logits[0, 3] = 6.0  # the best expert of all, alone in group 0
    logits[0, 8:11], logits[0, 24:27] = 2.0, 1.0
    inputs = {"routing_logits": logits, "routing_bias": torch.zeros(32), "routed_scaling_factor": 2.0}
    found = outputs(small, **inputs)
    assert found["topk_ids"].tolist() == [[8, 9, 10, 24, 25, 26]]
    scores = torch.sigmoid(torch.tensor([2.0] * 3 + [1.0] * 3))
    torch.testing.assert_close(found["topk_weights"][0], 2 * scores / scores.sum())


def test_the_bias_chooses_and_does_not_weigh():
    small = twin("moe_topk_sigmoid")
    logits, bias = torch.zeros(1, 16), torch.zeros(16)
    bias[[11, 5]] = torch.tensor([2.0, 1.0])
    found = outputs(small, routing_logits=logits, correction_bias=bias, norm_topk_prob=False)
    assert found["topk_ids"].tolist() == [[11, 5, 0, 1, 2, 3]]
    assert found["topk_weights"].tolist() == [[0.5] * 6]


@pytest.mark.parametrize(("applied", "weights"), [(False, 0.4), (True, 1.0)])
def test_shared_experts_come_last_and_cancel_the_factor(applied, weights):
    small = twin("moe_topk_deepseek_shared_experts")
    logits = torch.linspace(-1, 1, 32).view(1, 32)
    inputs = {"routing_logits": logits, "routing_bias": torch.zeros(32), "routed_scaling_factor": 2.5}
    found = outputs(small, **inputs, apply_routed_scaling_factor_on_output=applied)
    assert found["topk_ids"][0, 6:].tolist() == [32, 33]
    assert found["topk_weights"][0, 6:].tolist() == pytest.approx([weights] * 2)
    assert float(found["topk_weights"][0, :6].sum()) == pytest.approx(2.5 if applied else 1.0)


def test_a_bias_that_decides_no_row_is_drawn_again():
    """With equal logits, the bias alone chooses: a few of these seeds first draw one with almost equal neighbors."""
    definition = flashinfer_trace.load("moe_topk_deepseek_topk8_ng1_kg1_e384")
    family, undecided = family_of(definition), 0
    plan = {**family.plan_for_axes(definition, {"seq_len": 1}, Draws(0, "cpu")), "routing": "equal", "bias": "negative"}
    for seed in range(100):
        inputs = family.make_inputs(definition, plan, Draws(seed, "cpu"))
        assert gating.decidable(definition, inputs["routing_logits"], inputs["routing_bias"]).all(), seed
        bias = gating.draw_bias(definition, plan, Draws(seed, "cpu"))
        undecided += not gating.decidable(definition, torch.zeros(1, 384), bias).any()
    assert undecided > 0


@pytest.mark.parametrize("module", [gating, deepseek])
def test_logits_that_are_equal_by_chance_are_not_for_a_kernel_that_chooses_any_of_equal_ones(module):
    definition = flashinfer_trace.load("moe_topk_deepseek_topk8_ng1_kg1_e384")
    logits, bias = torch.linspace(-1, 1, 384).repeat(2, 1), torch.zeros(384)
    logits[1, 376] = logits[1, 375]  # the eighth and the ninth of the best
    assert module.decidable(definition, logits, bias).tolist() == [True, True]
    assert module.decidable(definition, logits, bias, ties=False).tolist() == [True, False]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("moe_topk_deepseek_topk8_ng1_kg1_e384", ("moe_fused_gate",)),
        ("moe_topk_deepseek_shared_experts_topk9_ng1_kg1_e160_s1", ("moe_fused_gate", "biased_grouped_topk_impl")),
        ("moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e48_h7168_i2048", ("moe_fused_gate",)),
    ],
)
def test_plans_of_a_kernel_that_chooses_any_of_equal_ones_say_so(name, labels):
    definition = flashinfer_trace.load(name)
    for kernel in family_of(definition).kernels_of(definition):
        job = Job(definition, family_of(definition), kernel, "cpu", full=True)
        ties = not any(label in kernel.label for label in labels)
        assert {plan["ties"] for plan in [find(job.plans, lambda plan: True), *job.corners]} == {ties}


# Sorting


def test_blocks_by_hand():
    """Five experts, blocks of four: two pairs elsewhere, then one of expert 1, and five of expert 4."""
    ids = torch.tensor([[-1, 4, 1], [4, -1, 4], [4, 4, -1]], dtype=torch.int32)[:, :3]
    found = outputs(twin("moe_align_block_size"), topk_ids=ids)
    listed = [0, 4, 8, 9, 2, 9, 9, 9, 1, 3, 5, 6, 7]
    assert found["sorted_token_ids"].tolist() == listed + [9] * (9 + 6 * 3 - len(listed))
    assert found["num_tokens_post_pad"].tolist() == [16]
    assert found["expert_ids"].tolist() == [-1, 1, 4, 4, -1, -1, -1]


@pytest.mark.parametrize(("seq_len", "length"), [(0, 0), (1, 3 * 4), (2, 6 * 4), (3, 9 + 6 * 3)])
def test_sorted_lists_are_as_long_as_those_of_the_wrapper(seq_len, length):
    """Five experts, three chosen, blocks of four: up to two tokens, each pair has a block of its own."""
    small = twin("moe_align_block_size")
    inputs = family_of(small).inputs_for_axes(small, {"seq_len": seq_len}, 0, "cpu")
    of_wrapper = emulated_moe.sglang_moe_align_block_size(inputs["topk_ids"], 4, 5)
    found = outputs(small, **inputs)
    assert [len(each) for each in found.values()] == [len(each) for each in of_wrapper] == [length, -(-length // 4), 1]


@pytest.mark.parametrize(("kernel", "most"), [("sgl_kernel.moe_align_block_size", 256), (sorting.ALIGN_SMALL.path, 32)])
def test_a_kernel_that_compares_all_pairs_is_compiled_for_256_at_most(kernel, most):
    """With 384 experts, half of the batches would have up to 384 pairs."""
    definition = flashinfer_trace.load("moe_align_block_size_topk8_e384_b64")
    (asked,) = (each for each in family_of(definition).kernels if each.path == kernel)
    counts = {plan["seq_len"] for plan in drawn_plans(family_of(definition), definition, asked, 200)}
    assert max(counts) == most and {1, 6} <= counts


def test_a_recorded_decode_call_of_sglang_has_inputs():
    """8 tokens in DeepSeek-V3 with the shared expert fused."""
    definition = flashinfer_trace.load("moe_align_block_size_topk9_e257_b64")
    axes = {"seq_len": 8, "max_padded": 4608, "max_blocks": 72}
    found = outputs(definition, **flashinfer_trace.make_inputs(definition, axes))
    assert [len(each) for each in found.values()] == [4608, 72, 1]


def test_ids_after_the_last_expert_get_no_row():
    ids = torch.tensor([[3, 5, 0], [-1, 5, 4]], dtype=torch.int32)
    found = outputs(twin("moe_w4a8_problem_sizes"), topk_ids=ids)
    assert found["expert_offsets"].tolist() == [0, 1, 1, 1, 2, 3]
    assert found["problem_sizes1"][:, 1].tolist() == found["problem_sizes2"][:, 1].tolist() == [1, 0, 0, 1, 1]


def test_experts_of_other_ranks_have_both_ids():
    small = twin("moe_w4a8_problem_sizes")
    plan = {"seq_len": 8, "choice": "elsewhere"}
    assert {-1, 5} <= set(family_of(small).inputs(small, plan, 0, "cpu")["topk_ids"].flatten().tolist())


def test_permutations_by_hand():
    ids = torch.tensor([[3, -1, 0], [0, 3, 4]], dtype=torch.int32)
    found = outputs(twin("moe_prepare_input"), topk_ids=ids)
    assert found["expert_offsets"].tolist() == [0, 2, 2, 2, 4, 5]
    assert found["input_permutation"].tolist() == [0, 1, 0, 1, 1, -1]
    assert found["output_permutation"].tolist() == [2, -1, 0, 1, 3, 4]
    assert found["problem_sizes1"][3].tolist() == [2, 40, 48]
    assert found["problem_sizes2"][3].tolist() == [2, 48, 20]
    assert found["blockscale_offsets"].tolist() == [0, 128, 128, 128, 256, 384]


def test_permutations_that_do_not_fit_each_other_are_found():
    ids = torch.tensor([[3, -1, 0], [0, 3, 4]], dtype=torch.int32)
    small = twin("moe_prepare_input")
    found = outputs(small, topk_ids=ids)
    assert sorting.permutations_agree(small, {"topk_ids": ids}, found) == []
    found["input_permutation"][:2] = torch.tensor([1, 0], dtype=torch.int32)
    assert sorting.permutations_agree(small, {"topk_ids": ids}, found) == [
        "input_permutation has other tokens in the rows of 2 pairs"
    ]


def test_pairs_in_blocks_of_other_experts_are_found():
    ids = torch.tensor([[3, -1, 0], [0, 3, 4]], dtype=torch.int32)
    small = twin("moe_align_block_size")
    found = outputs(small, topk_ids=ids)
    assert sorting.blocks_agree(small, {"topk_ids": ids}, found) == []
    found["expert_ids"][1] = 2
    assert sorting.blocks_agree(small, {"topk_ids": ids}, found) == ["2 pairs are in blocks of other experts"]


# Formats


def test_every_byte_has_two_signed_weights():
    """The oracle's and the reference's ways of unpacking, against Python's integers."""
    small = twin("moe_w4a8_grouped_gemm")
    axes = small.const_axes
    numbers = [(low, high) for high in range(-8, 8) for low in range(-8, 8)]
    packed = torch.tensor([(low & 15) | (high & 15) << 4 for low, high in numbers], dtype=torch.uint8).view(torch.int8)
    wanted = torch.tensor(numbers, dtype=torch.float64).flatten()
    assert grouped_gemm.int4_values(packed).tolist() == wanted.tolist()
    # Row i of the identity selects input feature i of expert 0.
    codes = torch.zeros(axes["num_experts"], axes["n"], axes["k_bytes"], dtype=torch.int8)
    codes[0, 7] = packed[: axes["k_bytes"]]
    inputs = {
        "a": torch.eye(axes["k"]).to(torch.float8_e4m3fn),
        "a_scale": torch.ones(1),
        "b": codes,
        "b_scale": torch.ones(axes["num_experts"], axes["n"], axes["num_k_blocks"], dtype=torch.bfloat16),
        "expert_offsets": torch.tensor([0, *[axes["k"]] * axes["num_experts"]], dtype=torch.int32),
    }
    found = outputs(small, **inputs)["output"]
    assert found[:, 7].double().tolist() == wanted[: axes["k"]].tolist()


def test_quotients_halfway_between_codes_are_kept_with_half_their_distance():
    """448 sets the scale to 1. 17 is halfway between 16 and 18, and 2^-10 between 0 and the smallest code."""
    values = torch.zeros(1, 128)
    values[0, :5] = torch.tensor([448.0, 17.0, -19.0, 2.0**-10, 17.5])
    codes, half = e4m3_groups(values)
    assert codes[0, :5].tolist() == [448.0, 17.0, -19.0, 2.0**-10, 18.0]
    assert half[0, :5].tolist() == [0.0, 1.0, 1.0, 2.0**-10, 0.0]
    rounded = values[0, :5].to(torch.float8_e4m3fn).double()
    assert ((codes[0, :5] - rounded).abs() <= half[0, :5]).all()


def test_a_kernel_that_takes_the_other_code_of_a_tie_is_accepted(kernels):
    small = twin("moe_fp8_block_scale_expert_gemm")
    family = family_of(small)
    plan = family.plan_for_axes(small, {"seq_len": 6}, None)
    inputs = family.inputs(small, plan, 3, "cpu")
    # The scale is 1 / 64, and 17 / 64 is halfway between 16 / 64 and 18 / 64.
    inputs["hidden_states"].fill_(17 / 64)
    inputs["hidden_states"][..., ::128] = 7.0
    expected = family.oracle(small, inputs)["output"]
    other = {**inputs, "hidden_states": inputs["hidden_states"].clone()}
    other["hidden_states"][inputs["hidden_states"] == 17 / 64] = 18 / 64
    for given in (inputs, other):
        found = outputs(small, **given)["output"]
        assert family.compare["output"].compare(found, expected).passed
    # 17.25 is not halfway: the code must be 18, not 16.
    inputs["hidden_states"][inputs["hidden_states"] == 17 / 64] = 17.25 / 64
    other["hidden_states"][other["hidden_states"] == 18 / 64] = 16 / 64
    expected = family.oracle(small, inputs)["output"]
    assert not family.compare["output"].compare(outputs(small, **other)["output"], expected).passed


def test_magnitudes_on_tensor_cores_are_never_too_small():
    """They keep 10 bits of each element, and cut off below the 23rd of the largest of 8 products and the sum."""
    draws = Draws(3, "cpu")
    a, b = (draws.normal([2, 16384]).abs() for _ in range(2))
    short = [cut(one.double(), one.double(), 10) for one in (a, b)]
    on_a_gpu = truncating_product(*short, kept_bits=23, step=8) * (1 + SLACK)
    exact = a.double() @ b.double().mT
    assert (exact * (1 - 2**-9) < on_a_gpu / (1 + SLACK)).all() and (on_a_gpu < exact * (1 + SLACK)).all()
    assert (on_a_gpu >= exact).all() and (positive_product(a, b) >= exact).all()


def test_no_sum_is_longer_than_magnitudes_are_derived_for():
    lengths = [axes.get("k", axes.get("K", 0)) for axes in (one.const_axes for one in flashinfer_trace.definitions())]
    assert 2**15 < max(lengths) <= 2**16


def test_neighbors_are_few_experts_in_a_row_anywhere():
    """On a GPU each case chooses few experts, so it does not read all weights."""
    ids = [drawn_ids(50, 4, 256, "neighbors", Draws(seed, "cpu")) for seed in range(8)]
    assert all(int(one.max() - one.min()) < 8 and len(one[0].unique()) == 4 for one in ids)
    lengths = [grouped_gemm.group_lengths(400, 256, "neighbors", Draws(seed, "cpu")) for seed in range(8)]
    for each in lengths:
        used = [expert for expert, rows in enumerate(each) if rows]
        assert len(each) == 256 and sum(each) == 400 and 4 < len(used) <= used[-1] - used[0] + 1 <= 16
    assert len({int(one.min()) for one in ids}) > 4 and len({one.index(max(one)) for one in lengths}) > 4


@pytest.mark.parametrize("kind", ["normal", "integers"])
def test_matrices_are_drawn_one_after_the_other(kind):
    together, apart = Draws(1, "cpu"), Draws(1, "cpu")
    drawn = together.matrices([3, 4, 8], torch.bfloat16, kind, 0.5)
    assert drawn.dtype == torch.bfloat16 and drawn.shape == (3, 4, 8)
    for matrix in drawn:
        assert torch.equal(matrix, apart.values([4, 8], torch.bfloat16, kind, 0.5))
