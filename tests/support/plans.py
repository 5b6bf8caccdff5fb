"""What extraction plans for a configuration, in the shape that tests compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flashinfer_trace
from tools.extract_definitions.models import Model
from tools.extract_definitions.needs import Options, Request
from tools.extract_definitions.plan import Planner
from tools.extract_definitions.traces import usage_of

__all__ = ["plan_of"]


def plan_of(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, dict[str, list[str]]], dict[str, str], list[str]]:
    """The needs of a configuration, by op and op_type; the reasons of other ops; and the ops that it never calls.

    `path` names the model and the file in error messages.
    """
    root = flashinfer_trace.find_root()
    model = Model(path.stem, path.stem, config, path)
    request = Request(model, usage_of(model.architecture, None), Options())
    ops, unsupported = Planner(root, root / "definitions").needs_of(request)
    found = {
        op: {op_type: sorted(name for name, of in names.items() if of == op_type) for op_type in set(names.values())}
        for op, names in ops.items()
    }
    return found, unsupported, sorted(op for op in request.unused if request.usage.op(op) and op not in ops)
