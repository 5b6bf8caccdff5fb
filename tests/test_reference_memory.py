"""No reference of a DeepSeek-V3 rank (EP-8, with all 128 heads) takes more than 16 GiB, inputs included, for 64 tokens.

Each family that has a Definition with DeepSeek-V3's constants runs with its largest one; where weights may widen the
rows or narrow them, with the largest of each kind. Rows are 64: tokens, requests, 512 rows that 64 tokens send to 8
experts, or requests with as many drafts as 64 tokens are. How many keys attention sees is the family's choice, some
thousands at most, and at most 2048 for each query.

Linear layers and experts run with widths that are a fraction of the Definition's, on all its experts. No tensor has
more than two widths among its dimensions, so at full size it takes at most the square of the reciprocal fraction times
as much. Everything else runs at full size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from whole_dataset import MEMBERS

import flashinfer_trace
from flashinfer_trace.format.definition import Definition

GIBIBYTES = 16
TOKENS, TOP_K = 64, 8
#: How the axes of a Definition count 64 tokens.
ROWS = {
    **dict.fromkeys(("batch_size", "M", "m", "num_tokens", "seq_len", "total_q"), TOKENS),
    **dict.fromkeys(("total_rows", "num_pairs", "num_copies"), TOKENS * TOP_K),
    "num_rows": TOKENS,
}
#: Values that DeepSeek-V3's config.json, and an eighth of its experts, give to axes. Rows of features have 56 scales,
#: V3.2's indexer has 64 heads of 128, a shared expert may be a ninth choice, and drafts have 4 tokens.
#: Axes that are not here (blocks, packed bytes, page sizes) follow from them, or may have any value.
SIZES = {
    "hidden_size": {7168, 128, 56},
    "vocab_size": {129280},
    "intermediate_size": {2048, 18432},
    "num_experts": {32, 256},
    "num_local_experts": {32},
    "top_k": {TOP_K, TOP_K + 1, 2048},
    "n_group": {8},
    "num_qo_heads": {128, 64},
    "num_heads": {128, 64},
    "num_kv_heads": {128, 1},
    "head_dim_ckv": {512},
    "head_dim": {128},
    "head_size": {64},
    "qk_dim": {192},
    "vo_dim": {128},
    "num_speculative_tokens": {4},
}
#: (n, k) of its linear layers, of its experts, and of the products with each head's part of kv_b_proj.
LAYERS = {
    (2112, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 16384),
    (36864, 7168),
    (7168, 18432),
    (4096, 7168),
    (7168, 2048),
    (256, 7168),
    (129280, 7168),
    (128, 512),
    (512, 128),
}
#: Divisors of a width; the first that its blocks allow is used.
FRACTIONS = (8, 4, 2, 1)
NARROWED = ("gemm", "moe")


def is_of_a_rank(constants: Mapping[str, int]) -> bool:
    """Whether a Definition's constants are those of DeepSeek-V3; one without constants is of all models."""
    if not constants:
        return True
    layer = constants.get("n", constants.get("N")), constants.get("k", constants.get("K"))
    if None not in layer and layer not in LAYERS:
        return False
    sized = [axis for axis in constants if axis in SIZES]
    return bool(sized or None not in layer) and all(constants[axis] in SIZES[axis] for axis in sized)


def size(definition: Definition) -> int:
    """How many elements its inputs have with 64 rows."""
    values = {**definition.const_axes, **ROWS}
    return sum(math.prod(values.get(axis, 1) for axis in spec.shape or ()) for spec in definition.inputs.values())


def chosen() -> list[Definition]:
    """The largest Definition of each family, of each of both kinds if it multiplies by weights."""
    found: dict[tuple[str, bool], Definition] = {}
    for family, members in MEMBERS.items():
        for one in members:
            constants = one.const_axes
            kind = family, constants.get("n", constants.get("N", 0)) > constants.get("k", constants.get("K", 0))
            if is_of_a_rank(constants) and (kind not in found or size(one) > size(found[kind])):
                found[kind] = one
    return list(found.values())


CHOSEN = chosen()


def is_width(axis: str) -> bool:
    """Whether the axis counts features, or blocks or bytes of them."""
    packed = ("n", "k", "N", "K", "n_bytes", "num_groups", "padded_n", "padded_scales")
    return (
        axis.endswith(("_size", "_blocks", "_bytes")) and axis not in ("block_size", "batch_size")
    ) or axis in packed


