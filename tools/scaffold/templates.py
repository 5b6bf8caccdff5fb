"""Texts of the three files. Each is valid in form and marks with TODO what only the author knows."""

from __future__ import annotations

from string import Template

REFERENCE = '''"""TODO: the mathematics, the rules of its edge cases, and the source of each formula."""

import torch

N = 8


def run(x: torch.Tensor) -> torch.Tensor:
    """TODO: shapes and dtypes of inputs and outputs."""
    assert x.shape[1] == N
    return TODO
'''

RECORD = Template('''"""TODO: what the kernels of $family compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import ErrorBound, Expected
from flashinfer_trace.harness.family import Family, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    raise NotImplementedError("TODO: draw axes and structure, the awkward ones too; never elements")


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    raise NotImplementedError("TODO: a plan with the axes that a user gives")


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> dict[str, Any]:
    raise NotImplementedError("TODO: valid inputs from (plan, seed), through draws only")


def oracle(definition: Definition, inputs: dict[str, Any]) -> dict[str, Expected]:
    raise NotImplementedError("TODO: each output another way, in float64, with the magnitudes for its bound")


def output_bound(expected: Expected) -> torch.Tensor:
    raise NotImplementedError("TODO: derive it from unit roundoff, lengths and magnitudes of the sums")


FAMILIES = (
    Family(
        name="$family",
        op_type="$op_type",
        twin={"n": 8},  # TODO: small sizes for CPU tests
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": ErrorBound(output_bound, "TODO: why that bound")},
        kernels=(),  # TODO: the real kernels
        unverified="TODO: remove once a kernel is listed",
    ),
)
''')


def definition(family: str, op_type: str) -> dict[str, object]:
    """The first Definition of a family."""
    return {
        "name": f"{family}_n8",
        "op_type": op_type,
        "description": "TODO: what it computes, for which model and at which place.",
        "tags": ["status:unverified"],
        "axes": {
            "m": {"type": "var", "description": "TODO: what it counts."},
            "n": {"type": "const", "value": 8, "description": "TODO: what it counts; the value of a model."},
        },
        "constraints": [],
        "inputs": {"x": {"shape": ["m", "n"], "dtype": "bfloat16", "description": "TODO: meaning, layout, range."}},
        "outputs": {"output": {"shape": ["m", "n"], "dtype": "bfloat16", "description": "TODO: meaning, layout."}},
        "reference": REFERENCE,
    }
