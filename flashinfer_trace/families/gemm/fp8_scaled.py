"""Linear layers in fp8 with one scale per token and one per output feature."""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm.fp8 import PLAN, PRODUCT, codes, factor, powers_of_two, scales, whole
from flashinfer_trace.families.gemm.truncation import TRUNCATED, truncated_parts, truncated_product
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import ROWS_SPREAD, SCALES_SPREAD, Draws
from flashinfer_trace.verdict.compare import Expected


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    n, k, kind = definition.const_axes["n"], definition.const_axes["k"], plan["values"]
    return {
        "A": codes(draws, [plan["m"], k], kind),
        "B": codes(draws, [n, k], kind),
        "A_scale": scales(draws, [plan["m"]], kind, factor(kind), ROWS_SPREAD),
        "B_scale": scales(draws, [n], kind, k**-0.5, SCALES_SPREAD),
    }


def expected_product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> Expected:
    """The float64 product of codes a [..., m, k] and b [..., n, k], times scales, and what a tensor core may lose.

    With integer codes, partial sums are integers. Below 2^24 they are exact in float32, and so is their product with
    scales that are powers of two.
    """
    a, b = a.double(), b.double()
    loss = truncated_product(a, b)
    magnitude = a.abs() @ b.abs().mT
    exact = magnitude.numel() > 0 and powers_of_two(scale) and whole(a) and whole(b) and bool(magnitude.max() < 2**24)
    parts = {**truncated_parts(loss, scale), "magnitude": magnitude * scale, "length": torch.tensor(float(a.shape[-1]))}
    return Expected(loss.product * scale, parts, exact)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    scale = torch.outer(inputs["A_scale"].double(), inputs["B_scale"].double())
    return {"C": expected_product(inputs["A"], inputs["B"], scale)}


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    product = sgl_kernel.fp8_scaled_mm(
        inputs["A"], inputs["B"].T, inputs["A_scale"], inputs["B_scale"], torch.bfloat16, None
    )
    return {"C": product}


FAMILIES = (
    Family(
        name="fp8_scaled_mm",
        op_type="gemm",
        twin={"n": 48, "k": 160},
        plan=PLAN,
        make_inputs=make_inputs,
        isolated=("A",),
        oracle=oracle,
        compare={"C": PRODUCT},
        kernels=(Kernel("sgl_kernel.fp8_scaled_mm", run_sgl, limits={"m": (1, 1 << 20)}, compare={"C": TRUNCATED}),),
    ),
)
