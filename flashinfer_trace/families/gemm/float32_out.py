"""Linear layers of bf16 matrices with float32 results: routers, and the weights of the sparse-attention indexer."""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm import FEW_ROWS, PLAN, make_inputs, oracle
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error


def sum_bound(expected: Expected) -> torch.Tensor:
    inside = summation_error(expected.parts["magnitude"], int(expected.parts["length"]))
    return rounding_error(expected.value, torch.float32) + inside


SUM = ErrorBound(sum_bound, "a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer inputs")


def run_router(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    return {"C": sgl_kernel.dsv3_router_gemm(inputs["A"], inputs["B"], out_dtype=torch.float32)}


def run_cublas(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return {"C": torch.mm(inputs["A"], inputs["B"].T, out_dtype=torch.float32)}


def run_deep_gemm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import deep_gemm

    deep_gemm.bf16_gemm_nt(inputs["A"], inputs["B"], outputs["C"])
    return outputs


FAMILIES = (
    Family(
        name="gemm_float32_out",
        op_type="gemm",
        twin={"n": 48, "k": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"C": SUM},
        kernels=(
            Kernel("sgl_kernel.dsv3_router_gemm", run_router, variant="float32", limits=FEW_ROWS),
            Kernel("torch.mm", run_cublas, variant="out_dtype=float32", limits={"m": (1, 1 << 20)}),
            Kernel("deep_gemm.bf16_gemm_nt", run_deep_gemm, variant="float32", limits={"m": (1, 1 << 20)}),
        ),
    ),
)
