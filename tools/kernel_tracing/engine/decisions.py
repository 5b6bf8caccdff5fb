"""Decisions: whether the platform or constants decide a test, and what a test says about a name."""

from __future__ import annotations

import ast
from typing import Literal

from tools.kernel_tracing.engine import attributes, expressions, variants
from tools.kernel_tracing.engine.frame import Frame
from tools.kernel_tracing.engine.values import (
    ClassValue,
    Constant,
    Container,
    Instance,
    ModuleValue,
    Unknown,
    Value,
    ValueSet,
)
from tools.kernel_tracing.source.declarations import ClassInfo
from tools.kernel_tracing.source.syntax import dotted_name

Truth = Literal["true", "false", "open", "waits"]


def truth(frame: Frame, node: ast.expr) -> Truth:
    """Whether the platform or constants of modules decide a test.

    Only names of modules, results of functions, and `not`, `and`, `or` of these can decide. Parameters and fields never
    do, because the sources may set them in ways that the analysis does not see.
    """
    if isinstance(node, ast.Constant):
        return "true" if node.value else "false"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inverse: dict[Truth, Truth] = {"true": "false", "false": "true"}
        decided = truth(frame, node.operand)
        return inverse.get(decided, decided)
    if isinstance(node, ast.BoolOp):
        parts = [truth(frame, operand) for operand in node.values]
        decisive: Truth = "false" if isinstance(node.op, ast.And) else "true"
        if decisive in parts:
            return decisive
        return "open" if "open" in parts else "waits" if "waits" in parts else parts[-1]
    if isinstance(node, ast.Call):
        predicate = frame.solver.platform.predicate(dotted_name(node.func).rpartition(".")[2])
        if predicate is not None:
            return "true" if predicate else "false"
    elif isinstance(node, ast.NamedExpr):
        return truth(frame, node.value)
    elif isinstance(node, ast.Attribute):
        constant = frame.solver.platform.constant(dotted_name(node))
        if constant is not None:
            return "true" if constant else "false"
        if not _is_global_or_property(frame, node):
            return "open"
    elif isinstance(node, ast.Compare):
        return _comparison(frame, node)
    elif not isinstance(node, ast.Name):
        return "open"
    values = expressions.evaluate(frame, node)
    if not values:
        known = node.id in frame.module.bindings if isinstance(node, ast.Name) else True
        return "waits" if known and frame.solver.waits((frame.context, node), frame.context) else "open"
    decided_by = [value.literal for value in values if isinstance(value, Constant)]
    if (
        len(values) != 1
        or len(decided_by) != 1
        or not all(literal is None or isinstance(literal, bool) for literal in decided_by)
    ):
        return "open"
    return "true" if decided_by.pop() else "false"


def _is_global_or_property(frame: Frame, node: ast.Attribute) -> bool:
    """Whether an attribute is a name of a module or the result of a property; a field decides nothing."""
    owners = expressions.evaluate(frame, node.value)
    if any(isinstance(owner, ModuleValue) for owner in owners):
        return True
    methods = [
        attributes.find_method(frame, owner.info, node.attr) if isinstance(owner, Instance) else None
        for owner in owners
    ]
    return bool(methods) and all(method is not None and _PROPERTIES & method.decorators for method in methods)


_PROPERTIES = {"property", "cached_property"}


def _comparison(frame: Frame, node: ast.Compare) -> Truth:
    """`... is None` and `... is not None`, for constants of torch and for results of properties."""
    if dotted_name(node.left) == "__name__" and isinstance(node.ops[0], ast.Eq):
        return "false"  # `if __name__ == "__main__":` is false, because a server imports its modules
    if isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return _name_contains(frame, node)
    if len(node.ops) != 1 or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        return "open"
    if not (isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None):
        return "open"
    constant = frame.solver.platform.constant(dotted_name(node.left))
    if constant is not None:
        return "true" if constant == isinstance(node.ops[0], ast.IsNot) else "false"
    holds = variants.is_none(frame, node)
    if holds is not None:
        return "true" if holds else "false"
    if not isinstance(node.left, ast.Attribute) or not _is_global_or_property(frame, node.left):
        return "open"
    values = expressions.evaluate(frame, node.left)
    if not values:
        return "waits" if frame.solver.waits((frame.context, node), frame.context) else "open"
    if all(isinstance(value, Constant) and value.literal is None for value in values):
        return "true" if isinstance(node.ops[0], ast.Is) else "false"
    return "open"


def _name_contains(frame: Frame, node: ast.Compare) -> Truth:
    """`"FusedMoE" in self.__class__.__name__`: decidable, because each class of receiver is analysed separately."""
    right = node.comparators[0]
    if not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):
        return "open"
    if len(node.ops) != 1 or not dotted_name(right).endswith(".__class__.__name__"):
        return "open"
    names = [value.literal if isinstance(value, Constant) else None for value in expressions.evaluate(frame, right)]
    passes = {node.left.value in name if isinstance(name, str) else None for name in names}
    if len(passes) != 1 or None in passes:
        return "open"
    return "true" if passes.pop() == isinstance(node.ops[0], ast.In) else "false"


def narrow(frame: Frame, test: ast.expr, negated: bool) -> bool:
    """Apply what a test says about a local name; False if no value passes."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return narrow(frame, test.operand, not negated)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or if negated else ast.And):
        passes = [narrow(frame, operand, negated) for operand in test.values]  # every one narrows
        return all(passes)
    if not isinstance(test, ast.Call) or dotted_name(test.func) != "isinstance" or len(test.args) != 2:
        return True
    name = test.args[0]
    if not isinstance(name, ast.Name):
        return True
    values = frame.lookup(name.id)
    wanted = _classes(frame, expressions.evaluate(frame, test.args[1]))
    if wanted is None or not values:
        return True
    kept: set[Value] = set()
    for value in values:
        if isinstance(value, Instance):
            if any(cls in wanted for cls in frame.solver.index.mro(value.info)) != negated:
                kept.add(value)
        elif isinstance(value, Unknown) and not negated:
            for cls in _possible(frame, wanted):
                # The test says that an unknown value is one of the instances that exist.
                kept.add(frame.universe.make(Instance, cls))
                kept |= frame.read(("instances", cls))
        elif not isinstance(value, Constant) or negated:
            kept.add(value)
    frame.environment[name.id] = frozenset(kept)
    return bool(kept)


def _possible(frame: Frame, classes: list[ClassInfo]) -> list[ClassInfo]:
    configs = frame.solver.model_configs
    return [cls for cls in classes if configs is None or not configs.is_impossible(cls)]


def _classes(frame: Frame, values: ValueSet) -> list[ClassInfo] | None:
    """The classes in isinstance's second argument; None if any of them is not traced or is unknown."""
    found: list[ClassInfo] = []
    for value in values:
        if isinstance(value, ClassValue):
            found.append(value.info)
        elif isinstance(value, Container):
            inner = _classes(frame, frame.elements(frozenset((value,))))
            if inner is None:
                return None
            found += inner
        else:
            return None
    return found or None
