"""Names in tests: the value of a flag, a local name, a field or a constant that is assigned only one value."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence

from tools.kernel_tracing.engine.solver import Solver
from tools.kernel_tracing.engine.values import Constant
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo, Module, Symbol
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.syntax import dotted_name, walk_scopes

_OTHER = ast.Constant(None)  # represents anything but a plain assignment


class Names:
    """Looks names up in the sources of one solved analysis."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.index = solver.index
        self._assigned: dict[FunctionInfo, dict[str, ast.expr]] = {}
        self._fields: dict[ClassInfo, dict[str, list[tuple[FunctionInfo, ast.expr]]]] = {}

    def decided(self, test: ast.expr, function: FunctionInfo) -> bool | None:
        """The truth of a flag that the platform decides; None for anything else."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand, function)
            return None if inner is None else not inner
        if isinstance(test, ast.Call):
            name = test.func.attr if isinstance(test.func, ast.Attribute) else dotted_name(test.func)
            return False if self.solver.platform.function_is_foreign(name) else self.solver.platform.predicate(name)
        if not isinstance(test, ast.Name) or test.id in self._locals(function):
            return None
        module, name = self.origin(function.module, test.id)
        values = self.solver.peek(("global", module.name, name))
        literals = [value.literal for value in values if isinstance(value, Constant)]
        if len(values) == len(literals) == 1 and isinstance(literals[0], bool) and name not in module.rebound:
            return literals[0]
        return None

    def origin(self, module: Module, name: str, depth: int = 0) -> tuple[Module, str]:
        """The module that defines a name that may be imported."""
        for node in module.bindings.get(name, []):
            if isinstance(node, ast.ImportFrom) and depth < 10:
                source = self.index.module(module.absolute(node))
                original = next(item.name for item in node.names if (item.asname or item.name) == name)
                if source is not None and original in source.bindings:
                    return self.origin(source, original, depth + 1)
        return module, name

    def given(self, name: str, function: FunctionInfo) -> tuple[ast.expr, FunctionInfo] | None:
        """What a name in a function is assigned, if only once, and where: in the function or in a module's body."""
        value = self._locals(function).get(name)
        if value is None:
            module, name = self.origin(function.module, name)
            values = [node.value for node in module.bindings.get(name, []) if isinstance(node, ast.Assign)]
            if len(values) != 1 or name in module.rebound:
                return None
            value, function = values[0], module.body
        return None if isinstance(value, ast.Constant) else (value, function)

    def _locals(self, function: FunctionInfo) -> dict[str, ast.expr]:
        """Local names -> what they are assigned; `ast.Constant(None)` for parameters and unless assigned once."""
        if function not in self._assigned:
            counts: dict[str, list[ast.expr | None]] = defaultdict(list)
            if not isinstance(function.node, ast.Module):
                for parameter in (*function.parameters, *(one.arg for one in function.node.args.kwonlyargs)):
                    counts[parameter].append(None)
                for node, nested in walk_scopes(function.node):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not nested:
                        counts[node.id].append(None)
                    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not nested:
                        counts[node.targets[0].id].append(node.value)
            self._assigned[function] = {
                name: next((value for value in found if value is not None), ast.Constant(None))
                for name, found in counts.items()
                if len(found) <= 2
            }
            for name, found in counts.items():
                if len(found) > 2 or found == [None]:
                    self._assigned[function][name] = ast.Constant(None)
        return self._assigned[function]

    def fields_of(self, info: ClassInfo) -> dict[str, list[tuple[FunctionInfo, ast.expr]]]:
        """What the methods of one class assign to each field."""
        if info not in self._fields:
            fields: dict[str, list[tuple[FunctionInfo, ast.expr]]] = defaultdict(list)
            for method in info.methods.values():
                for node, _ in walk_scopes(method.node):
                    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                                if isinstance(one, ast.Attribute) and dotted_name(one.value) == "self":
                                    plain = isinstance(node, ast.Assign) and one is target
                                    fields[one.attr].append((method, node.value if plain else ast.Constant(None)))
            self._fields[info] = fields
        return self._fields[info]

    def elements(self, node: ast.expr, function: FunctionInfo) -> Sequence[ast.expr]:
        """Elements of a literal, or of a constant of a module that is one."""
        if isinstance(node, ast.Name):
            given = self.given(node.id, function)
            node = given[0] if given is not None else node
        return node.elts if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else []


def symbols(index: Index, function: FunctionInfo, expression: ast.expr) -> Sequence[Symbol]:
    """What a dotted name refers to in a function; the function's own imports come first."""
    first = dotted_name(expression).partition(".")[0]
    if first and first == dotted_name(expression):
        for node, _ in walk_scopes(function.node):
            if isinstance(node, ast.ImportFrom):
                for item in node.names:
                    if (item.asname or item.name) == first:
                        return index.imported(function.module.absolute(node), item.name)
    return index.resolve(function.module, expression)
