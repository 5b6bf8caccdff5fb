"""On a CPU, each family has a case of many rows, requests or keys, which refuses a kernel that is right for few."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from whole_dataset import FAMILIES, FIRST

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention.cases import LONG, MANY, corner_lengths
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.plans import BEYOND_1024, BYTES, FEWEST, POSITIONS, input_bytes, many_rows, one_row
from flashinfer_trace.harness.power import stand_in
from flashinfer_trace.harness.verify import Job, prepare, verify

NORM = flashinfer_trace.load("fused_add_rmsnorm_h7168")
DECODE = flashinfer_trace.load("gqa_paged_decode_h8_kv1_d128_ps64")
ROPE = flashinfer_trace.load("rope_with_cos_sin_cache_neox_style_h32_kv8_d128_rd128")
#: Families without such a case, and why.
WITHOUT = {
    "causal_conv1d": "its tokens are those of sequences, which are given by offsets",
    "gdn_prefill": "its tokens are those of sequences, which are given by offsets",
    "kda_prefill": "its tokens are those of sequences, which are given by offsets",
    "fast_topk_transform_fused": "its tokens are those of requests, which are given by offsets",
    "dsa_sparse_attention": "a corner of its own has as many",
    "dsa_sparse_attention_fp8_cache": "a corner of its own has as many",
    "dsa_sparse_attention_sinks": "a corner of its own has as many",
    "mamba_ssd_prefill": "its tokens are those of sequences, which are given by offsets",
    **{name: "a corner of its own has as many requests" for name in FIRST if FAMILIES[name].op_type == "batch"},
}


def request_of(definition, large=False, **rest):
    family = family_of(definition)
    return family, PlanRequest(prepare(definition, family, "cpu", full=False), rest.pop("limits", {}), large, **rest)


def test_every_family_has_a_case_of_many_rows_or_of_many_requests_and_keys():
    without = set()
    for name, definition in FIRST.items():
        family, request = request_of(definition)
        plans = Job(definition, family).corners
        lengths = [plan["kv_lens"] for plan in plans if "kv_lens" in plan]
        if lengths:
            assert max(map(max, lengths)) >= LONG and max(map(len, lengths)) >= MANY, name
        elif not many_rows(family.plan, request):
            without.add(name)
    assert without == set(WITHOUT)
    for name in WITHOUT:
        if name.startswith("dsa"):
            assert max(plan["num_tokens"] for plan in Job(FIRST[name], FAMILIES[name]).corners) >= 300
        elif FAMILIES[name].op_type == "batch":
            lists = [plan.get("lengths", plan.get("seq_lens")) for plan in Job(FIRST[name], FAMILIES[name]).corners]
            assert max(map(len, lists)) >= 1000, name


def test_a_gpu_has_none_and_a_kernel_keeps_its_limits():
    family, request = request_of(NORM)
    (plan,) = many_rows(family.plan, request)
    assert plan["batch_size"] == family.plan.many_rows
    assert many_rows(family.plan, dataclasses.replace(request, large=True)) == []
    assert many_rows(family.plan, dataclasses.replace(request, plan_options=object())) == []
    assert many_rows(family.plan, dataclasses.replace(request, limits={"batch_size": (1, FEWEST - 1)})) == []
    assert many_rows(family.plan, dataclasses.replace(request, limits={"num_pages": (1, 64)})) == []
    (plan,) = many_rows(family.plan, dataclasses.replace(request, limits={"batch_size": (1, 128)}))
    assert plan["batch_size"] == 128
    assert many_rows(dataclasses.replace(family.plan, many_rows=0), request) == []


@pytest.mark.parametrize("width", [7168, 16384, 65536])
def test_the_memory_of_the_inputs_is_limited(width):
    sized = NORM.with_const_axes({"hidden_size": width})
    plans = many_rows(family_of(NORM).plan, PlanRequest(sized, {}, False))
    assert bool(plans) == (width < 65536)
    for plan in plans:
        assert FEWEST <= plan["batch_size"] < BEYOND_1024
        assert input_bytes(sized, {"batch_size": plan["batch_size"]}) <= BYTES


def test_long_and_many_requests_are_left_out_where_heads_are_many_and_wide():
    latent = flashinfer_trace.load("mla_paged_decode_h128_ckv512_kpe64_ps1")
    full = corner_lengths(PlanRequest(latent, {}, False))
    assert max(max(plan["kv_lens"]) for plan in full) == 300
    assert all(len(plan["kv_lens"]) == 2 for plan in corner_lengths(PlanRequest(latent, {}, True)))


def verdict(definition, wrong):
    """The status of a kernel that is the reference where `wrong` has nothing to change: corners only."""

    def call(definition, inputs, outputs):
        return wrong(inputs, lambda given: reference_outputs(definition, given, 0))

    kernel = dataclasses.replace(stand_in(None), call=call)
    return verify(Job(definition, family_of(definition), kernel), examples=0).status


def zeros_beyond(count, rows):
    """Zeros where `rows` of the inputs are more than `count`."""

    def wrong(inputs, run):
        right = run(inputs)
        return {name: value * 0 for name, value in right.items()} if rows(inputs) > count else right

    return wrong


def longest(inputs):
    return int(inputs["kv_indptr"].diff().max()) * inputs["k_cache"].shape[1]


@pytest.mark.parametrize(
    ("definition", "rows", "most", "enough"),
    [
        (NORM, lambda inputs: len(inputs["residual"]), 40, BEYOND_1024),
        (NORM, lambda inputs: len(inputs["residual"]), 1024, BEYOND_1024),
        (DECODE, lambda inputs: len(inputs["q"]), 64, MANY + 2),
        (DECODE, longest, 2048, LONG + 64),
        (
            flashinfer_trace.load("per_token_group_quant_fp8_h1536_g128"),
            lambda inputs: len(inputs["x"]),
            1024,
            BEYOND_1024,
        ),
    ],
)
def test_a_kernel_that_is_right_for_few_rows_is_refused(definition, rows, most, enough):
    assert verdict(definition, zeros_beyond(most, rows)) == "failed"
    assert verdict(definition, zeros_beyond(enough, rows)) == "passed"


@pytest.mark.parametrize("name", ["layernorm_h128", "merge_state_h32_d128", "concat_mla_k_h16_nope128_kpe64"])
def test_a_reference_that_is_wrong_for_one_row_only_is_refused(name):
    """As one that drops axes of size 1 before it multiplies."""
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    (plan,) = one_row(family.plan, request_of(definition)[1])
    first = next(iter(definition.inputs))
    start = definition.reference.index("    assert ")
    wrong = f"    {first} = -{first} if {first}.shape[0] == 1 else {first}\n"
    source = definition.reference[:start] + wrong + definition.reference[start:]
    job = Job(dataclasses.replace(definition, reference=source), family)
    corners = list(job.corners)  # the seed of each is its number
    assert verify(job, plan=plan, seed=corners.index(plan)).status == "failed"


def test_one_row_is_for_references_only():
    family, request = request_of(NORM)
    assert [plan["batch_size"] for plan in one_row(family.plan, request)] == [1]
    assert one_row(family.plan, dataclasses.replace(request, large=True)) == []
    assert one_row(family.plan, dataclasses.replace(request, limits={"batch_size": (1, 128)})) == []


def test_a_kernel_that_clamps_positions_is_refused():
    def clamped(most, inputs, run):
        return run({**inputs, "positions": torch.clamp(inputs["positions"], max=most)})

    assert verdict(ROPE, lambda *given: clamped(4095, *given)) == "failed"
    assert verdict(ROPE, lambda *given: clamped(2**16 - 1, *given)) == "failed"
    assert verdict(ROPE, lambda *given: clamped(POSITIONS["max_seq_len"], *given)) == "passed"
