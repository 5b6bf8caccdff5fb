"""Strategies, corners and plans that derive from the shape of a family's plans."""

from __future__ import annotations

import dataclasses

import pytest
from drawn_plans import drawn
from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, FamilyError, PlanRequest, RowPlans

SHAPE = RowPlans(
    {
        "num_tokens": Count(40, 4096),
        "num_slots": Count(40, 4096, least=1, usual=lambda definition, axes: 4 * axes["num_tokens"], corner=5),
        "heads": Count(4, 8),
    },
    {
        "values": ("normal", "large"),
        "zero_row": lambda request: FLAG if request.large else (False,),
        "rank": Drawn(lambda request: st.integers(0, 7), 2),
    },
    special=[{"num_tokens": 1}, {"num_slots": 5000, "values": "huge"}],
    on_cpu=[{"values": "least"}],
)


def definition(**axes):
    described = {
        axis: {"type": "var"} if value is None else {"type": "const", "value": value} for axis, value in axes.items()
    }
    shape = [axis for axis, value in axes.items() if value is None]
    tensor = {"x": {"shape": shape, "dtype": "float32"}}
    return Definition.from_dict(
        {
            "name": "toy",
            "op_type": "toy",
            "axes": described,
            "inputs": tensor,
            "outputs": {"y": tensor["x"]},
            "reference": "import torch\n\n\ndef run(x):\n    return x\n",
        }
    )


TOY = definition(num_tokens=None, num_slots=None, heads=2)
USUAL = {"num_tokens": 8, "num_slots": 32, "values": "normal", "zero_row": False, "rank": 2}


def test_a_plan_for_axes_is_the_usual_one_with_these():
    draws = Draws(0, "cpu")
    assert SHAPE.plan_for_axes(TOY, {}, draws) == USUAL
    assert SHAPE.plan_for_axes(TOY, {"num_tokens": 3}, draws) == {**USUAL, "num_tokens": 3, "num_slots": 12}
    assert SHAPE.plan_for_axes(TOY, {"num_slots": 3}, draws) == {**USUAL, "num_slots": 3}
    assert SHAPE.entries(TOY) == USUAL.keys(), "an axis that is constant has no entry"
    assert SHAPE.entries(definition(num_tokens=None, num_slots=None, heads=None)) == {*USUAL, "heads"}


@pytest.mark.parametrize(("large", "most"), [(False, 40), (True, 4096)])
def test_counts_and_choices_are_drawn_within_their_ranges(large, most):
    plans = SHAPE.plans(PlanRequest(TOY, {"num_tokens": (2, 100)}, large))
    found = drawn(plans, 500)
    ranges = {name: (min(plan[name] for plan in found), max(plan[name] for plan in found)) for name in found[0]}
    assert ranges == {
        "num_tokens": (2, min(most, 100)),
        "num_slots": (1, most),
        "values": ("large", "normal"),
        "zero_row": (False, large),
        "rank": (0, 7),
    }


def test_corners_say_what_is_not_usual_and_keep_the_limits_of_a_kernel():
    usual = {**USUAL, "num_tokens": 3, "num_slots": 5}
    one, many, least = SHAPE.corners(PlanRequest(TOY, {}, large=False))
    assert one == {**usual, "num_tokens": 1}
    assert many == {**usual, "num_slots": 5000, "values": "huge"}
    assert least == {**usual, "values": "least"}
    one, many = SHAPE.corners(PlanRequest(TOY, {"num_tokens": (2, 9), "num_slots": (8, 100)}, large=True))
    assert (one["num_tokens"], one["num_slots"], many["num_slots"]) == (2, 8, 100)
    only = SHAPE.with_corners(lambda request: [{"values": "tiny"}])
    assert only.corners(PlanRequest(TOY, {}, large=False)) == [{**usual, "values": "tiny"}]


def test_a_corner_with_an_unknown_entry_is_refused():
    shape = dataclasses.replace(SHAPE, special=[{"value": "huge"}])
    with pytest.raises(FamilyError, match=r"toy: corners have entries \['value'\], plans \['num_slots', "):
        shape.corners(PlanRequest(TOY, {}, large=False))


def test_an_axis_that_a_definition_writes_in_capitals_has_the_same_entry():
    shape = RowPlans({"m": Count(40, 512)})
    for axis in "mM":
        assert shape.plan_for_axes(definition(**{axis: None}), {axis: 5}, Draws(0, "cpu")) == {"m": 5}
