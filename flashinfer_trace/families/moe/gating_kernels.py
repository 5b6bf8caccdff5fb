"""The kernels of routers with sigmoid scores, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import ErrorBound, Exact, Expected, rounding_error, unit_roundoff

U32 = unit_roundoff(torch.float32)
#: Roundings of a weight besides those of an exponent: exponentials (2 ulp, 4 of these) and reciprocals of two sigmoids,
#: a sum of up to 8, a division, and the products with the factor.
SINGLE_ROUNDINGS = 32
TOPK = "sglang.srt.layers.moe.topk"
KIMI_K2 = "sglang.kernels.ops.lora.moe.trtllm_lora_temp.kimi_k2_moe_fused_gate"
ONE_GROUP = "sglang.jit_kernel.grouped_topk"
#: flashinfer compiles with -use_fast_math, which turns tanhf into tanh.approx.f32: its relative error is up to 2^-11
#: (PTX ISA, "tanh"), and half of a tanh of at most 1 is a part of the score.
TANH_ERROR = 2.0**-12


@dataclass(frozen=True)
class RouterOptions:
    """What a kernel takes.

    Attributes:
        score_error: how far its scores may be off, beside float32 roundings: experts that are closer may change places.
        negative: whether all s + bias of a token may be below zero.
        ties: whether experts may have equal s + bias; otherwise it need not choose the lower index.
    """

    score_error: float = 0.0
    negative: bool = True
    ties: bool = True


REFERENCE = ErrorBound(
    lambda expected: rounding_error(expected.value, torch.float32) * (1 + 2**-20),
    "one float32 rounding of float64 scores",
)
IDS = Exact("best first, the lower index first among equal values; almost equal values are not drawn")


def weight_error(expected: Expected) -> torch.Tensor:
    """Errors of scores relative to themselves: u (32 + 4 |logit|), the latter for the exponent of the sigmoid."""
    return expected.value.abs() * U32 * (SINGLE_ROUNDINGS + 4 * expected.parts["reach"])


def with_absolute_error(expected: Expected, error: torch.Tensor | float) -> torch.Tensor:
    """`weight_error` where each score is off by up to `error` as well: in the numerator, and up to 8 in the sum."""
    relative = error / expected.parts["total"]
    return weight_error(expected) + relative * (expected.parts["factor"].abs() + 8 * expected.value.abs())


FLOAT32 = ErrorBound(weight_error, "float32 sigmoids, u = 2^-24: 4 u |logit| for the exponent, and 32 single roundings")
TANH = ErrorBound(
    lambda expected: with_absolute_error(expected, TANH_ERROR),
    "sigmoids computed as 0.5 tanh.approx(x / 2) + 0.5, off by up to 2^-12 however small they are, and 32 roundings",
)
FAST_EXP = ErrorBound(
    lambda expected: weight_error(expected) + expected.value.abs() * U32 * 4 * expected.parts["reach"],
    "float32 sigmoids from __expf, within 2 + 1.173 |x| ulp (CUDA C++ Programming Guide), u = 2^-24: 8 u |logit| for "
    "the exponents of a score and of the sum, and 32 single roundings",
)
UNBIASED = ErrorBound(
    lambda expected: with_absolute_error(expected, 2 * U32 * (1 + expected.parts["bias"])),
    "scores recovered as (s + bias) - bias, which loses 2 u (1 + |bias|), and 32 roundings",
)


def run_fused_gate(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    axes = definition.const_axes
    weights, ids = sgl_kernel.moe_fused_gate(
        inputs["routing_logits"],
        inputs["routing_bias"],
        axes["n_group"],
        axes["topk_group"],
        axes["top_k"],
        num_fused_shared_experts=axes.get("num_fused_shared_experts", 0),
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        apply_routed_scaling_factor_on_output=bool(inputs.get("apply_routed_scaling_factor_on_output", True)),
    )
    return {"topk_weights": weights, "topk_ids": ids}


def run_router(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's Triton router, which took the place of sgl_kernel's."""
    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

    axes = definition.const_axes
    weights, ids = moe_fused_gate(
        inputs["routing_logits"],
        inputs["routing_bias"],
        axes["top_k"],
        num_fused_shared_experts=axes.get("num_fused_shared_experts", 0),
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        apply_routed_scaling_factor_on_output=bool(inputs.get("apply_routed_scaling_factor_on_output", True)),
        num_expert_group=axes["n_group"],
        topk_group=axes["topk_group"],
    )
    return {"topk_weights": weights, "topk_ids": ids}


