"""Linear layers of bf16 matrices with float32 results: routers, and the weights of the sparse-attention indexer."""

from __future__ import annotations

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.gemm import FEW_ROWS, corners, make_inputs, oracle, plan_for_axes, plans, router_sizes
from flashinfer_trace.harness.compare import ErrorBound, Expected, rounding_error, summation_error
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs


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
        plans=plans,
        corners=corners,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"C": SUM},
        kernels=(
            Kernel(
                "sgl_kernel.dsv3_router_gemm",
                "sglang-kernel",
                run_router,
                variant="float32",
                min_capability=(9, 0),
                limits=FEW_ROWS,
                supports=router_sizes,
            ),
            Kernel("torch.mm", "torch", run_cublas, variant="out_dtype=float32", limits={"m": (1, 1 << 20)}),
            Kernel(
                "deep_gemm.bf16_gemm_nt",
                "sglang-kernel",
                run_deep_gemm,
                variant="float32",
                min_capability=(9, 0),
                limits={"m": (1, 1 << 20)},
                modules=("deep_gemm",),
                optional=True,
            ),
        ),
    ),
)
