"""Products of bf16, float16 and float32 matrices, C = A @ B.T: with bias, with float32 results, and of batches.

The axes are m, n and k; those of the float16 product are M, N and K, as in flashinfer-bench's dataset.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.precision import float32_sums
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

#: By how much more than computed the sums of magnitudes may be, relative to them.
SLACK = 2.0**-8

KINDS = ("normal", "integers", "large", "tiny", "positive", "spread")
#: Kinds of activations and of weights; float16 would lose both; for corners on a CPU.
BOTH = {"both_huge": ("huge", "vast"), "both_minute": ("minute", "minute")}
#: The factor of minute weights, and of a bias that goes with them.
MINUTE = 1e-6

#: Of float32 products only: integers of up to 13 bits, which TF32 does not hold, in activations or in weights; the
#: other operand has -1, 0 and 1, one of 8 not 0. Sums are exact.
MANY_BITS = {"bits_of_a": ("bits", "signs"), "bits_of_b": ("signs", "bits")}
LARGEST_BITS, SIGNS_APART = 8191, 8


def axis(definition: Definition, letter: str) -> str:
    return letter if letter in definition.axes else letter.upper()


def corners(request: PlanRequest) -> list[Plan]:
    """A single row of products of one sign; products beyond either end of float16's range, on a CPU of weights as
    well."""
    if request.definition.inputs["A"].dtype == "float16":
        kinds = ["minute"]
    else:
        kinds = ["huge", "minute"] if request.large else list(BOTH)
    kinds += list(MANY_BITS) if request.definition.inputs["A"].dtype == "float32" else []
    return [{"m": 1, "values": "positive"}, *({"values": kind} for kind in kinds)]


PLAN = RowPlans({"m": Count(40, 512)}, {"values": KINDS}, special=corners, many_rows=300)


def drawn(draws: Draws, shape: list[int], kind: str, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Values of a planned kind. ``positive``: normal ones without their signs. All terms of a sum then have the same
    sign, which exposes an accumulator that truncates or is too short."""
    if kind == "bits":
        return draws.integers(shape, -LARGEST_BITS, LARGEST_BITS).to(dtype)
    if kind == "signs":
        apart = draws.integers(shape, 1 - SIGNS_APART, SIGNS_APART)
        return (apart * (apart.abs() == 1)).to(dtype)
    values = draws.values(shape, dtype, "normal" if kind == "positive" else kind, scale)
    return values.abs_() if kind == "positive" else values


def kinds_of(kind: str, dtype: torch.dtype) -> tuple[str, str]:
    """The kinds of activations and of weights; products of two spread ones are beyond float16."""
    alike = ("integers", "positive") if dtype == torch.float16 else ("integers", "positive", "spread")
    return {**BOTH, **MANY_BITS}.get(kind, (kind, kind if kind in alike else "normal"))


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """A of the planned kind, and B with standard deviation 1/sqrt(k); a bias is of the size of the products."""
    axes, dtype = definition.const_axes, getattr(torch, definition.inputs["A"].dtype)
    batch = [axes["batch_size"]] if "batch_size" in axes else []
    n, k = (axes[axis(definition, letter)] for letter in "nk")
    of_a, of_b = kinds_of(plan["values"], dtype)
    found = {}
    if "bias" in definition.inputs:
        found["bias"] = drawn(
            draws, [n], "tiny" if of_a == "spread" else of_a, dtype, MINUTE if plan["values"] == "both_minute" else 1.0
        )
    return {
        "A": drawn(draws, [*batch, plan["m"], k], of_a, dtype),
        "B": drawn(draws, [*batch, n, k], of_b, dtype, k**-0.5),
        **found,
    }