def run_fused_topk(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.fused_moe import fused_topk_deepseek

    axes = definition.const_axes
    fused_topk_deepseek(
        inputs["routing_logits"],
        inputs["routing_bias"],
        axes["n_group"],
        axes["topk_group"],
        axes["top_k"],
        float(inputs["routed_scaling_factor"]),
        outputs["topk_weights"],
        outputs["topk_ids"],
    )
    return outputs


def run_sigmoid(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    sgl_kernel.topk_sigmoid(
        outputs["topk_weights"],
        outputs["topk_ids"],
        inputs["routing_logits"],
        bool(inputs["norm_topk_prob"]),
        inputs["correction_bias"],
    )
    return outputs


def run_one_group(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.jit_kernel.grouped_topk import grouped_topk

    top_k, factor = definition.const_axes["top_k"], float(inputs["routed_scaling_factor"])
    weights, ids = grouped_topk(inputs["routing_logits"], inputs["routing_bias"], 1, 1, top_k, True, factor)
    return {"topk_weights": weights, "topk_ids": ids}


def run_kimi_k2(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.lora.moe.trtllm_lora_temp.kimi_k2_moe_fused_gate import kimi_k2_moe_fused_gate

    weights, ids = kimi_k2_moe_fused_gate(
        inputs["routing_logits"],
        inputs["routing_bias"],
        topk=definition.const_axes["top_k"],
        renormalize=True,
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        apply_routed_scaling_factor_on_output=True,
    )
    return {"topk_weights": weights, "topk_ids": ids}


def run_biased_topk(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's function without its decorator torch.compile."""
    from sglang.srt.layers.moe.topk import biased_grouped_topk_impl

    axes, logits = definition.const_axes, inputs["routing_logits"]
    with torch.compiler.set_stance("force_eager"):
        weights, ids = biased_grouped_topk_impl(
            logits,
            logits,
            inputs["routing_bias"],
            axes["top_k"],
            True,
            axes["n_group"],
            axes["topk_group"],
            axes["num_fused_shared_experts"],
            float(inputs["routed_scaling_factor"]),
            bool(inputs["apply_routed_scaling_factor_on_output"]),
        )
    return {"topk_weights": weights, "topk_ids": ids}


FUSED_GATE = Kernel("sgl_kernel.moe_fused_gate", run_fused_gate, limits=LAUNCHABLE, compare={"topk_weights": FLOAT32})
# The second best score of a group is the best of those below the best (SGLang 0.5.23, moe_fused_gate.py): where two
# experts share the best one, their group's score is too low.
ROUTER = Kernel(
    "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",
    run_router,
    limits=LAUNCHABLE,
    plan_options=RouterOptions(ties=False),
    compare={"topk_weights": FAST_EXP},
)
DEEPSEEK = (
    FUSED_GATE,
    ROUTER,
    Kernel(
        "flashinfer.fused_moe.fused_topk_deepseek",
        run_fused_topk,
        limits=LAUNCHABLE,
        plan_options=RouterOptions(score_error=TANH_ERROR),
        compare={"topk_weights": TANH},
    ),
    Kernel(
        f"{KIMI_K2}.kimi_k2_moe_fused_gate",
        run_kimi_k2,
        limits=LAUNCHABLE,
        # On an H200, of equal scores it chose expert 28 before expert 9.
        plan_options=RouterOptions(ties=False),
        compare={"topk_weights": FLOAT32},
    ),
    Kernel(
        f"{ONE_GROUP}.grouped_topk",
        run_one_group,
        limits=LAUNCHABLE,
        # It orders negative numbers by their magnitude: its key keeps their bits as they are (grouped_topk.cuh,
        # pack_val_idx).
        plan_options=RouterOptions(negative=False),
        compare={"topk_weights": FAST_EXP},
    ),
)
SHARED = (
    FUSED_GATE,
    ROUTER,
    Kernel(
        f"{TOPK}.biased_grouped_topk_impl",
        run_biased_topk,
        variant="eager",
        limits=LAUNCHABLE,
        # torch.topk chooses any of equal ones.
        plan_options=RouterOptions(ties=False),
        compare={"topk_weights": FLOAT32},
    ),
)
SIGMOID = (Kernel("sgl_kernel.topk_sigmoid", run_sigmoid, limits=LAUNCHABLE, compare={"topk_weights": UNBIASED}),)
