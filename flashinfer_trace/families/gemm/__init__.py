"""Linear layers without bias, C = A @ B.T: in bf16, as models call them, and in float16, as flashinfer-bench has them.

The axes of the first are m, n and k; those of the second are M, N and K, as in flashinfer-bench's dataset.
"""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.precision import float32_sums
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error

#: By how much more than computed the sums of magnitudes may be, relative to them.
SLACK = 2.0**-8

KINDS = ("normal", "integers", "large", "tiny", "positive")
#: Kinds of activations and of weights, of which float16 would lose both; for corners on a CPU.
BOTH = {"both_huge": ("huge", "vast"), "both_minute": ("minute", "minute")}


def axis(definition: Definition, letter: str) -> str:
    """The axis `m`, `n` or `k` as the Definition writes it."""
    return letter if letter in definition.axes else letter.upper()


def corners(request: PlanRequest) -> list[Plan]:
    """A single row of products of one sign; and products beyond either end of float16's range, if A can hold them.

    On a CPU, weights are beyond it too. On a GPU they are as usual.
    """
    if request.definition.inputs["A"].dtype == "float16":
        kinds = ["minute"]
    else:
        kinds = ["huge", "minute"] if request.large else list(BOTH)
    return [{"m": 1, "values": "positive"}, *({"values": kind} for kind in kinds)]


PLAN = RowPlans({"m": Count(40, 512)}, {"values": KINDS}, special=corners, many_rows=300)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Activations of the planned kind, and weights with standard deviation 1/sqrt(k); ``integers`` makes both integers.

    ``positive``: all terms of a sum have the same sign, which exposes an accumulator that truncates or is too short.
    """
    n, k = (definition.const_axes[axis(definition, letter)] for letter in "nk")
    kind, dtype = plan["values"], getattr(torch, definition.inputs["A"].dtype)
    if kind == "positive":
        return {
            "A": draws.normal([plan["m"], k]).abs_().to(dtype),
            "B": draws.normal([n, k], scale=k**-0.5).abs_().to(dtype),
        }
    of_a, of_b = BOTH.get(kind, (kind, "integers" if kind == "integers" else "normal"))
    a = draws.values([plan["m"], k], dtype, of_a)
    b = draws.values([n, k], dtype, of_b, k**-0.5)
    return {"A": a, "B": b}


def positive_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.mT of float32 matrices without negative elements, float64, and never too small: enough for a bound.

    A GPU multiplies on tensor cores. They keep 10 of the bits of each element after the leading one, and cut off up to
    2^-23 of a sum whenever they add 8 products: 2^-10 + 2^-10 + k / 8 x 2^-23 < `SLACK` up to k = 2^16.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        product = (b @ a.mT).mT
    finally:
        torch.set_float32_matmul_precision(before)
    return product.double().mul_(1 + SLACK).contiguous()


def magnitudes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a| @ |b|.mT: see `positive_product`. Tensor cores keep all bits of float16 and bfloat16."""
    return positive_product(a.abs().float(), b.abs().float())


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The float64 product as (B @ A.T).T, together with |A||B|.

    With integer inputs, partial sums are integers. Below 2^24 they are exact in float32 in any order of summation.
    """
    rows, weights = inputs["A"], inputs["B"]
    magnitude = magnitudes(rows, weights)
    exact = rows.numel() > 0 and bool((rows == rows.round()).all())
    exact = exact and bool((weights == weights.round()).all() & (magnitude.max() < 2**24))
    value = (weights.double() @ rows.double().T).T.contiguous()
    return {"C": Expected(value, {"magnitude": magnitude, "length": torch.tensor(float(rows.shape[1]))}, exact)}


def product_bound(expected: Expected, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    inside = summation_error(expected.parts["magnitude"], int(expected.parts["length"]))
    return rounding_error(expected.value, dtype) * (1 + 2**-8) + inside


PRODUCT = ErrorBound(
    product_bound, "one bf16 rounding, u = 2^-8, of a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer inputs"
)
FLOAT16_PRODUCT = ErrorBound(
    functools.partial(product_bound, dtype=torch.float16),
    "one float16 rounding, u = 2^-11, of a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer inputs",
)


def run_cublas(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    torch.matmul(inputs["A"], inputs["B"].T, out=outputs["C"])
    return outputs


def run_cublas_float16(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    with float32_sums():
        return run_cublas(definition, inputs, outputs)


def run_fused_a(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    sgl_kernel.dsv3_fused_a_gemm(inputs["A"], inputs["B"].T, output=outputs["C"])
    return outputs


def run_router(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    return {"C": sgl_kernel.dsv3_router_gemm(inputs["A"], inputs["B"], out_dtype=torch.bfloat16)}


def run_deep_gemm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """With a view of the weights, as SGLang's deterministic mode calls it for products of bf16 matrices."""
    import deep_gemm

    deep_gemm.bf16_gemm_nn(inputs["A"], inputs["B"].T, outputs["C"])
    return outputs


FEW_ROWS = {"m": (1, 16)}

linear_layer = functools.partial(
    Family,
    op_type="gemm",
    plan=PLAN,
    make_inputs=make_inputs,
    oracle=oracle,
)

FAMILIES = (
    linear_layer(
        name="gemm",
        twin={"N": 48, "K": 64},
        compare={"C": FLOAT16_PRODUCT},
        kernels=(Kernel("torch.matmul", run_cublas_float16, variant="cuBLAS, float32 sums"),),
    ),
    linear_layer(
        name="gemm_bf16",
        twin={"n": 48, "k": 64},
        compare={"C": PRODUCT},
        kernels=(
            Kernel("torch.matmul", run_cublas, variant="cuBLAS"),
            Kernel("sgl_kernel.dsv3_fused_a_gemm", run_fused_a, limits=FEW_ROWS),
            Kernel("sgl_kernel.dsv3_router_gemm", run_router, limits=FEW_ROWS),
            Kernel("deep_gemm.bf16_gemm_nn", run_deep_gemm, limits={"m": (1, 1 << 20)}),
        ),
    ),
)