def positive_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.mT of float32 matrices without negative elements, float64, and never too small: enough for a bound. A GPU
    multiplies on tensor cores. They keep 10 of the bits of each element after the leading one, and cut off up to 2^-23
    of a sum whenever they add 8 products: 2^-10 + 2^-10 + k / 8 x 2^-23 < `SLACK` up to k = 2^16."""
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
    """The float64 product as (B @ A.mT).mT, plus the bias, and the sum of the magnitudes of all terms; integers are
    exact in float32 below 2^24."""
    a, b, bias = inputs["A"], inputs["B"], inputs.get("bias")
    value = (b.double() @ a.double().mT).mT.contiguous()
    magnitude = magnitudes(a, b)
    if bias is not None:
        value += bias.double()
        magnitude += bias.double().abs()
    terms = [each for each in (a, b, bias) if each is not None]
    whole = a.numel() > 0 and all(bool((each == each.round()).all()) for each in terms)
    length = torch.tensor(float(a.shape[-1] + (bias is not None)))
    exact = whole and bool(magnitude.max() < 2**24)
    return {"C": Expected(value, {"magnitude": magnitude, "length": length}, exact)}


def product_bound(expected: Expected, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    inside = summation_error(expected.parts["magnitude"], int(expected.parts["length"]))
    return rounding_error(expected.value, dtype) * (1 + 2**-8) + inside


def sum_bound(expected: Expected, factor: float = 0.0) -> torch.Tensor:
    """The errors of a float32 sum, of its last rounding, and of terms that are each off by `factor` of them."""
    magnitude = expected.parts["magnitude"]
    inside = summation_error(magnitude, int(expected.parts["length"]))
    return rounding_error(expected.value, torch.float32) + (inside + factor * magnitude if factor else inside)


PRODUCT = ErrorBound(
    product_bound, "one bf16 rounding, u = 2^-8, of a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer inputs"
)
FLOAT16_PRODUCT = ErrorBound(
    functools.partial(product_bound, dtype=torch.float16),
    "one float16 rounding, u = 2^-11, of a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer inputs",
)

SUM = ErrorBound(sum_bound, "a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer inputs")
FLOAT32_SUM = ErrorBound(
    functools.partial(sum_bound, factor=unit_roundoff(torch.float32)),
    "a float32 sum: (8 sqrt(k) + 1) 2^-24 |A||B|; exact for integer inputs",
)


def run_cublas(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    torch.matmul(inputs["A"], inputs["B"].T, out=outputs["C"])
    return outputs


def run_cublas_float16(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    with float32_sums():
        return run_cublas(definition, inputs, outputs)


FEW_ROWS, ROWS = {"m": (1, 16)}, {"m": (1, 1 << 20)}
TWIN = {"n": 48, "k": 64}
ROUTER = "sgl_kernel.dsv3_router_gemm", "A.contiguous B out_dtype=C.dtype"
LINEAR = calling("torch.nn.functional.linear", "A B bias|None", "cuBLAS")


def product(name: str, bound: ErrorBound, *kernels: Kernel, twin: Mapping[str, int] = TWIN) -> Family:
    return Family(
        name=name,
        op_type="gemm",
        twin=twin,
        plan=PLAN,
        make_inputs=make_inputs,
        strided=("A",),
        isolated=("A",),
        oracle=oracle,
        compare={"C": bound},
        kernels=kernels,
    )


FAMILIES = (
    product(
        "gemm",
        FLOAT16_PRODUCT,
        Kernel("torch.matmul", run_cublas_float16, variant="cuBLAS, float32 sums"),
        twin={"N": 48, "K": 64},
    ),
    product(
        "gemm_bf16",
        PRODUCT,
        Kernel("torch.matmul", run_cublas, variant="cuBLAS"),
        calling(
            "sglang.kernels.ops.gemm.dsv3_fused_a_gemm.dsv3_fused_a_gemm", "A.contiguous B.T output=C", limits=FEW_ROWS
        ),
        calling(*ROUTER, limits=FEW_ROWS),
        # With a view of the weights, as SGLang's deterministic mode calls it for products of bf16 matrices.
        calling("deep_gemm.bf16_gemm_nn", "A.contiguous B.T C", limits=ROWS),
    ),
    product(
        "gemm_bf16_bias",
        PRODUCT,
        LINEAR,
        calling("flashinfer.gemm.tinygemm_bf16", "A.contiguous B C bias", limits={"m": (1, 128)}),
    ),
    product("gemm_float32", FLOAT32_SUM, LINEAR),
    product(
        "gemm_float32_out",
        SUM,
        calling(*ROUTER, "float32", limits=FEW_ROWS),
        calling("torch.mm", "A B.T out_dtype=C.dtype", "out_dtype=float32", limits=ROWS),
        calling("sglang.kernels.ops.gemm.tiny_gemm.tiny_gemm_bf16", "A.contiguous B out=C", "float32", limits=FEW_ROWS),
        calling("deep_gemm.bf16_gemm_nt", "A.contiguous B C", "float32", limits=ROWS),
    ),
    product("bmm_bf16", PRODUCT, calling("torch.bmm", "A B.mT out=C", "cuBLAS"), twin={**TWIN, "batch_size": 3}),
)
