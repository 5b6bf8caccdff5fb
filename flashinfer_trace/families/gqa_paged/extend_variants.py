"""Causal attention of new tokens to themselves and a cached prefix, with capped logits, a window of keys, or sinks.

From the source of SGLang's Triton attention for prefill (SGLang 0.5.11, triton_ops/extend_attention.py), beside what
`extend` says of it:

- sliding_window_size counts the keys before a query's own one. Tiles of keys that no query of a block sees are skipped.
- Capped logits and sinks are computed as in `triton_variants`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.attention.cases import SCALES
from flashinfer_trace.families.attention.variants import (
    TWINS,
    expected_of_variant,
    with_flushed_weights,
    with_variant_inputs,
)
from flashinfer_trace.families.gqa_paged import extend
from flashinfer_trace.families.gqa_paged.triton_variants import with_cap, with_cap_error
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import ErrorBound, Expected

__all__ = ["FAMILIES"]

(PLAIN,) = extend.FAMILIES


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Inputs of the plain family, and the sinks, bfloat16 [heads], where the Definition has them."""
    inputs = with_variant_inputs(PLAIN.make_inputs)(definition, plan, draws)
    if "sinks" in inputs:
        inputs["sinks"] = inputs["sinks"].to(torch.bfloat16)
    return inputs


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output; where logits are capped, its parts have the cap as well."""
    found = expected_of_variant(definition, inputs, extend.memory(inputs), True)["output"]
    return with_cap(definition, {"output": found})


def corners(request: PlanRequest) -> list[Plan]:
    """Those of the plain family, and requests around the window and beyond it, with more queries than fit a tile.

    On a CPU also one with more keys than any plan draws, since its window is small.
    """
    window = request.definition.const_axes.get("window_size", 1)
    around = {"kv_lens": [window + 300, window + 1, window, 70], "q_lens": [150, 1, 1, 70]}
    # As for all kernels of attention, it is not known what they round where logits exceed float32's range.
    found: list[Plan] = [{**around, "logits": "large"}]
    if not request.large:
        long = {"kv_lens": [2600, 3], "q_lens": [2, 1], "logits": "normal"}
        found = [{**around, "logits": "normal"}, {**around, "logits": "spread"}, long]
    return [*PLAIN.corners(request), *({**plan, "scale": SCALES[0]} for plan in found)]


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    axes = definition.const_axes
    return extend.call_triton(
        inputs,
        outputs,
        logit_cap=float(axes.get("logits_soft_cap", 0)),
        sliding_window_size=axes.get("window_size", 0) - 1,
        sinks=inputs.get("sinks"),
    )


def kernel_of(variant: str) -> Kernel:
    """The kernel of the plain family, with the bounds of one variant."""
    (kernel,) = PLAIN.kernels
    policy = kernel.compare["output"]
    assert isinstance(policy, ErrorBound)
    if "softcap" in variant:
        policy = with_cap_error(policy)
    if "sinks" in variant:
        policy = with_flushed_weights(policy)
    return replace(kernel, call=run_triton, compare={"output": policy})


def family(variant: str) -> Family:
    """The record of one of `TWINS`."""
    return replace(
        PLAIN,
        name=f"{PLAIN.name}_{variant}",
        twin={**PLAIN.twin, **TWINS[variant]},
        plan=PLAIN.plan.with_corners(corners),
        make_inputs=make_inputs,
        oracle=oracle,
        kernels=(kernel_of(variant),),
    )


FAMILIES = tuple(map(family, TWINS))
