"""Widths of a model's feed-forward layers."""

from __future__ import annotations

from tools.extract_definitions.needs import Request

#: Features between the projections, and which layers have them ("" where all do).
Width = tuple[int, str]


def dense_widths(request: Request) -> list[Width]:
    """Layers that every token passes: dense ones, and shared experts."""
    model = request.model
    widths = []
    if model.experts is None:
        widths.append((model.size("intermediate_size"), ""))
    elif "first_k_dense_replace" in model and model.size("first_k_dense_replace"):
        widths.append((model.size("intermediate_size"), "the dense layers"))
    if "n_shared_experts" in model:
        shared = model.size("n_shared_experts")
        text = "the shared expert" if shared == 1 else f"the {shared} shared experts"
        widths.append((shared * model.expert_size, text))
    if "shared_expert_intermediate_size" in model:
        widths.append((model.size("shared_expert_intermediate_size"), "the shared expert"))
    return widths
