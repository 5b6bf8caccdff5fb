"""Fields that a configuration gives and the model's code does not read: SGLang does not do what they say."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from tools.extract_definitions.needs import Request


def unread(request: Request, field: str, expected: Collection[Any] = ()) -> str:
    """Why a field makes an op unsupported; "" if the code reads it, or if it is absent or has an expected value.

    Args:
        request: the model and its code.
        field: the field.
        expected: the values that say what the code does without it.
    """
    value = request.model.config.get(field)
    if value is None or field in request.usage.code.reads or value in expected:
        return ""
    said = "" if isinstance(value, (list, dict)) else f" ({field} {json.dumps(value)})"
    return f"the code does not read {field}, which the configuration gives{said}"


def of_heads(request: Request) -> str:
    """Why the size of heads is not the one that the code derives; "" if it is."""
    model = request.model
    return unread(request, "head_dim", [model.size("hidden_size") // model.size("num_attention_heads")])


def of_experts(request: Request) -> str:
    """Why the features of an expert are not those that the code takes; "" if they are."""
    model, field = request.model, "moe_intermediate_size"
    if field in request.usage.code.reads and field not in model:
        return f"the code needs the field {field}, which the configuration does not give"
    return unread(request, field, [model.config.get("intermediate_size")])


def reported(request: Request, ops: Iterable[str], *reasons: str) -> bool:
    """Whether there are reasons not to cover these ops, which are then reported."""
    reason = "; ".join(filter(None, reasons))
    if reason:
        request.uncovered.update({op: reason for op in ops if request.usage.op(op)})
    return bool(reason)
