"""Which workloads a real kernel takes."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer_trace.harness.family import Kernel


def unfit(kernel: Kernel, axes: Mapping[str, int]) -> str | None:
    """Why a kernel does not take a workload with these axes, or None."""
    for axis, (low, high) in kernel.limits.items():
        if not low <= axes.get(axis, low) <= high:
            return f"takes {axis} from {low} to {high}, and a workload has {axes[axis]}"
    options = kernel.plan_options
    if getattr(options, "bfloat16_cache", False):
        return "reads cosines and sines as bfloat16, and those of the workloads are float32"
    if not getattr(options, "first_expert", True):
        return "loses what expert 0 computed, and tokens of the workloads choose any expert"
    if not getattr(options, "exact", True):
        return "computes probabilities in bfloat16, which does not tell apart what the logits of the workloads do"
    if error := getattr(options, "score_error", 0.0):
        return f"computes scores with an error of {error:.1e}, and those of the workloads may be closer than that"
    length, multiple = axes.get("max_padded", 0), getattr(options, "multiple", 1)
    if length % multiple:
        return f"takes lists whose length is a multiple of {multiple}, and that of a workload is {length}"
    return None
