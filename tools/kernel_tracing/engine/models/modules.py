"""torch.nn.Module: calling an instance runs `__call__`, or else `forward`, even if that is set from outside."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tools.kernel_tracing.engine.values import EMPTY, Instance, ValueSet
from tools.kernel_tracing.source.syntax import dotted_name

if TYPE_CHECKING:
    from tools.kernel_tracing.engine.frame import Arguments, Frame
    from tools.kernel_tracing.engine.solver import Context
    from tools.kernel_tracing.source.index import Index


def is_forward(index: Index, context: Context) -> bool:
    """Whether a context is the forward of an nn.Module."""
    if not isinstance(context.receiver, Instance) or context.function.qualname.rpartition(".")[2] != "forward":
        return False
    bases = [base for info in index.mro(context.receiver.info) for base in info.node.bases]
    return any(dotted_name(base).rpartition(".")[2] == "Module" for base in bases)


def call_instance(
    frame: Frame, callee: Instance, arguments: Arguments, node: ast.expr, approximate: str = ""
) -> ValueSet:
    """Call an instance."""
    from tools.kernel_tracing.engine import attributes

    name = "__call__"
    if attributes.find_method(frame, callee.info, name) is None:
        # A class with an untraced base inherits __call__ from it; that of nn.Module runs forward.
        name = "forward"
        if attributes.find_method(frame, callee.info, name) is None:
            replaced = frame.read(("field", callee.info, name))
            return _call_all(frame, replaced, arguments, node, approximate) if replaced else frame.universe.any
    return _call_all(frame, attributes.load_one(frame, callee, name, node), arguments, node, approximate)


def _call_all(frame: Frame, callees: ValueSet, arguments: Arguments, node: ast.expr, approximate: str) -> ValueSet:
    from tools.kernel_tracing.engine import calls

    found: ValueSet = EMPTY
    for callee in callees:
        found |= calls.call_one(frame, callee, arguments, node, approximate)
    return found
