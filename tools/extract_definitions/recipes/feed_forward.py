"""Widths of a model's feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator

from tools.extract_definitions.models import Model
from tools.extract_definitions.needs import Request

#: Features between the projections, and which layers have this width ("" if all do).
Width = tuple[int, str]
#: Fields that give a mixture of experts dense layers: the first ones, those listed, or all but every n-th.
DENSE_LAYERS = ("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq")


def dense_widths(request: Request, ops: tuple[str, ...]) -> list[Width]:
    """Widths of the layers that every token passes through: dense layers and shared experts.

    The ops are reported as unused if the configuration has no such layers, and as not covered if the code reads no
    field that gives it these layers, or if the trace lacks the ops.

    Args:
        request: the model and its code.
        ops: the ops of these layers.
    """
    widths = []
    layers = list(_layers(request.model))
    for width, where, fields in layers:
        if not fields or any(field in request.usage.code.reads for field in fields):
            widths.append((width, where))
            for op in ops:
                request.expect(op, f"{op} for {where or 'its layers'}")
        else:
            given = ", ".join(f"{field} {request.model.config[field]}" for field in fields)
            reason = f"the code does not read the field that gives the configuration {where} ({given})"
            request.uncovered.update(dict.fromkeys(ops, reason))
    if not layers:
        reason = "no layer of this model has a dense feed-forward network or a shared expert"
        request.unused.update(dict.fromkeys(ops, reason))
    return widths


def _layers(model: Model) -> Iterator[tuple[int, str, list[str]]]:
    """Width and place of each kind of layer, and the fields that give it; none if every model has it."""
    if model.experts is None:
        yield model.size("intermediate_size"), "", []
    elif fields := [field for field in DENSE_LAYERS if _gives_dense_layers(model, field)]:
        yield model.size("intermediate_size"), "the dense layers", fields
    if shared := model.count("n_shared_experts"):
        text = "the shared expert" if shared == 1 else f"the {shared} shared experts"
        yield shared * model.expert_size, text, ["n_shared_experts"]
    if shared_size := model.count("shared_expert_intermediate_size"):
        yield shared_size, "the shared expert", ["shared_expert_intermediate_size"]


def _gives_dense_layers(model: Model, field: str) -> bool:
    match field:
        case "mlp_only_layers":
            return bool(model.config.get(field))
        case "moe_layer_freq":  # a list in some configurations
            return model.config.get(field) not in (None, 1)
        case "decoder_sparse_step":
            return model.count(field) > 1
        case _:
            return model.count(field) > 0
