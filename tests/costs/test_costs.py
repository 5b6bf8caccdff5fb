"""Every family has a cost, and costs are counted again in another way.

Elements that a cost does not count as read can hold anything, and those that it counts matter: both are tried on the
reference. The operations of products are those that torch's FlopCounterMode counts in the reference.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from whole_dataset import FIRST

import flashinfer_trace
from flashinfer_trace.families import all_families
from flashinfer_trace.format.reference import load_run
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.inputs import clone_inputs
from flashinfer_trace.harness.verify import Job, prepare
from flashinfer_trace.judging.costs import COSTS, CostError, cost_of, recurrent, work_of
from flashinfer_trace.judging.costs.attention import Request
from flashinfer_trace.judging.costs.work import CUDA_CORES, count
from flashinfer_trace.judging.more_plans import judged_cases
from flashinfer_trace.sandbox.shared_memory import memory_of

FAMILIES = {family.name: family for family in all_families()}


@functools.cache
def drawn(name: str, without: str = ""):
    """Inputs of a few drawn cases of a family's twin, with their axes; not those of one layout."""
    family, definition = FAMILIES[name], prepare(FIRST[name], FAMILIES[name], "cpu", False)
    found = []
    for case in judged_cases(Job(FIRST[name], family), 11, lambda: 3):
        if case.kind == "drawn" and not (without and case.plan.get("layout") == without):
            found.append(family.inputs_and_axes(definition, case.plan, case.seed, "cpu"))
        if len(found) == 3:
            break
    return definition, found


def test_every_family_has_a_cost():
    assert COSTS.keys() == FAMILIES.keys()


def test_a_family_without_a_cost_is_named(monkeypatch):
    monkeypatch.delitem(COSTS, "rmsnorm")
    definition = flashinfer_trace.load("rmsnorm_h512")
    with pytest.raises(CostError, match="rmsnorm_h512: family rmsnorm has no cost; add it"):
        cost_of(definition, flashinfer_trace.make_inputs(definition))


def test_the_name_of_a_definition_is_as_good():
    definition = flashinfer_trace.load("rmsnorm_h512")
    inputs = flashinfer_trace.make_inputs(definition)
    assert cost_of("rmsnorm_h512", inputs) == cost_of(definition, inputs)
    with pytest.raises(flashinfer_trace.DatasetError, match="no Definition named 'rmsnorm_h513'"):
        cost_of("rmsnorm_h513", inputs)


