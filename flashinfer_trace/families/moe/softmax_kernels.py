"""The kernels of softmax routing, alone and with the experts, and their bounds."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from flashinfer_trace.families.moe.kernels import (
    BLACKWELL,
    HOPPER,
    LAUNCHABLE,
    TRTLLM_FP8,
    TRUNCATION_GAIN,
    bound,
    experts_kernel,
    trtllm_gen,
)
from flashinfer_trace.families.moe.pipeline import bf16_products, fp8_products, run_experts
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Exact, Expected, rounding_error, unit_roundoff

FUSED_EXPERTS = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
TOPK = "sglang.srt.layers.moe.topk"
U32 = unit_roundoff(torch.float32)
#: Roundings of one weight besides those of its exponent and of sums: exponential (2 ulp, 4 of these), reciprocal, two
#: products, and for norm_topk_prob a sum of up to 8 and a division.
SINGLE_ROUNDINGS = 24
#: Tensor cores add to a float32 accumulator in steps of 16 products and may drop what does not fit: at most 2^10 steps,
#: each of which drops less than one unit, 2^-23 of the sum; in up, gate and down.
BF16_TRUNCATION_GAIN = 3 * 2.0**-13


@dataclass(frozen=True)
class SoftmaxOptions:
    """What a router takes.

    Attributes:
        exact: equal logits, of which it prefers the lower index, any others that float32 tells apart, and
            norm_topk_prob; otherwise only logits whose probabilities differ in bf16.
    """

    exact: bool = True


def topk_weights_bound(expected: Expected) -> torch.Tensor:
    """Bound on a float32 softmax: exponents l - max are rounded twice (subtraction, log2(e)), also in terms of the sum.

    In the sum, errors of exponents are weighted by p: sum p (max - l) is at most ln(experts). A sum of n positive terms
    is off by 8 sqrt(n) u. A weight below the smallest normal number may be flushed to zero.
    """
    experts = float(expected.parts["experts"])
    common = SINGLE_ROUNDINGS + CONFIDENCE * math.sqrt(experts) + 2 * math.log(experts)
    relative = (2 * expected.parts["distance"] + common) * U32
    return expected.value * relative + torch.finfo(torch.float32).smallest_normal


TOPK_WEIGHTS = ErrorBound(
    topk_weights_bound,
    "a float32 softmax, u = 2^-24, with 2 u (max - l) for the exponent, 8 sqrt(experts) u for the sum, 2 ln(experts) u "
    "for its exponents, and 24 single roundings",
)
TOPK_WEIGHTS_REFERENCE = ErrorBound(
    lambda expected: rounding_error(expected.value, torch.float32) * (1 + 2**-20),
    "one float32 rounding of a float64 softmax",
)
BF16_WEIGHTS = ErrorBound(
    lambda expected: topk_weights_bound(expected) + rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8),
    f"one bf16 rounding, u = 2^-8, of {TOPK_WEIGHTS.reason}",
)
TOPK_IDS = Exact(
    "best first, the lower index first among equal logits; logits too close for float32 to distinguish are not drawn"
)
BF16_HOPPER = bound(
    "hopper",
    "8 standard deviations of what the pipeline rounds: gemm1, silu * up, results and weights to bf16, float32 sums; "
    "for the scale of all elements, 5 standard deviations and 3 * 2^-13 for dropped bits, plus the computed effect of "
    "rounding these weighted results",
    BF16_TRUNCATION_GAIN,
    rounds_alike=True,
)
FP8_HOPPER = bound(
    "hopper",
    f"{HOPPER.reason}, plus the computed effect of rounding these weighted results",
    TRUNCATION_GAIN,
    rounds_alike=True,
)


def topk_softmax(definition: Definition, inputs: Inputs, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Writes weights float32 and ids int32, both [tokens, top_k]."""
    import sgl_kernel

    sgl_kernel.topk_softmax(weights, ids, inputs["routing_logits"], bool(inputs["norm_topk_prob"]))


