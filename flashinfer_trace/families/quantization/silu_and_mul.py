"""SwiGLU's activation and the quantization after it as one step, as grouped products of experts take it.

SGLang's Triton kernel (0.5.23, kernels/ops/moe/ep_moe_kernels.py) rounds silu(gate), and its product with up, to bf16.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families import activation
from flashinfer_trace.families.quantization import E4M3_MAX, LAUNCHABLE, SMALLEST_MAXIMUM, nearest_e4m3, quantized
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import ErrorBound, Expected, unit_roundoff
from flashinfer_trace.verdict.intervals import Interval

MODULE = "sglang.kernels.ops.moe.ep_moe_kernels"
#: Relative error of y in float32: exp within 2 ulp (4 of these), its sum with 1, a quotient of 2 ulp, two products.
ACTIVATION_ERROR = 12 * unit_roundoff(torch.float32)
#: That of y in the kernel, which also rounds silu(gate) and y to bf16.
BF16_ACTIVATION_ERROR = ACTIVATION_ERROR + 2 * unit_roundoff(torch.bfloat16) * (1 + 2**-8)
#: float32 roundings of a scale and of a quotient by it.
SCALE_ERROR, QUOTIENT_ERROR = 2 * unit_roundoff(torch.float32), 8 * unit_roundoff(torch.float32)
#: Into how many experts the kernel's rows are sorted.
EXPERTS = 8

#: The corners have values at the ends of float16's range, where the small ones vanish; ties; gates for which exp
#: overflows; and gates of zero.
PLAN = replace(
    activation.PLAN,
    special=[*({"values": kind} for kind in ("huge", "minute", "integers", "saturated")), {"zero_half": "gate"}],
)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    values = activation.silu_oracle(definition, inputs)["output"].value
    return quantized(values, definition.const_axes["group_size"], E4M3_MAX, SMALLEST_MAXIMUM)


def codes(error: float, reason: str) -> Interval:
    """The nearest code, and its neighbors as far as errors of y and of the largest y of a group move a quotient."""

    def limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
        moved = 2 * error + SCALE_ERROR + QUOTIENT_ERROR
        low, high = (nearest_e4m3(expected.value * factor) for factor in (1 - moved, 1 + moved))
        return torch.minimum(low, high), torch.maximum(low, high)

    return Interval(limits, f"the nearest e4m3 code; its neighbor too where {reason} move the quotient", codes=True)


def scales(error: float, reason: str) -> ErrorBound:
    return ErrorBound(lambda expected: expected.value * (error + SCALE_ERROR), f"a quotient of the largest y, {reason}")


def run_masked(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Rows are dealt to experts of different numbers of rows, in memory for the largest, whose other rows are NaN."""
    from sglang.kernels.ops.moe.ep_moe_kernels import silu_and_mul_masked_post_quant_fwd

    axes, gate_up = definition.const_axes, inputs["gate_up"]
    rows = torch.arange(len(gate_up), device=gate_up.device)
    # The number of trailing zeros of a row's number: half of the rows go to the first expert, and so on.
    expert = torch.stack([rows % 2**power == 0 for power in range(1, EXPERTS)]).sum(dim=0)
    counts = torch.bincount(expert, minlength=EXPERTS)
    place = torch.nn.functional.one_hot(expert, EXPERTS).cumsum(dim=0).gather(1, expert.unsqueeze(1)).squeeze(1) - 1
    shape = (EXPERTS, int(counts.max()) + 1)
    padded = gate_up.new_full((*shape, axes["gate_up_size"]), torch.nan)
    padded[expert, place] = gate_up
    found = torch.zeros(*shape, axes["intermediate_size"], dtype=torch.float8_e4m3fn, device=gate_up.device)
    factors = torch.full((*shape, axes["num_groups"]), torch.nan, device=gate_up.device)
    silu_and_mul_masked_post_quant_fwd(padded, found, factors, axes["group_size"], counts.to(torch.int32))
    own = found.view(torch.uint8)[expert, place].view(torch.float8_e4m3fn)
    return {"codes": own, "scales": factors[expert, place]}


FLOAT32 = "12 float32 roundings of each y, and 10 of the quotient,"
BF16 = "roundings of silu(gate) and of y to bf16, u = 2^-8,"
FAMILIES = (
    Family(
        name="silu_and_mul_per_token_group_quant_fp8",
        isolated=("gate_up",),
        op_type="quantization",
        twin={"intermediate_size": 96, "gate_up_size": 192, "group_size": 32, "num_groups": 3},
        plan=PLAN,
        make_inputs=activation.make_inputs,
        oracle=oracle,
        compare={"codes": codes(ACTIVATION_ERROR, FLOAT32), "scales": scales(ACTIVATION_ERROR, "12 float32 roundings")},
        kernels=(
            Kernel(
                f"{MODULE}.silu_and_mul_masked_post_quant_fwd",
                run_masked,
                variant="rows dealt to 8 experts",
                limits=LAUNCHABLE,
                compare={
                    "codes": codes(BF16_ACTIVATION_ERROR, BF16),
                    "scales": scales(BF16_ACTIVATION_ERROR, "rounded to bf16 twice, u = 2^-8"),
                },
            ),
        ),
    ),
)
