"""The Walsh-Hadamard transform, which turns the indexer's queries and keys before they are rounded to fp8."""

from __future__ import annotations

import math

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, unit_roundoff

U = unit_roundoff(torch.float32)
MODULE = "sglang.kernels.ops.quantization.hadamard"
#: ``one_hot``: a row with one feature that is not 0 shows a row of the matrix.
KINDS = (*VALUE_KINDS, "one_hot")
#: -1 stands for the scale that SGLang uses, the reciprocal of the root of the order.
SCALES = (-1, 1.0, 0.5, 0.3)


def corners(request: PlanRequest) -> list[Plan]:
    # If a scale is not a power of two, a rounding before it shows, and so does one of the scale itself.
    scale = 0.5 if request.large else 0.3
    return [{"values": "one_hot", "scale": 0.5}, *({"values": kind, "scale": scale} for kind in ("huge", "minute"))]


PLAN = RowPlans({"num_rows": Count(40, 8192, usual=64)}, {"values": KINDS, "scale": SCALES}, special=corners)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    size, count = definition.const_axes["head_dim"], plan["num_rows"]
    if plan["values"] == "one_hot":
        x = torch.zeros(count, size, dtype=torch.bfloat16, device=draws.device)
        x.scatter_(1, draws.integers([count, 1], 0, size - 1), 1.0)
    else:
        x = draws.values([count, size], torch.bfloat16, plan["values"])
    scale = size**-0.5 if plan["scale"] == -1 else plan["scale"]
    return {"x": x, "scale": float(torch.tensor(scale, dtype=torch.float32))}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    x, scale = inputs["x"].double(), inputs["scale"]
    size = x.shape[1]
    index = torch.arange(size, device=x.device)
    common = index[:, None] & index
    bits = sum(((common >> bit) & 1) for bit in range(size.bit_length()))
    value = x @ (1.0 - 2.0 * (torch.as_tensor(bits) % 2)).double() * scale
    magnitude = x.abs().sum(dim=1, keepdim=True) * abs(scale)
    # Sums of small integers, and their products with a power of two, are exact in any order.
    small = bool((x == x.round()).all()) and bool((x.abs() <= 256).all())
    return {"output": Expected(value, {"magnitude": magnitude}, small and math.frexp(scale)[0] == 0.5)}


def transformed_bound(expected: Expected) -> torch.Tensor:
    """One bf16 rounding of a float32 sum in which each term passes log2(n) additions, and of its product with scale."""
    depth = math.log2(expected.value.shape[1])
    inside = expected.parts["magnitude"] * (depth + 1) * U
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


TRANSFORMED = ErrorBound(
    transformed_bound,
    "one bf16 rounding, u = 2^-8, of float32: log2(n) additions and a product, (log2(n) + 1) 2^-24 |scale| sum |x|; "
    "exact for small integers and a scale that is a power of two",
)


def run_jit(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.quantization.hadamard import hadamard_transform

    return {"output": hadamard_transform(inputs["x"], inputs["scale"])}


FAMILIES = (
    Family(
        name="hadamard_transform",
        op_type="sparse_attention",
        twin={"head_dim": 16},
        plan=PLAN,
        make_inputs=make_inputs,
        isolated=("x",),
        oracle=oracle,
        compare={"output": TRANSFORMED},
        kernels=(Kernel(f"{MODULE}.hadamard_transform", run_jit, limits={"num_rows": (1, 1 << 20)}),),
    ),
)
