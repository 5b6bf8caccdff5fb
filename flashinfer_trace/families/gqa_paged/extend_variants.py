"""Causal attention of new tokens to themselves and a cached prefix, with capped logits, a window of keys, or sinks.

From the source of SGLang's Triton attention for prefill (SGLang 0.5.23, kernels/ops/attention/extend_attention.py),
beside what `extend` says of it:

- sliding_window_size counts the keys before a query's own one. Tiles of keys that no query of a block sees are skipped.
- Capped logits and sinks are computed as in `triton_variants`.
"""

from __future__ import annotations

from dataclasses import replace

from flashinfer_trace.families.attention import flash_attention
from flashinfer_trace.families.attention.cases import SCALES
from flashinfer_trace.families.attention.variants import (
    TANH,
    TWINS,
    cap_error,
    corner_plans,
    expected_of_variant,
    variant_family,
    with_error,
    with_flushed_weights,
)
from flashinfer_trace.families.gqa_paged import extend
from flashinfer_trace.families.gqa_paged.triton_variants import with_cap, with_cap_error
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Plan, PlanRequest
from flashinfer_trace.verdict.compare import ErrorBound, Expected

(PLAIN,) = extend.FAMILIES


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output; where logits are capped, its parts have the cap as well."""
    found = expected_of_variant(definition, inputs, extend.memory(inputs), True)["output"]
    return with_cap(definition, {"output": found})


def corners(request: PlanRequest) -> list[Plan]:
    """Those of every variant; on a CPU also one with more keys than any plan draws, since its window is small."""
    long: Plan = {"kv_lens": [2600, 3], "q_lens": [2, 1], "logits": "normal", "scale": SCALES[0]}
    return [*corner_plans(PLAIN, request), *([] if request.large else [long])]


def kernel_of(kernel: Kernel, variant: str) -> Kernel:
    """A kernel of the plain family, with the bounds of one variant."""
    policy = kernel.compare["output"]
    assert isinstance(policy, ErrorBound)
    if "softcap" in variant:
        fast = kernel.path == flash_attention.PAGED_PATH
        policy = with_error(policy, cap_error, TANH) if fast else with_cap_error(policy)
    if "sinks" in variant:
        policy = with_flushed_weights(policy)
    return replace(kernel, compare={"output": policy})


FAMILIES = tuple(
    replace(
        variant_family(PLAIN, variant, (), oracle),
        plan=PLAIN.plan.with_corners(corners),
        kernels=tuple(kernel_of(kernel, variant) for kernel in PLAIN.kernels),
    )
    for variant in TWINS
)