def whole_mask(tensor: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of all elements of a tensor."""
    if mask is None:
        return torch.ones(tensor.shape, dtype=torch.bool)
    return mask.reshape(*mask.shape, *[1] * (tensor.ndim - mask.ndim)).expand(tensor.shape)


def scrambled(value: torch.Tensor, where: torch.Tensor, generator: torch.Generator, finite: bool) -> torch.Tensor:
    """Other bits where a mask says so, of finite numbers or any; another valid index among indices."""
    if value.dtype in (torch.int32, torch.int64):
        return torch.where(where, 0, value)
    noise = torch.randint(0, 256, (value.numel() * value.element_size(),), generator=generator, dtype=torch.uint8)
    if value.dtype == torch.bool:
        noise &= 1
    other = noise.view(value.dtype).view(value.shape)
    return torch.where(where, other.nan_to_num(1.0, 1.0, 1.0) if finite else other, value)


def same(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> bool:
    """Whether the elements that a mask names have the same bits."""
    first, second = (memory_of(value.contiguous()).view(*value.shape, value.element_size()) for value in (a, b))
    return torch.equal(first[where], second[where])


#: Families that leave the order of a row open.
IN_ANY_ORDER = ("fast_topk_v2", "fast_topk_transform_fused", "fast_topk_transform_ragged_fused")


# The keys before a window belong to their request: references may multiply them by zero, so NaN would show.
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_read_has_no_effect_and_the_bytes_are_those_of_the_rest(name):
    definition, found = drawn(name)
    generator = torch.Generator().manual_seed(1)
    for inputs, axes in found:
        work, right = work_of(definition, inputs, axes), reference_outputs(definition, inputs, 1)
        other, read = clone_inputs(inputs), 0
        for tensor, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                mask = whole_mask(value, work.reads.get(tensor))
                other[tensor] = scrambled(value, ~mask, generator, finite=name.endswith("_window"))
                read += int(mask.sum()) * value.element_size()
        outputs, written = reference_outputs(definition, other, 1), 0
        for tensor, value in right.items():
            mask = whole_mask(value, work.writes.get(tensor))
            other_value = outputs[tensor]
            if name in IN_ANY_ORDER:
                value, other_value = value.sort(dim=1).values, other_value.sort(dim=1).values
            assert same(value, other_value, mask), f"{tensor} depends on what is not read"
            written += int(mask.sum()) * value.element_size() if value.ndim else 0
        found_cost = cost_of(definition, inputs)
        assert (found_cost.bytes_read, found_cost.bytes_written) == (read if written else 0, written)
        assert written or not found_cost.operations


#: Families whose costs say that something is not read, and of an input of each: the rows that must matter.
PARTLY = {
    "gqa_paged_decode": "k_cache",
    "gqa_paged_prefill_causal": "v_cache",
    "gqa_ragged_prefill_causal": "v",
    "gqa_paged_decode_sinks_window": "k_cache",
    "gqa_paged_prefill_causal_window": "v_cache",
    "gqa_ragged_prefill_causal_softcap_window": "k",
    "gqa_extend_causal": "v_buffer",
    "gqa_extend_causal_sinks_window": "k_buffer",
    "mla_paged_decode_page_table": "kv_cache",
    "mla_paged_prefill_causal_ps1": "ckv_cache",
    "rope_with_cos_sin_cache_neox_style": "cos_sin_cache",
    "moe_fp8_block_scale_ds_routing": "gemm2_weights_scale",
    "moe_bf16_softmax_routing": "gemm2_weights",
    "moe_bf16_expert_gemm": "weights",
    "moe_w4a8_grouped_gemm": "b_scale",
    "moe_bf16_gather_gemm_swiglu": "bias",
    "moe_bf16_scatter_gemm_bias": "weights",
    "moe_apply_shuffle_mul_sum": "hidden_states",
    "moe_shuffle_rows": "input",
    "tree_speculative_sampling_target_only": "target_probs",
    "cutlass_scaled_fp4_mm": "A_scale",
}


@pytest.mark.parametrize("name", PARTLY)
def test_every_row_that_is_read_matters(name):
    """Each row, page slot or expert that a cost counts changes the outputs if it is NaN."""
    definition, found = drawn(name, without="nan_row")
    tried = 0
    for inputs, axes in found:
        mask = work_of(definition, inputs, axes).reads[PARTLY[name]]
        right = reference_outputs(definition, inputs, 1)
        if name.startswith("tree_"):
            mask = mask.all(dim=-1)  # the rows that are read whole
        for place in mask.nonzero()[:: 1 + int(mask.sum()) // 6].tolist():
            other = clone_inputs(inputs)
            other[PARTLY[name]][tuple(place)] = math.nan
            outputs = reference_outputs(definition, other, 1)
            everything = {key: torch.ones(value.shape, dtype=torch.bool) for key, value in right.items()}
            assert not all(same(right[key], outputs[key], everything[key]) for key in right), place
            tried += 1
    assert tried


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.endswith("_ds_routing")])
def test_saturated_scores_choose_the_experts_of_the_reference(name):
    """float32 rounds scores to 1 that differ in float64; each reference has its own dtype."""
    definition = prepare(FIRST[name], FAMILIES[name], "cpu", False)
    helpers, sizes = load_run(definition.reference, name).__globals__, definition.const_axes
    for seed in range(20):
        inputs = FAMILIES[name].inputs_for_axes(definition, {"seq_len": 1}, seed, "cpu")
        logits = 15 + 10 * torch.rand(inputs["routing_logits"].shape, generator=torch.Generator().manual_seed(seed))
        inputs |= {"routing_logits": logits, "routing_bias": torch.zeros_like(inputs["routing_bias"])}
        given = (inputs["routing_logits"], inputs["routing_bias"])
        if "route" in helpers:
            chosen, _ = helpers["route"](*given)
        else:
            chosen, _ = helpers["deepseek_route"](*given, sizes["n_group"], sizes["topk_group"], sizes["top_k"])
        reads = work_of(definition, inputs, definition.bind_axes(inputs)).reads["gemm1_weights"]
        local = chosen.flatten() - int(inputs["local_expert_offset"])
        assert reads.nonzero().flatten().tolist() == sorted(local[(local >= 0) & (local < len(reads))].tolist())


#: Families whose references compute exactly the products that count, as torch sees them. Recurrences have none: each
#: token's products are those of a vector with a state.
PRODUCTS = [
    name
    for name in COSTS
    if ("decode" in name and name not in (*recurrent.COSTS, "alloc_decode"))
    or "gemm" in name.replace("gemma", "")
    or "_mm" in name
    or name.endswith("routing")
]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_reference(name):
    definition, found = drawn(name)
    tried = 0
    for inputs, _ in found:
        counter = FlopCounterMode(display=False)
        with counter:
            reference_outputs(definition, inputs, 1)
        operations = cost_of(definition, inputs).operations
        # All operations of a product in float32 are the CUDA cores'.
        counted = sum(number for dtype, number in operations.items() if dtype != CUDA_CORES or name == "gemm_float32")
        assert counted == counter.get_total_flops()
        tried += bool(counted)
    assert tried


@pytest.mark.parametrize("window", [None, 1, 2, 4, 9])
@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (1, 5), (4, 4), (3, 9), (7, 2), (5, 0)])
def test_pairs_and_keys_are_those_under_the_mask(queries, keys, window):
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if window is not None:
        mask = mask.triu(keys - queries - window + 1)
    request = Request(queries, keys, window)
    assert request.pairs == int(mask.sum())
    assert list(request.seen) == mask.any(dim=0).nonzero().flatten().tolist()


def test_a_mask_has_the_leading_dimensions():
    assert count((4, 3, 5), torch.tensor([True, False, True, True])) == 45
    assert count((4, 3), torch.tensor([[True, False, True]])) == 8
    with pytest.raises(AssertionError, match=r"a mask \[3\] of a tensor \[4, 3\]"):
        count((4, 3), torch.tensor([True, False, True]))


def test_a_hand_count():
    """64 rows of 512 bf16 numbers in and out, and one row of weights."""
    definition = flashinfer_trace.load("rmsnorm_h512")
    cost = cost_of(definition, flashinfer_trace.make_inputs(definition, {"batch_size": 64}))
    assert (cost.bytes_read, cost.bytes_written) == (64 * 512 * 2 + 512 * 2, 64 * 512 * 2)
    assert cost.operations == {"float32": 4 * 64 * 512}
    assert cost.intensity == 4 * 64 * 512 / (2 * 64 * 512 * 2 + 1024)