def narrowed(definition):
    """The Definition with narrower widths, and how many times narrower they are."""
    widths = {axis: value for axis, value in definition.const_axes.items() if is_width(axis)}
    if definition.op_type not in NARROWED or not widths:
        return definition, 1
    times = next(times for times in FRACTIONS if not any(value % times for value in widths.values()))
    return definition.with_const_axes({axis: value // times for axis, value in widths.items()}), times


def peak_bytes(run):
    """The most bytes that tensors made by `run` take at any time on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert kept is not None and events
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_the_peak_is_that_of_what_lives_at_once():
    def run():
        first = torch.zeros(1_000_000)
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(run) == pytest.approx(8_000_000, rel=0.001)


def test_all_weights_in_float32_at_once_would_show():
    """As a reference has it that makes three float32 tensors of all experts before it begins."""
    definition, times = narrowed(flashinfer_trace.load("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"))
    weights = flashinfer_trace.make_inputs(definition, {"seq_len": TOKENS}, seed=0, device="cpu")["gemm1_weights"]
    peak = peak_bytes(lambda: (weights.float(), torch.ones(weights.shape), torch.zeros(weights.shape)))
    experts, rows, columns = 32, 4096, 7168
    assert peak * times**2 == pytest.approx(3 * 4 * experts * rows * columns, rel=0.001)


def test_the_choice_has_every_format_and_kind_of_kernel():
    names = {definition.name for definition in CHOSEN}
    experts = {name.partition("_e32")[0] for name in names if "_e32" in name}
    assert {"moe_bf16_ds_routing_topk8_ng8_kg4", "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4"} < experts
    assert {"moe_nvfp4_ds_routing_topk8_ng8_kg4", "moe_w4a8_grouped_gemm", "moe_fp8_block_scale_grouped_gemm"} < experts
    linear = {"int8_scaled_mm", "fp8_scaled_mm", "fp8_blockwise_scaled_mm", "cutlass_scaled_fp4_mm", "gemm_bf16"}
    linear |= {"bmm_bf16", "bmm_fp8", "qserve_w4a8_per_chn_gemm", "qserve_w4a8_per_group_gemm"}
    families = {family for family, members in MEMBERS.items() if names & {one.name for one in members}}
    assert linear | {"mla_paged_decode", "mla_ragged_prefill_causal", "dsa_sparse_attention", "fast_topk_v2"} < families
    assert {"top_k_top_p_sampling_from_probs", "rmsnorm", "per_token_quant_fp8", "moe_align_block_size"} < families
    assert {"gemm_bf16_n129280_k7168", "fp8_scaled_mm_n36864_k7168", "fp8_scaled_mm_n7168_k18432"} < names


def test_each_family_that_deepseek_v3_calls_is_chosen():
    models = {"model:deepseek-v3", "model:deepseek-v3.2"}
    called = {family for family, members in MEMBERS.items() if any(models & set(one.tags) for one in members)}
    assert len(called) > 30
    names = {one.name for one in CHOSEN}
    assert not {family for family in called if names.isdisjoint(one.name for one in MEMBERS[family])}


@pytest.mark.parametrize(
    ("constants", "theirs"),
    [
        ({"n": 2112, "k": 7168}, True),
        ({"n": 7168, "k": 2112}, False),
        ({"num_experts": 32, "n": 4096, "k": 7168}, True),
        ({"num_experts": 160, "n": 4096, "k": 7168}, False),
        ({"hidden_size": 4096}, False),
        ({"page_size": 64}, False),
        ({}, True),
    ],
)
def test_constants_tell_whose_a_definition_is(constants, theirs):
    assert is_of_a_rank(constants) == theirs


@pytest.mark.parametrize("definition", CHOSEN, ids=lambda definition: definition.name)
def test_a_reference_fits(definition):
    small, times = narrowed(definition)
    axes = {axis: ROWS[axis] for axis in small.var_axes if axis in ROWS}
    assert axes
    if "num_draft_tokens" in small.const_axes:
        axes["batch_size"] //= small.const_axes["num_draft_tokens"]
    if "seq_len" in axes:
        axes.pop("num_rows", None)  # as many as the tokens' copies need, which the family knows
    inputs = flashinfer_trace.make_inputs(small, axes, seed=0, device="cpu")
    given = sum(each.nbytes for each in inputs.values() if isinstance(each, torch.Tensor))
    peak = peak_bytes(lambda: small.compiled(*(inputs[name] for name in small.inputs)))
    assert (given + peak) * times**2 <= GIBIBYTES * 2**30
