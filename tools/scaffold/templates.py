"""Templates of the three files. Each is well-formed and marks with `TODO` what only the author knows."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template
from typing import Any

from tools.scaffold.contract import Contract, Tensor

#: The largest const axis in the initial twin of a record.
LARGEST_TWIN = 8
#: Python's type of a scalar, by the beginning of its dtype.
SCALARS = (("float", "float"), ("bfloat", "float"), ("int", "int"), ("bool", "bool"))

RECORD = Template('''"""TODO: what the kernels of $family compute."""

from __future__ import annotations

from typing import Any

$torch_import
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import $policies


PLAN = RowPlans(
    {$counts},  # TODO: the most on a CPU, and on a GPU
    {"values": VALUE_KINDS},  # TODO: what else cases differ in, e.g. "zero_row": FLAG; the usual one first
    special=[{"values": "large"}],  # TODO: what random draws seldom meet
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> dict[str, Any]:
    raise NotImplementedError("TODO: valid inputs from (plan, seed), through draws only")


def oracle(definition: Definition, inputs: dict[str, Any]) -> dict[str, Expected]:
    raise NotImplementedError("TODO: each output computed another way, in float64, with the magnitudes for its bound")

$bound
FAMILIES = (
    Family(
        name="$family",
        op_type="$op_type",
        twin={$twin},  # TODO: small sizes for CPU tests
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={
$compare
        },
        kernels=(),  # TODO: the real kernels
        unverified="TODO: remove once a kernel is listed",
    ),
)
''')

BOUND = """
def error_bound(expected: Expected) -> torch.Tensor:
    raise NotImplementedError("TODO: derive it from unit roundoff, lengths and magnitudes of the sums")

"""


def record(family: str, op_type: str, contract: Contract) -> str:
    """The harness record."""
    floating = [tensor for tensor in contract.outputs if "float" in tensor.dtype]
    exact = [tensor for tensor in contract.outputs if tensor not in floating]
    policies = {
        tensor.name: 'ErrorBound(error_bound, "TODO: why that bound")' if tensor in floating else "Exact()"
        for tensor in contract.outputs
    }
    return RECORD.substitute(
        family=family,
        op_type=op_type,
        torch_import="import torch\n" if floating else "",
        counts=", ".join(f'"{axis}": Count(40, 4096)' for axis, value in contract.axes.items() if value is None),
        policies=", ".join(["ErrorBound"] * bool(floating) + ["Exact"] * bool(exact) + ["Expected"]),
        bound=BOUND if floating else "",
        twin=", ".join(f'"{axis}": {value}' for axis, value in _twin(contract).items()),
        compare="\n".join(f'            "{name}": {policy},' for name, policy in policies.items()),
    )


def _twin(contract: Contract) -> dict[str, int]:
    """Small values of the const axes, which fulfill the constraints."""
    twin: dict[str, int] = {}
    for axis, value in contract.const_axes.items():
        factor, base = contract.derived.get(axis, (1, ""))
        twin[axis] = factor * twin[base] if base else min(value, LARGEST_TWIN)
    return twin


def reference(contract: Contract) -> str:
    """The source of run(), which asserts each const axis that a shape shows."""
    constants = [f"{axis.upper()} = {value}" for axis, value in contract.const_axes.items()]
    returned = [_annotation(tensor) for tensor in contract.outputs]
    result = returned[0] if len(returned) == 1 else f"tuple[{', '.join(returned)}]"
    parameters = [f"    {tensor.name}: {_annotation(tensor)}," for tensor in contract.inputs]
    seen: dict[str, str] = {}
    for tensor in contract.inputs:
        for dimension, axis in enumerate(tensor.shape or ()):
            if axis in contract.const_axes:
                seen.setdefault(axis, f"    assert {tensor.name}.shape[{dimension}] == {axis.upper()}")
    return "\n".join(
        [
            '"""TODO: the mathematics, the rules for its edge cases, and the source of each formula."""',
            "",
            "import torch",
            "",
            *constants,
            *([""] if constants else []),
            "",
            "def run(",
            *parameters,
            f") -> {result}:",
            '    """TODO: shapes and dtypes of inputs and outputs."""',
            *seen.values(),
            f"    return {', '.join(['TODO'] * len(contract.outputs))}",
            "",
        ]
    )


def definition(name: str, op_type: str, contract: Contract) -> dict[str, object]:
    """The first Definition of a family."""
    return {
        "name": name,
        "op_type": op_type,
        "description": "TODO: what it computes, and where which model uses it.",
        "tags": ["status:unverified"],
        "axes": {
            axis: {"type": "var", "description": "TODO: what it counts."}
            if value is None
            else {"type": "const", "value": value, "description": "TODO: what it counts; which model has this value."}
            for axis, value in contract.axes.items()
        },
        "constraints": contract.constraints,
        "inputs": _described(contract.inputs, "TODO: meaning, layout, range."),
        "outputs": _described(contract.outputs, "TODO: meaning, layout."),
        "reference": reference(contract),
    }


def _described(tensors: tuple[Tensor, ...], description: str) -> Mapping[str, Any]:
    return {
        tensor.name: {
            "shape": None if tensor.shape is None else list(tensor.shape),
            "dtype": tensor.dtype,
            "description": description,
        }
        for tensor in tensors
    }


def _annotation(tensor: Tensor) -> str:
    if tensor.shape is not None:
        return "torch.Tensor"
    return next(python for beginning, python in SCALARS if tensor.dtype.startswith(beginning))
