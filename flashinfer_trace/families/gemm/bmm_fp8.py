"""Batched products of fp8 matrices with one scale per operand: the absorbed projections of MLA."""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm.fp8 import PLAN, PRODUCT, codes, factor, scales
from flashinfer_trace.families.gemm.fp8_scaled import expected_product
from flashinfer_trace.families.gemm.truncation import TRUNCATED
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import Expected


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, kind = definition.const_axes, plan["values"]
    return {
        "A": codes(draws, [axes["batch_size"], plan["m"], axes["k"]], kind),
        "B": codes(draws, [axes["batch_size"], axes["n"], axes["k"]], kind),
        "A_scale": scales(draws, [], kind, factor(kind)).item(),
        "B_scale": scales(draws, [], kind, axes["k"] ** -0.5).item(),
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    scale = torch.tensor(inputs["A_scale"] * inputs["B_scale"], dtype=torch.float64, device=inputs["A"].device)
    return {"C": expected_product(inputs["A"], inputs["B"], scale)}


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.gemm import bmm_fp8

    a, b = inputs["A"], inputs["B"]
    a_scale, b_scale = (torch.tensor([inputs[name]], device=a.device) for name in ("A_scale", "B_scale"))
    bmm_fp8(a, b.transpose(1, 2), a_scale, b_scale, torch.bfloat16, out=outputs["C"])
    return outputs


FAMILIES = (
    Family(
        name="bmm_fp8",
        op_type="gemm",
        twin={"batch_size": 3, "n": 48, "k": 96},
        plan=PLAN,
        make_inputs=make_inputs,
        isolated=("A",),
        oracle=oracle,
        compare={"C": PRODUCT},
        kernels=(
            Kernel("sglang.kernels.ops.gemm.bmm_fp8", run_sgl, limits={"m": (1, 1 << 20)}, compare={"C": TRUNCATED}),
        ),
    ),
)
