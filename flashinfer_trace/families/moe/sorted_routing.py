"""Softmax routing that also sorts the chosen rows by expert, as triton_kernels does it in front of its products."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.moe import softmax
from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.families.moe.softmax_kernels import topk_weights_bound
from flashinfer_trace.families.quantized import ranks
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import ErrorBound, Exact, Expected, rounding_error

GAMMAS = ErrorBound(
    lambda expected: topk_weights_bound(expected) + rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8),
    "one bf16 rounding, u = 2^-8, of a float32 softmax over the chosen logits: 2^-24 (2 (max - l) + 8 sqrt(top_k) + "
    "2 ln(top_k) + 24)",
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    return {"routing_logits": softmax.draw_logits(definition, plan, draws)}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Which experts each token chose, by counting ranks; rows by counting those of lower experts, and of tokens before.

    Parts of the weights: those of `softmax_kernels.topk_weights_bound`.
    """
    logits = inputs["routing_logits"].double()
    top_k = definition.const_axes["top_k"]
    chosen = ranks(logits) < top_k
    counts = chosen.sum(dim=0)
    rows = (counts.cumsum(0) - counts) + chosen.cumsum(dim=0) - 1
    positions = rows[chosen]
    own = logits[chosen].view(-1, top_k)
    largest = own.amax(dim=1, keepdim=True) if len(own) else own[:, :1]
    weights = (own - largest).exp()
    weights = weights / weights.sum(dim=1, keepdim=True)
    # A permutation is inverted by placing each number where it points to.
    pairs = torch.empty_like(positions).scatter_(0, positions, torch.arange(len(positions), device=logits.device))
    parts = {
        "distance": (largest - own).flatten()[pairs],
        "experts": torch.tensor(float(top_k), dtype=torch.float64, device=logits.device),
    }
    return {
        "gammas": Expected(weights.flatten()[pairs], parts),
        "expert_counts": Expected(counts),
        "row_pairs": Expected(pairs),
        "positions": Expected(positions.view(-1, top_k)),
    }


def run_routing(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it for a model that normalizes the weights of the chosen experts.

    The kernel lists the choices of a token best first (up to sglang-kernel 0.4.2, by expert), and numbers pairs and
    rows so. The numbers are translated; rows are the same, because they are sorted by expert and by token.
    """
    from triton_kernels.topk import topk

    top_k = definition.const_axes["top_k"]
    found = topk(inputs["routing_logits"], top_k, apply_softmax=True)
    order, metadata = found.indx.argsort(dim=1), found.mask_metadata
    pairs = metadata.col_sorted_indx
    choice = order.argsort(dim=1).flatten()[pairs]
    return {
        "gammas": found.vals.flatten()[pairs],
        "expert_counts": metadata.col_sum,
        "row_pairs": (pairs // top_k * top_k + choice).to(torch.int32),
        "positions": metadata.row_sorted_indx.view(order.shape).gather(1, order),
    }


FAMILIES = (
    Family(
        name="moe_topk_softmax_sorted",
        op_type="moe",
        twin={"num_experts": 16, "top_k": 4},
        # More than 2048 rows of an expert, the most that are drawn on a GPU.
        plan=replace(softmax.ROUTER_PLAN, many_rows=9000),
        make_inputs=make_inputs,
        oracle=oracle,
        compare={
            "gammas": GAMMAS,
            "expert_counts": Exact("counts"),
            "row_pairs": Exact("pairs of an expert are in ascending order"),
            "positions": Exact("rows are numbered in the order of experts, and of pairs"),
        },
        kernels=(Kernel("triton_kernels.topk.topk", run_routing, limits=LAUNCHABLE),),
    ),
)