def run_topk_softmax(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    topk_softmax(definition, inputs, outputs["topk_weights"], outputs["topk_ids"])
    return outputs


def chosen_by_kernel(definition: Definition, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits = inputs["routing_logits"]
    shape = (logits.shape[0], definition.const_axes["top_k"])
    weights = torch.full(shape, math.nan, dtype=torch.float32, device=logits.device)
    ids = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
    topk_softmax(definition, inputs, weights, ids)
    return weights, ids


def run_fp8_pipeline(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return run_experts(definition, inputs, outputs, *chosen_by_kernel(definition, inputs), fp8_products)


def run_bf16_pipeline(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return run_experts(definition, inputs, outputs, *chosen_by_kernel(definition, inputs), bf16_products)


@functools.cache
def publish_settings() -> None:
    """Gives this process SGLang's default settings, once: its functions ask a running server for them."""
    from sglang.srt.runtime_context import get_context, get_parallel

    get_context().override_server_args().install()
    get_parallel().override_permanently(tp_group=None)


def fused_experts(definition: Definition, inputs: Inputs, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the local experts among the chosen ones: weights float32 and ids int32, [tokens, top_k].

    SGLang runs its Triton experts for bfloat16 weights unless it is told otherwise. Their first product is [gate, up],
    where the Definitions have [up, gate], as flashinfer's kernels take it: the halves are exchanged before the call.
    Experts of other ranks have the id -1, and rows of theirs are left out.
    """
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    publish_settings()
    axes, first = definition.const_axes, inputs["gemm1_weights"]
    local = ids - int(inputs["local_expert_offset"])
    local = torch.where((local >= 0) & (local < axes["num_local_experts"]), local, -1).to(torch.int32)
    config = MoeRunnerConfig(
        num_experts=axes["num_experts"],
        num_local_experts=axes["num_local_experts"],
        hidden_size=axes["hidden_size"],
        intermediate_size_per_partition=axes["intermediate_size"],
        top_k=axes["top_k"],
        inplace=False,
    )
    chosen = StandardTopKOutput(weights, local, inputs["routing_logits"])
    gate_up = first.roll(axes["intermediate_size"], dims=1)
    result: torch.Tensor = fused_moe.fused_experts(
        inputs["hidden_states"], gate_up, inputs["gemm2_weights"], chosen, config
    )
    return result


def run_triton_experts(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return {"output": fused_experts(definition, inputs, *chosen_by_kernel(definition, inputs))}


def run_fp8_trtllm_gen(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Renormalize computes the softmax over the chosen logits, Default the softmax over all logits."""
    from flashinfer.fused_moe import RoutingMethodType

    method = RoutingMethodType.Renormalize if inputs["norm_topk_prob"] else RoutingMethodType.Default
    return trtllm_gen(
        definition,
        inputs,
        routing_bias=None,
        n_group=None,
        topk_group=None,
        routed_scaling_factor=None,
        routing_method_type=method.value,
    )


def run_grouped_topk(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's function without its decorator torch.compile, for one group. It lists chosen experts in any order."""
    from sglang.srt.layers.moe.topk import grouped_topk_gpu

    logits = inputs["routing_logits"]
    top_k, norm = definition.const_axes["top_k"], bool(inputs["norm_topk_prob"])
    with torch.compiler.set_stance("force_eager"):
        weights, ids = grouped_topk_gpu(logits, logits, top_k, norm, num_expert_group=1, topk_group=1)
    order = weights.argsort(dim=1, descending=True)
    return {"topk_weights": weights.gather(1, order), "topk_ids": ids.gather(1, order)}


TOPK_SOFTMAX = (
    Kernel("sgl_kernel.topk_softmax", run_topk_softmax, limits=LAUNCHABLE, compare={"topk_weights": TOPK_WEIGHTS}),
    Kernel(
        f"{TOPK}.grouped_topk_gpu",
        run_grouped_topk,
        variant="eager, one group",
        limits=LAUNCHABLE,
        plan_options=SoftmaxOptions(exact=False),
        compare={"topk_weights": BF16_WEIGHTS},
    ),
)
BF16_KERNELS = (
    experts_kernel(
        "torch.nn.functional.grouped_mm",
        run_bf16_pipeline,
        BF16_HOPPER,
        "pipeline with sgl_kernel: topk_softmax, prepare_moe_input, shuffle_rows, silu_and_mul, shuffle_mul_sum",
    ),
    # It rounds where the pipeline does: both products, and silu * up; the weight is applied before.
    experts_kernel(f"{FUSED_EXPERTS}.fused_experts", run_triton_experts, BF16_HOPPER, "with sgl_kernel: topk_softmax"),
)
FP8_KERNELS = (
    experts_kernel(
        "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
        run_fp8_pipeline,
        FP8_HOPPER,
        "pipeline: topk_softmax, prepare_moe_input, shuffle_rows, silu_and_mul, group_quant, shuffle_mul_sum",
    ),
    experts_kernel(TRTLLM_FP8, run_fp8_trtllm_gen, BLACKWELL),
)
