"""Policies for rows in any order and for choices among ties: what they take, what they refuse, and their mutants."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from drawn_plans import small_twin

from flashinfer_trace.harness.case import run_case
from flashinfer_trace.harness.family import private_kernel
from flashinfer_trace.verdict.compare import Exact, Expected
from flashinfer_trace.verdict.unordered import UNSPECIFIED, Multiset, TopK

ROWS = Multiset("the order of the rows of one expert is open")
LARGEST = TopK("ties either way")
DESCENDING = TopK("best first, ties either way", ordered=True)


def sorted_by_expert(dtype=torch.int32):
    """Six slots of three groups, the last of which is unspecified."""
    group = torch.tensor([0, 0, 0, 4, 4, UNSPECIFIED])
    return Expected(torch.tensor([3, 5, 9, 1, 2, 7], dtype=dtype), {"group": group})


@pytest.mark.parametrize("slots", [[3, 5, 9, 1, 2, 7], [9, 3, 5, 2, 1, 7], [5, 9, 3, 1, 2, -5]])
def test_rows_of_a_group_may_be_in_any_order(slots):
    assert ROWS.compare(torch.tensor(slots, dtype=torch.int32), sorted_by_expert()).passed


@pytest.mark.parametrize(
    ("slots", "group"),
    [([3, 5, 1, 9, 2, 7], 0), ([3, 3, 9, 1, 2, 7], 0), ([3, 5, 9, 1, 1, 7], 4), ([0] * 6, 0), ([3, 5, 9, 1, 7, 2], 4)],
)
def test_rows_of_another_group_and_missing_ones_are_found(slots, group):
    found = ROWS.compare(torch.tensor(slots, dtype=torch.int32), sorted_by_expert())
    assert not found.passed
    assert f"the first is group {group}" in found.detail


def test_groups_need_not_be_contiguous_and_rows_may_have_columns():
    expected = Expected(
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [1.0, 4.0]]), {"group": torch.tensor([0, 1, 0, 1])}
    )
    assert ROWS.compare(expected.value[[2, 3, 0, 1]], expected).passed
    # The columns have the right values, but not in the same rows.
    assert not ROWS.compare(torch.tensor([[1.0, 6.0], [3.0, 4.0], [5.0, 2.0], [1.0, 4.0]]), expected).passed
    assert not ROWS.compare(expected.value[[1, 0, 2, 3]], expected).passed
    spoiled = expected.value.clone()
    spoiled[2, 1] = math.nan
    assert "1 rows have a NaN" in ROWS.compare(spoiled, expected).detail


def test_a_multiset_of_another_shape_or_of_nothing():
    assert not ROWS.compare(torch.zeros(5, dtype=torch.int32), sorted_by_expert()).passed
    nothing = Expected(torch.tensor([1, 2]), {"group": torch.tensor([UNSPECIFIED] * 2)})
    assert ROWS.compare(torch.tensor([5, 6]), nothing).passed
    assert ROWS.passes_zero(nothing, torch.int64), "a case without specified rows must count as vacuous"
    assert not ROWS.passes_zero(sorted_by_expert(), torch.int32)


#: Row 0: 5 and 3 are certain, and two of the three 2s; row 1 has two candidates for four places.
SCORES = torch.tensor([[2.0, 5.0, 2.0, 1.0, 3.0, 2.0], [-math.inf, 1.0, -math.inf, -math.inf, 0.5, -math.inf]])
CHOICE = Expected(torch.tensor([[1, 4, 0, 2], [1, 4, -1, -1]]), {"scores": SCORES.double()})


@pytest.mark.parametrize("first", [[1, 4, 0, 2], [1, 4, 5, 0], [1, 4, 2, 5]])
@pytest.mark.parametrize("policy", [LARGEST, DESCENDING])
def test_ties_may_go_either_way(policy, first):
    assert policy.compare(torch.tensor([first, [1, 4, -1, -1]]), CHOICE).passed


@pytest.mark.parametrize(
    ("rows", "detail"),
    [
        ([[0, 1, 2, 5], [1, 4, -1, -1]], "one of the k largest is not listed; row and candidate; first at [0, 4]"),
        ([[1, 4, 0, 3], [1, 4, -1, -1]], "a listed candidate is not among the k largest; first at [0, 3]"),
        ([[1, 4, 0, 0], [1, 4, -1, -1]], "a candidate is listed twice; row and candidate; first at [0, 0]"),
        ([[1, 4, 0, 6], [1, 4, -1, -1]], "an index is that of no candidate; first at [0, 3]"),
        ([[1, 4, 0, -2], [1, 4, -1, -1]], "an index is that of no candidate; first at [0, 3]"),
        ([[1, 4, 0, -1], [1, 4, -1, -1]], "a row does not list as many candidates as it has to; first at [0, 0]"),
        ([[1, 4, 0, 2], [1, 4, 0, -1]], "a row does not list as many candidates as it has to; first at [1, 0]"),
        ([[1, 4, 0, 2], [1, 0, -1, -1]], "a listed candidate is not among the k largest; first at [1, 1]"),
    ],
)
def test_wrong_choices_are_named(rows, detail):
    assert LARGEST.compare(torch.tensor(rows), CHOICE).detail == detail


@pytest.mark.parametrize("rows", [[[4, 1, 0, 2], [1, 4, -1, -1]], [[1, 4, 0, 2], [-1, 1, -1, 4]]])
def test_only_an_ordered_choice_must_descend(rows):
    assert LARGEST.compare(torch.tensor(rows), CHOICE).passed
    assert DESCENDING.compare(torch.tensor(rows), CHOICE).detail.startswith("scores do not descend along a row")


def test_scores_within_the_window_are_ties():
    scores = torch.tensor([[3.0, 2.0, 1.9, 1.0]], dtype=torch.float64)
    close = Expected(torch.tensor([[0, 1]]), {"scores": scores, "window": torch.tensor(0.2, dtype=torch.float64)})
    clear = Expected(close.value, {"scores": scores, "window": torch.tensor(0.05, dtype=torch.float64)})
    other = torch.tensor([[0, 2]])
    assert LARGEST.compare(other, close).passed
    assert not LARGEST.compare(other, clear).passed
    # Each step is within the window, but not all of them together.
    steps = torch.tensor([[1.0, 1.15, 1.3]], dtype=torch.float64)
    climbing = Expected(torch.tensor([[2, 1, 0]]), {"scores": steps, "window": torch.tensor(0.2, dtype=torch.float64)})
    assert DESCENDING.compare(climbing.value, climbing).passed
    assert not DESCENDING.compare(climbing.value.flip(1), climbing).passed


def random_multiset(seed):
    draws = torch.Generator().manual_seed(seed)
    group = torch.randint(-1, 3, (40,), generator=draws)
    return Expected(torch.randint(1, 9, (40, 2), generator=draws).float(), {"group": group})


def random_choice(seed, window):
    draws = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 30, (6, 20), generator=draws).double()
    chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :5]
    return Expected(chosen, {"scores": scores, "window": torch.tensor(window, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("policy", "draw"),
    [
        (ROWS, random_multiset),
        (LARGEST, lambda seed: random_choice(seed, 0.0)),
        (DESCENDING, lambda seed: random_choice(seed, 1.0)),
    ],
)
def test_every_mutant_applies_and_is_rejected(policy, draw):
    applied = set()
    for seed in range(20):
        expected, other = draw(2 * seed), draw(2 * seed + 1)
        assert policy.compare(expected.value, expected).passed
        for mutant in policy.mutants(expected):
            mutated = mutant.applied(expected.value, other.value)
            if mutated is not None:
                applied.add(mutant.name)
                assert not policy.compare(mutated, expected).passed, mutant.name
    all_of_them = {m.name for m in policy.mutants(draw(0)) if not m.floating_only or policy is ROWS}
    assert applied == all_of_them


def test_outputs_that_are_right_alone_must_fit_each_other():
    family, definition = small_twin("fused_add_rmsnorm_residual_out_h4096")

    def relation(definition, inputs, outputs):
        total = inputs["hidden_states"].float() + inputs["residual"].float()
        fits = torch.equal(total.bfloat16(), outputs["residual_out"])
        return [] if fits else ["residual_out is not the sum of the inputs"]

    def call(definition, inputs, poisoned):
        output, residual = definition.compiled(*inputs.values())
        return {"output": output, "residual_out": residual.flip(0)}

    anything = dataclasses.replace(Exact(), reason="for this test")
    group = torch.zeros(4, dtype=torch.int64)
    related = dataclasses.replace(
        family,
        relations=(relation,),
        compare={**family.compare, "residual_out": Multiset(anything.reason)},
        oracle=lambda d, i: {
            **(found := family.oracle(d, i)),
            "residual_out": Expected(found["residual_out"].value.bfloat16().double(), {"group": group}),
        },
    )
    plan = {"batch_size": 4, "values": "normal", "zero_row": False}
    result = run_case(definition, related, plan, 1, "cpu", private_kernel("toy.kernel", "toy", call))
    assert result.failures == ["toy.kernel: residual_out is not the sum of the inputs"]
    assert not run_case(definition, related, plan, 1, "cpu").failures
