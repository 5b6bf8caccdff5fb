"""Gated activations of feed-forward networks: silu_and_mul."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import ErrorBound, Expected, rounding_error, unit_roundoff
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws, sizes

U = unit_roundoff(torch.float32)

#: ``saturated``: gates uniform in -120..120, where the sigmoid rounds to 0 or 1 and exp overflows.
KINDS = (*VALUE_KINDS, "saturated")

#: Divisors from here on give 0 in CUDA's fast division, and infinite ones in any: exactly, silu is below |x| / 2^126.
FLUSHED = 2.0**126


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    return st.fixed_dictionaries(
        {
            "num_tokens": sizes(*request.range("num_tokens", 0, 40, 2048)),
            "values": st.sampled_from(KINDS),
            "zero_half": st.sampled_from(("neither", "neither", "gate", "up")),
        }
    )


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    return {"num_tokens": axes.get("num_tokens", 8), "values": "normal", "zero_half": "neither"}


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Gates and ups of the planned kind; of one row in the middle a half may be zero, which makes its output zero."""
    size, tokens = definition.const_axes["intermediate_size"], plan["num_tokens"]
    kind = plan["values"]
    if kind == "saturated":
        gate = draws.uniform([tokens, size], -120, 120).to(torch.bfloat16)
        up = draws.normal([tokens, size], torch.bfloat16)
    else:
        gate = draws.values([tokens, size], torch.bfloat16, kind)
        up = draws.values([tokens, size], torch.bfloat16, kind)
    if plan["zero_half"] != "neither" and tokens:
        {"gate": gate, "up": up}[plan["zero_half"]][tokens // 2] = 0
    return {"gate_up": torch.cat((gate, up), dim=-1)}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """silu in float64 as x (1 + tanh(x / 2)) / 2, and through exp where that would cancel, below -1."""
    gate, up = inputs["gate_up"].double().tensor_split(2, dim=-1)
    tail = gate.clamp_max(0).exp()
    sigmoid = torch.where(gate < -1, tail / (1 + tail), (1 + torch.tanh(gate / 2)) / 2)
    return {"output": Expected(gate * sigmoid * up, {"gate": gate, "up": up, "sigmoid": sigmoid})}


def gated_bound(expected: Expected, exponential: torch.Tensor | float, division: float) -> torch.Tensor:
    """One bf16 rounding of (gate * sigmoid) * up in float32.

    Args:
        expected: from `oracle`.
        exponential: relative error of exp(-gate); it passes into the sigmoid times 1 - sigmoid.
        division: relative error of the quotient.
    """
    value, gate, up, sigmoid = expected.value, expected.parts["gate"], expected.parts["up"], expected.parts["sigmoid"]
    relative = exponential * (1 - sigmoid) + division + 2 * U  # 1 + exp(-gate), and the product with up
    flushed = torch.where(gate < -math.log(FLUSHED), gate.abs() / FLUSHED * up.abs(), 0.0)
    # What is subnormal in float32 may be 0 as well: silu, and then the product.
    smallest = torch.finfo(torch.float32).smallest_normal * (1 + up.abs())
    return rounding_error(value, torch.bfloat16) * (1 + 2**-8) + value.abs() * relative + flushed + smallest


GATED = ErrorBound(
    lambda expected: gated_bound(expected, 4 * U, 2 * U),
    "one bf16 rounding, u = 2^-8, of float32: exp within 2 ulp, a sum, a quotient, a product; 0 where exp overflows",
)
# __expf: 2 + floor(1.173 |x|) ulp, a quotient of 2 ulp, which is 0 where the divisor exceeds 2^126 (CUDA C++
# Programming Guide, "Intrinsic Functions"). An ulp is at most 2 U.
FAST = ErrorBound(
    lambda expected: gated_bound(expected, (3 + 1.173 * expected.parts["gate"].abs()) * 2 * U, 4 * U),
    "one bf16 rounding, u = 2^-8, of float32: __expf within 2 + 1.173 |x| ulp, fast division within 2 ulp, a sum, a "
    "product; 0 where exp(-x) exceeds 2^126",
)


def run_flashinfer(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import flashinfer.activation

    flashinfer.activation.silu_and_mul(inputs["gate_up"], out=outputs["output"])
    return outputs


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel  # noqa: F401

    torch.ops.sgl_kernel.silu_and_mul.default(outputs["output"], inputs["gate_up"])
    return outputs


def whole_vectors(definition: Definition) -> str | None:
    """The kernels load 16 bytes at a time and misalign the second half of a row otherwise, which ends the process."""
    return None if definition.const_axes["intermediate_size"] % 8 == 0 else "needs intermediate_size divisible by 8"


# No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}

FAMILIES = (
    Family(
        name="silu_and_mul",
        op_type="activation",
        twin={"intermediate_size": 48, "gate_up_size": 96},
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": GATED},
        kernels=(
            Kernel(
                "flashinfer.activation.silu_and_mul",
                "flashinfer-python",
                run_flashinfer,
                limits=LAUNCHABLE,
                supports=whole_vectors,
                compare={"output": FAST},
            ),
            Kernel(
                "torch.ops.sgl_kernel.silu_and_mul",
                "sglang-kernel",
                run_sgl,
                limits=LAUNCHABLE,
                supports=whole_vectors,
                compare={"output": FAST},
            ),
        ),
    ),
)
