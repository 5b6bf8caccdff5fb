"""Rotation and writes to a KV cache in one: a case by hand, and what goes wrong between the two."""

from __future__ import annotations

import pytest
import torch
from drawn_plans import small_twin

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import prepare

NAME = "rope_with_cos_sin_cache_neox_style_store_h32_kv4_d128"


@pytest.fixture
def case():
    """A small Definition, its family, and inputs whose cache has slots that are not written."""
    family, definition = small_twin(NAME)
    plan = family.plan_for_axes(definition, {"num_tokens": 6, "num_slots": 11}, Draws(0, "cpu"))
    return definition, family, family.inputs(definition, plan, 7, "cpu")


def test_a_quarter_turn_is_stored_in_the_slot_of_its_token():
    definition = flashinfer_trace.load(NAME)
    sizes = {"num_qo_heads": 1, "num_kv_heads": 2, "head_size": 2, "row_dim": 4}
    definition = prepare(definition, family_of(definition), "cpu", full=False).with_const_axes(sizes)
    angles = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # position 1 turns by 90 degrees
    q = torch.tensor([[[1, 2]], [[3, 4]]], dtype=torch.bfloat16)
    k = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], dtype=torch.bfloat16)
    v = torch.tensor([[10, 11, 12, 13], [14, 15, 16, 17]], dtype=torch.bfloat16)
    empty = torch.full([3, 4], -1, dtype=torch.bfloat16)
    given = (q, k, v, empty, empty.clone(), angles, torch.tensor([1, 0]), torch.tensor([2, 0]))
    q_out, k_out, k_cache_out, v_cache_out = definition.run(*given)
    assert q_out.tolist() == [[[-2, 1]], [[3, 4]]]
    assert k_out.tolist() == [[[-2, 1], [-4, 3]], [[5, 6], [7, 8]]]
    assert k_cache_out.tolist() == [[5, 6, 7, 8], [-1] * 4, [-2, 1, -4, 3]]
    assert v_cache_out.tolist() == [[14, 15, 16, 17], [-1] * 4, [10, 11, 12, 13]]


@pytest.mark.parametrize("name", ["k_cache_out", "v_cache_out"])
def test_a_row_that_is_not_written_must_stay(case, name):
    definition, family, inputs = case
    expected = family.expected(definition, inputs)
    outputs = reference_outputs(definition, inputs, 7)
    assert all(one.passed for one in evaluate(family.policies(), outputs, expected).values())
    free = next(slot for slot in range(11) if slot not in inputs["out_loc"])
    outputs[name][free, 3] *= 1 + 2**-7
    found = evaluate(family.policies(), outputs, expected)
    assert [output for output, one in found.items() if not one.passed] == [name]


def test_the_cache_holds_the_keys_that_are_returned(case):
    """Another rounding of the same key is within the bound of each, but they are not the same key."""
    definition, family, inputs = case
    outputs = reference_outputs(definition, inputs, 7)
    assert family.unrelated(definition, inputs, outputs) == []
    slot = inputs["out_loc"][2]
    outputs["k_cache_out"][slot, 3] *= 1 + 2**-7
    assert family.unrelated(definition, inputs, outputs) == ["k_cache_out has other keys at out_loc than k_out"]
