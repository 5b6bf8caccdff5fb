"""Widths of a model's feed-forward layers."""

from __future__ import annotations

from tools.extract_definitions.models import Model
from tools.extract_definitions.needs import Request

#: Features between the projections, and which layers have this width ("" if all do).
Width = tuple[int, str]


def dense_widths(request: Request) -> list[Width]:
    """Widths of the layers that every token passes through: dense layers and shared experts."""
    model = request.model
    widths = []
    if model.experts is None:
        widths.append((model.size("intermediate_size"), ""))
    elif _has_dense_layers(model):
        widths.append((model.size("intermediate_size"), "the dense layers"))
    if shared := model.count("n_shared_experts"):
        text = "the shared expert" if shared == 1 else f"the {shared} shared experts"
        widths.append((shared * model.expert_size, text))
    if shared_size := model.count("shared_expert_intermediate_size"):
        widths.append((shared_size, "the shared expert"))
    return widths


def _has_dense_layers(model: Model) -> bool:
    """Whether some layers of a mixture of experts are dense: the first ones, those listed, or all but every n-th."""
    if model.count("first_k_dense_replace") or model.config.get("mlp_only_layers"):
        return True
    return "decoder_sparse_step" in model and model.size("decoder_sparse_step") > 1
