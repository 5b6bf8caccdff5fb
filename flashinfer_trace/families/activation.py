"""Gated activations of feed-forward networks: silu_and_mul, and gelu_and_mul in its exact form and with tanh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, Policy, rounding_error, unit_roundoff

U = unit_roundoff(torch.float32)

#: ``saturated``: gates uniform in -120..120, where the sigmoid rounds to 0 or 1 and exp overflows.
KINDS = (*VALUE_KINDS, "saturated")

#: Divisors from here on give 0 in CUDA's fast division, and infinite ones in any: exactly, silu is below |x| / 2^126.
FLUSHED = 2.0**126

#: The corners are a single row, gates at which a sigmoid saturates, and products beyond either end of float16's range.
CORNERS: list[Plan] = [{"num_tokens": 1}, *({"values": kind} for kind in ("saturated", "huge", "minute"))]
PLAN = RowPlans(
    {"num_tokens": Count(40, 2048)},
    {"values": KINDS, "zero_half": ("neither", "neither", "gate", "up")},
    special=CORNERS,
)
#: As many normal rows as it takes to tell tanh.approx from erf.
GELU_TANH_PLAN = replace(PLAN, special=[*CORNERS, {"num_tokens": 1024}])


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
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


def silu_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """silu in float64 as x (1 + tanh(x / 2)) / 2, and through exp where that would cancel, below -1."""
    gate, up = inputs["gate_up"].double().tensor_split(2, dim=-1)
    tail = gate.clamp_max(0).exp()
    sigmoid = torch.where(gate < -1, tail / (1 + tail), (1 + torch.tanh(gate / 2)) / 2)
    return {"output": Expected(gate * sigmoid * up, {"gate": gate, "up": up, "sigmoid": sigmoid})}


def gelu_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """x Phi(x) in float64 with 2 Phi = 1 + erf(z), and through the scaled erfcx where that would cancel, below -1."""
    gate, up = inputs["gate_up"].double().tensor_split(2, dim=-1)
    z = gate * math.sqrt(0.5)
    tail = torch.special.erfcx(-z.clamp_max(0)) * torch.exp(-gate.square() / 2)
    twice = torch.where(gate < -1, tail, 1 + torch.erf(z))
    return {"output": Expected(gate * twice / 2 * up, {"gate": gate, "up": up, "twice": twice})}


def gelu_tanh_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """x (1 + tanh(z)) / 2 in float64, and through exp where that would cancel, below z = -1."""
    gate, up = inputs["gate_up"].double().tensor_split(2, dim=-1)
    z = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3))
    tail = (2 * z.clamp_max(0)).exp()
    share = torch.where(z < -1, tail / (1 + tail), (1 + torch.tanh(z)) / 2)
    return {"output": Expected(gate * share * up, {"gate": gate, "up": up, "share": share, "z": z})}


def silu_bound(expected: Expected, exponential: torch.Tensor | float, division: float) -> torch.Tensor:
    """One bf16 rounding of (gate * sigmoid) * up in float32; relative errors of exp(-gate), which pass into the sigmoid
    times 1 - sigmoid, and of the quotient."""
    value, gate, up, sigmoid = expected.value, expected.parts["gate"], expected.parts["up"], expected.parts["sigmoid"]
    relative = exponential * (1 - sigmoid) + division + 2 * U  # 1 + exp(-gate), and the product with up
    flushed = torch.where(gate < -math.log(FLUSHED), gate.abs() / FLUSHED * up.abs(), 0.0)
    # Subnormal float32 numbers may also be 0: silu, and then the product.
    smallest = torch.finfo(torch.float32).smallest_normal * (1 + up.abs())
    return rounding_error(value, torch.bfloat16) * (1 + 2**-8) + value.abs() * relative + flushed + smallest


SILU = ErrorBound(
    lambda expected: silu_bound(expected, 4 * U, 2 * U),
    "one bf16 rounding, u = 2^-8, of float32: exp within 2 ulp, a sum, a quotient, a product; 0 where exp overflows",
)
# __expf: 2 + floor(1.173 |x|) ulp, a quotient of 2 ulp, which is 0 where the divisor exceeds 2^126 (CUDA C++
# Programming Guide, "Intrinsic Functions"). An ulp is at most 2 U.
FAST_SILU = ErrorBound(
    lambda expected: silu_bound(expected, (3 + 1.173 * expected.parts["gate"].abs()) * 2 * U, 4 * U),
    "one bf16 rounding, u = 2^-8, of float32: __expf within 2 + 1.173 |x| ulp, fast division within 2 ulp, a sum, a "
    "product; 0 where exp(-x) exceeds 2^126",
)


def gelu_bound(expected: Expected, error: torch.Tensor) -> torch.Tensor:
    """One bf16 rounding of (gate * Phi(gate)) * up in float32, whose argument gate / sqrt(2) is rounded twice; `error`
    is the additional absolute error of 2 Phi."""
    value, gate, up = expected.value, expected.parts["gate"], expected.parts["up"]
    z = gate * math.sqrt(0.5)
    # 2 Phi is erfc(-z), whose derivative is 2 / sqrt(pi) exp(-z^2).
    argument = 2 * U * z.abs() * (2 / math.sqrt(math.pi)) * torch.exp(-z.square())
    inside = (gate * up).abs() / 2 * (argument + error) + value.abs() * 3 * U
    # Subnormal float32 numbers may be 0: erfc, gelu and the product.
    smallest = torch.finfo(torch.float32).smallest_normal * (1 + up.abs() + (gate * up).abs())
    return rounding_error(value, torch.bfloat16) * (1 + 2**-8) + inside + smallest


# Largest errors of erfcf and erff: 4 and 2 ulp (CUDA C++ Programming Guide, "Mathematical Functions"); an ulp is at
# most 2 U.
GELU = ErrorBound(
    lambda expected: gelu_bound(expected, 8 * U * expected.parts["twice"]),
    "one bf16 rounding, u = 2^-8, of float32: erfc within 4 ulp of a rounded argument, three products",
)
CANCELING_GELU = ErrorBound(
    lambda expected: gelu_bound(expected, 4 * U * (expected.parts["twice"] - 1).abs() + U * expected.parts["twice"]),
    "one bf16 rounding, u = 2^-8, of float32: 1 + erf, within 2 ulp of erf, of a rounded argument, three products; "
    "|gate up| 2^-23 remains where 1 + erf cancels",
)


def gelu_tanh_bound(expected: Expected, error: torch.Tensor | float) -> torch.Tensor:
    """One bf16 rounding of (gate * share) * up in float32, whose argument z is rounded five times; `error` is the
    additional absolute error of the share."""
    value, gate, up, share, z = (expected.value, *(expected.parts[name] for name in ("gate", "up", "share", "z")))
    # The derivative of the share, the sigmoid of 2 z, is 2 share (1 - share).
    argument = 5 * U * z.abs() * 2 * share * (1 - share)
    inside = (gate * up).abs() * (argument + error) + value.abs() * 3 * U
    # Subnormal float32 numbers may be 0: the share, gelu and the product.
    smallest = torch.finfo(torch.float32).smallest_normal * (1 + up.abs() + (gate * up).abs())
    return rounding_error(value, torch.bfloat16) * (1 + 2**-8) + inside + smallest


def to_exact_gelu(expected: Expected) -> torch.Tensor:
    """How far the exact gelu is from the one with tanh: less than tanh.approx may be off."""
    gate, up, share = (expected.parts[name] for name in ("gate", "up", "share"))
    return gate * up * (torch.erfc(-gate * math.sqrt(0.5)) / 2 - share)


GELU_TANH = ErrorBound(
    lambda expected: gelu_tanh_bound(expected, 4 * U * expected.parts["share"]),
    "one bf16 rounding, u = 2^-8, of float32: exp within 2 ulp of an argument rounded 5 times, a sum, a quotient, two "
    "products",
)
# tanh.approx.f32 has a relative error of 2^-11 (PTX ISA, "tanh"). The rounding of the sum 1 + tanh is at most U.
FAST_GELU_TANH = ErrorBound(
    lambda expected: gelu_tanh_bound(expected, 2**-12 * (2 * expected.parts["share"] - 1).abs() + U),
    "one bf16 rounding, u = 2^-8, of float32: 1 + tanh.approx, within 2^-11 of tanh, of an argument rounded 5 times; "
    "|gate up| 2^-12 remains where 1 + tanh cancels; on average, nearer to tanh than to erf",
    near_miss=to_exact_gelu,
)

# No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}


def gated_family(
    name: str, oracle: Callable[[Definition, Inputs], dict[str, Expected]], reference: Policy, kernel: Policy
) -> Family:
    kernels = (
        (f"flashinfer.activation.{name}", "gate_up out=output"),
        (f"torch.ops.sgl_kernel.{name}", "output gate_up"),
        # SGLang compiles this one by itself, with --use_fast_math on Hopper.
        (f"sglang.kernels.ops.activation.activation.{name}", "gate_up output"),
    )
    return Family(
        name=name,
        op_type="activation",
        twin={"intermediate_size": 48, "gate_up_size": 96},
        plan=GELU_TANH_PLAN if name == "gelu_tanh_and_mul" else PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": reference},
        isolated=("gate_up",),  # kernels ignore strides: see docs/kernel_findings.md
        kernels=tuple(calling(path, text, limits=LAUNCHABLE, compare={"output": kernel}) for path, text in kernels),
    )


FAMILIES = (
    gated_family("silu_and_mul", silu_oracle, SILU, FAST_SILU),
    gated_family("gelu_and_mul", gelu_oracle, GELU, CANCELING_GELU),
    gated_family("gelu_tanh_and_mul", gelu_tanh_oracle, GELU_TANH, FAST_GELU_TANH),
)
