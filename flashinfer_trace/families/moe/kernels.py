"""Shared by the kernels of all routings: bounds, limits, records, and the call of trtllm-gen.

sgl-kernel's pipeline runs on Hopper, trtllm-gen's single call on Blackwell.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Expected, host_figures, rounding_error

#: A case fits only one scale, but judges up to millions of elements: 2 exp(-5^2 / 2) is 7e-6, 2 exp(-8^2 / 2) is 3e-14.
GAIN_CONFIDENCE = 5.0
#: Dropped bits shrink a sum of products coherently: by half a unit of 2^-13 for each of at most sqrt(128) + 4 times the
#: size of the sum, which is below 2^-10 per product; up, gate and down contribute this much each.
TRUNCATION_GAIN = 3 * 2.0**-10


def bound(model: str, reason: str, shrink: float | None = None, rounds_alike: bool = False) -> ErrorBound:
    """The policy of one of the oracle's error models.

    Args:
        model: its name, as in `experts`.
        reason: why this bound, in one line.
        shrink: if given, the scale of the whole output is judged as well, and dropped bits may shrink it by this.
        rounds_alike: whether tokens may have the same weight or only one expert, so that roundings are alike.
    """

    def elements(expected: Expected) -> torch.Tensor:
        inside = CONFIDENCE * expected.parts[f"{model}_variance"].sqrt()
        return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-7) + inside

    def gain(expected: Expected) -> float:
        shift, variance = host_figures(expected.parts["rounding_shift"], expected.parts[f"{model}_gain"])
        alike = abs(shift) if rounds_alike else 0.0
        return (shrink or 0.0) + alike + GAIN_CONFIDENCE * math.sqrt(variance)

    return ErrorBound(elements, reason, gain=None if shrink is None else gain)


REFERENCE = bound(
    "float32",
    "one bf16 rounding, u = 2^-8, and 8 standard deviations of float32 sums of n terms, n u sqrt(sum of squares) each, "
    "carried through silu and W2",
)
HOPPER = bound(
    "hopper",
    "8 standard deviations of what the pipeline rounds: gemm1, silu * up, results and weights to bf16, the activation "
    "to e4m3 in groups of 128, and fp8 sums to 13 bits; for the scale of all elements, 5 standard deviations and "
    "3 * 2^-10 for dropped bits",
    TRUNCATION_GAIN,
)
BLACKWELL = bound(
    "blackwell",
    "8 standard deviations of what trtllm-gen rounds: gemm1's output and the activation to e4m3 in groups of 128, "
    "and results to bf16; for the scale of all elements, 5 standard deviations and 3 * 2^-10 for dropped bits",
    TRUNCATION_GAIN,
)


TRTLLM_FP8 = "flashinfer.fused_moe.trtllm_fp8_block_scale_moe"
#: No kernel can be launched for zero tokens, because an empty grid is an error in CUDA.
LAUNCHABLE = {"seq_len": (1, 8192)}


def experts_kernel(
    path: str, call: KernelCall, policy: ErrorBound, variant: str = "", options: object | None = None
) -> Kernel:
    """A single call, or a pipeline of kernels around the grouped product at `path`: `variant` names the others."""
    return Kernel(path, call, variant, limits=LAUNCHABLE, plan_options=options, compare={"output": policy})


def trtllm_gen(definition: Definition, inputs: Inputs, **options: Any) -> Outputs:
    """flashinfer's single call; weights are neither shuffled nor blocked, but passed as in the Definition."""
    from flashinfer.fused_moe import Fp8QuantizationType, trtllm_fp8_block_scale_moe

    axes = definition.const_axes
    tensors = [name for name, spec in definition.inputs.items() if spec.shape is not None]
    output = trtllm_fp8_block_scale_moe(
        **{name: inputs[name] for name in tensors},
        **options,
        num_experts=axes["num_experts"],
        top_k=axes["top_k"],
        intermediate_size=axes["intermediate_size"],
        local_expert_offset=int(inputs["local_expert_offset"]),
        local_num_experts=axes["num_local_experts"],
        use_shuffled_weight=False,
        weight_layout=0,
        fp8_quantization_type=Fp8QuantizationType.DeepSeekFp8,
    )
    return {"output": output}
