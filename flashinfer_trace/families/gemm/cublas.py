"""Products that models leave to PyTorch, which calls cuBLAS: with bias, of float32 matrices, and of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flashinfer_trace.families.gemm import BOTH, PLAN, PRODUCT, magnitudes
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff


def drawn(draws: Draws, shape: list[int], kind: str, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Values of a planned kind; ``positive`` ones are normal without their signs."""
    values = draws.values(shape, dtype, "normal" if kind == "positive" else kind, scale)
    return values.abs_() if kind == "positive" else values


#: By what minute weights are smaller, and so is a bias beside them.
MINUTE = 1e-6


def weight_kind(kind: str) -> str:
    """The kind of the weights: the magnitudes of activations are planned, those of weights only in `BOTH`."""
    return BOTH[kind][1] if kind in BOTH else kind if kind in ("integers", "positive") else "normal"


def kind_of(kind: str) -> str:
    """The kind of the activations."""
    return BOTH[kind][0] if kind in BOTH else kind


def matrices(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """A of the planned kind, and B with standard deviation 1/sqrt(k); also batches of them."""
    axes, kind, dtype = definition.const_axes, plan["values"], getattr(torch, definition.inputs["A"].dtype)
    batch = [axes["batch_size"]] if "batch_size" in axes else []
    n, k = axes["n"], axes["k"]
    return {
        "A": drawn(draws, [*batch, plan["m"], k], kind_of(kind), dtype),
        "B": drawn(draws, [*batch, n, k], weight_kind(kind), dtype, k**-0.5),
    }


def biased(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """The bias is of the size of the products, so that a sum without it, or rounded before it, is wrong."""
    kind = plan["values"]
    scale = MINUTE if kind == "both_minute" else 1.0
    bias = drawn(draws, [definition.const_axes["n"]], kind_of(kind), torch.bfloat16, scale)
    return {**matrices(definition, plan, draws), "bias": bias}


def expected_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> dict[str, Expected]:
    """The float64 product as (B @ A.mT).mT, plus the bias, and the sum of the magnitudes of all terms.

    With integers, partial sums are integers. Below 2^24 they are exact in float32 in any order of summation.
    """
    value = (b.double() @ a.double().mT).mT.contiguous()
    magnitude = magnitudes(a, b)
    whole = a.numel() > 0 and all(bool((each == each.round()).all()) for each in (a, b))
    if bias is not None:
        value += bias.double()
        magnitude += bias.double().abs()
        whole = whole and bool((bias == bias.round()).all())
    exact = whole and bool(magnitude.max() < 2**24)
    length = torch.tensor(float(a.shape[-1] + (bias is not None)))
    return {"C": Expected(value, {"magnitude": magnitude, "length": length}, exact)}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return expected_product(inputs["A"], inputs["B"], inputs.get("bias"))


def float32_bound(expected: Expected) -> torch.Tensor:
    magnitude = expected.parts["magnitude"]
    inside = summation_error(magnitude, int(expected.parts["length"])) + unit_roundoff(torch.float32) * magnitude
    return rounding_error(expected.value, torch.float32) + inside


FLOAT32_SUM = ErrorBound(float32_bound, "a float32 sum: (8 sqrt(k) + 1) 2^-24 |A||B|; exact for integer inputs")


def run_linear(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return {"C": torch.nn.functional.linear(inputs["A"], inputs["B"], inputs.get("bias"))}


def run_bmm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    torch.bmm(inputs["A"], inputs["B"].mT, out=outputs["C"])
    return outputs


def product_family(
    name: str,
    make_inputs: Callable[[Definition, Plan, Draws], Inputs],
    bound: ErrorBound,
    kernel: Kernel,
    twin: Mapping[str, int],
) -> Family:
    """A family whose only kernel is PyTorch's."""
    return Family(
        name=name,
        op_type="gemm",
        twin=twin,
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"C": bound},
        kernels=(kernel,),
    )


TWIN = {"n": 48, "k": 64}


LINEAR = Kernel("torch.nn.functional.linear", run_linear, variant="cuBLAS")
BMM = Kernel("torch.bmm", run_bmm, variant="cuBLAS")

FAMILIES = (
    product_family("gemm_bf16_bias", biased, PRODUCT, LINEAR, TWIN),
    product_family("gemm_float32", matrices, FLOAT32_SUM, LINEAR, TWIN),
    product_family("bmm_bf16", matrices, PRODUCT, BMM, {**TWIN, "batch_size": 3}),
)
