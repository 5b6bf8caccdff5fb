"""Linear layers in int8 with one scale per token and one per output feature."""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm.fp8 import factor
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import ROWS_SPREAD, SCALES_SPREAD, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, unit_roundoff

#: ``largest``: all codes are -128, so that the sum is the largest there is; ``positive``: sums of one sign.
KINDS = ("normal", "positive", "largest", "large", "tiny", "spread")
#: Standard deviation of normal codes.
CODE_SIGMA = 127 / 4
#: float32 roundings: of the sum, and of its product with each scale.
ROUNDINGS = 3


#: The corners have the largest sums, more than float32 holds exactly, and scales beyond the range of float16.
PLAN = RowPlans(
    {"m": Count(40, 512)},
    {"values": KINDS},
    special=[{"values": values} for values in ("positive", "largest", "huge", "minute")],
    many_rows=300,
)


def codes(draws: Draws, shape: list[int], kind: str) -> torch.Tensor:
    """int8 codes of the planned kind."""
    if kind == "largest":
        return torch.full(shape, -128, dtype=torch.int8, device=draws.device)
    drawn = draws.normal(shape, scale=CODE_SIGMA).round_().clamp_(-128, 127)
    return (drawn.abs_().clamp_(max=127) if kind == "positive" else drawn).to(torch.int8)


def varied(draws: Draws, count: int, typical: float, spread: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """float32 scales [count], log-uniform within a factor of 4 of `typical` times powers of two of these exponents."""
    found = torch.exp2(draws.uniform([count], -2.0, 2.0)).mul_(typical)
    return found if spread == (0, 0) else found.mul_(draws.powers(count, *spread))


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    n, k, kind = definition.const_axes["n"], definition.const_axes["k"], plan["values"]
    of_rows, of_columns = (ROWS_SPREAD, SCALES_SPREAD) if kind == "spread" else ((0, 0), (0, 0))
    return {
        "A": codes(draws, [plan["m"], k], kind),
        "B": codes(draws, [n, k], kind),
        "A_scale": varied(draws, plan["m"], factor(kind) / CODE_SIGMA, of_rows),
        "B_scale": varied(draws, n, k**-0.5 / CODE_SIGMA, of_columns),
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The exact integers as (B @ A.T).T, times the outer product of the scales, in float64."""
    return {"C": Expected(integer_product(inputs["A"], inputs["B"]) * outer(inputs["A_scale"], inputs["B_scale"]))}


def integer_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [n, k].T of integers as float64, which holds every sum of fewer than 2^53 exactly."""
    return (b.double() @ a.double().T).T.contiguous()


def outer(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The products of two vectors in float64, [m, n]."""
    return torch.outer(rows.double(), columns.double())


def scaled_bound(expected: Expected) -> torch.Tensor:
    inside = expected.value.abs() * (ROUNDINGS * unit_roundoff(torch.float32))
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


SCALED = ErrorBound(scaled_bound, "one bf16 rounding, u = 2^-8, of an exact integer after 3 float32 roundings")


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    product = sgl_kernel.int8_scaled_mm(
        inputs["A"], inputs["B"].T, inputs["A_scale"], inputs["B_scale"], torch.bfloat16, None
    )
    return {"C": product}


FAMILIES = (
    Family(
        name="int8_scaled_mm",
        op_type="gemm",
        twin={"n": 48, "k": 2080},
        plan=PLAN,
        make_inputs=make_inputs,
        isolated=("A_scale",),
        oracle=oracle,
        compare={"C": SCALED},
        kernels=(Kernel("sgl_kernel.int8_scaled_mm", run_sgl, limits={"m": (1, 1 << 20)}),),
    ),
)
