"""Causal attention of new tokens to themselves and a cached prefix, with capped logits, a window of keys, or sinks.

From the source of SGLang's Triton attention for prefill (SGLang 0.5.11, triton_ops/extend_attention.py), beside what
`extend` says of it:

- tanh x is 2 sigmoid(2 x) - 1, so that its error does not become smaller with x: see `CAP_ERROR`.
- sliding_window_size counts the keys before a query's own one. Tiles of keys that no query of a block sees are skipped.
- A sink adds exp(sink - m) to the denominator, where m is the largest logit of a key. Where that exceeds float32's
  range, the output is 0: see `FLUSHED`.
- Sinks have the dtype of the model, bf16, and are widened to float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.attention.paged import distinct_pages
from flashinfer_trace.families.attention.rounding import FLOAT32
from flashinfer_trace.families.attention.variants import TWINS, expected_of_variant, with_variant_inputs
from flashinfer_trace.families.gqa_paged import extend
from flashinfer_trace.harness.compare import ErrorBound, Expected, host_figures
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws

__all__ = ["FAMILIES"]

(PLAIN,) = extend.FAMILIES

#: Absolute error of a capped logit, as a multiple of the cap. Each of these is a bound in units of 2^-24: the quotient
#: logit / cap is within 2 ulp, 4 |x|, of which tanh leaves less than 2; sigmoid(y) = 1 / (1 + exp(-y)) is within
#: (4 + 2 |y|) s (1 - s) < 1.5 from exp, 1 from the sum and 4 from the quotient, all of it doubled; and 1 from the
#: difference with 1. The product with the cap is among the roundings that the oracle counts.
CAP_ERROR = 16 * FLOAT32
#: float32's smallest normal number, for values below 2^7: what a quotient below it may be flushed by.
FLUSHED = 2.0**-119


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Inputs of the plain family, and the sinks, bfloat16 [heads], where the Definition has them."""
    inputs = with_variant_inputs(PLAIN.make_inputs)(definition, plan, draws)
    if "sinks" in inputs:
        inputs["sinks"] = inputs["sinks"].to(torch.bfloat16)
    return inputs


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output; where logits are capped, its parts have the cap as well."""
    found = expected_of_variant(definition, inputs, extend.memory(inputs), True)["output"]
    cap = definition.const_axes.get("logits_soft_cap")
    if cap is not None:
        found = replace(found, parts={**found.parts, "cap": found.value.new_tensor(float(cap))})
    return {"output": found}


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
    for plan in found:
        plan |= {"shared_prefix": 0, "unused": "nan", "num_slots": distinct_pages(extend.cached_lengths(plan), 1)}
    return [*PLAIN.corners(request), *found]


def cap_error(expected: Expected) -> torch.Tensor:
    """What errors d of the capped logits do to an output o: at most the sum of p |d| |v - o|."""
    return (expected.parts["weighted"] + expected.value.abs()) * (expected.parts["cap"] * CAP_ERROR)


def with_cap_error(policy: ErrorBound) -> ErrorBound:
    """A policy whose bound, and whose gain, allow for `cap_error`."""

    def bound(expected: Expected) -> torch.Tensor:
        return policy.bound(expected) + cap_error(expected)

    def gain(expected: Expected) -> float:
        assert policy.gain is not None
        (moved,) = host_figures((expected.value.abs() * cap_error(expected)).sum() / expected.parts["gain_size"])
        return policy.gain(expected) + moved

    return ErrorBound(bound, f"{policy.reason}; tanh(x) as 2 sigmoid(2 x) - 1 is within 2^-20, times the cap", gain)


def with_flushed_outputs(policy: ErrorBound) -> ErrorBound:
    """A policy that lets outputs near float32's smallest normal number be 0: those beside a sink that outweighs all."""

    def bound(expected: Expected) -> torch.Tensor:
        return policy.bound(expected) + FLUSHED

    return ErrorBound(bound, f"{policy.reason}; weights below 2^-126 may be 0", policy.gain)


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
        policy = with_flushed_outputs(policy)
    return replace(kernel, call=run_triton, compare={"output": policy})


def family(variant: str) -> Family:
    """The record of one of `TWINS`."""
    return replace(
        PLAIN,
        name=f"{PLAIN.name}_{variant}",
        twin={**PLAIN.twin, **TWINS[variant]},
        corners=corners,
        make_inputs=make_inputs,
        oracle=oracle,
        kernels=(kernel_of(variant),),
    )


FAMILIES = tuple(map(family, TWINS))
