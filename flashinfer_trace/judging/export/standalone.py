"""Turns a function of this package into a standalone module that also contains everything it calls.

Adapters of kernels are small functions, closures and partials over helpers in other modules. `Slice` copies the ones
that a function reaches, and no others: each definition is parsed, freed of annotations, and written once under a name
of its own. Imports from libraries stay imports; values read from this package's objects become literals.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

import torch

_PACKAGE = "flashinfer_trace"
_LITERALS = (type(None), bool, int, float, str)


class SliceError(ValueError):
    """A function that cannot be copied out of the package. The message names it and the reason."""


def _is_ours(module: str | None) -> TypeGuard[str]:
    return module is not None and module.partition(".")[0] == _PACKAGE


@functools.cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """The statement that binds each global name of a module. The last statement wins, as when Python runs them."""
    found: dict[str, ast.stmt] = {}
    for statement in ast.parse(inspect.getsource(sys.modules[module])).body:
        for name in _bound(statement):
            found[name] = statement
    return found


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (each.asname or each.name.partition(".")[0] for each in statement.names)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _is_plain(statement: ast.Assign | ast.AnnAssign) -> bool:
    return isinstance(statement, ast.AnnAssign) or (
        len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    )


class _Unannotated(ast.NodeTransformer):
    """Drops the annotations of functions and of their variables: they name types that only this package has."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        given = node.args
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
            if argument is not None:
                argument.annotation = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if node.value is None:
            return None
        self.generic_visit(node)
        return ast.copy_location(ast.Assign([node.target], node.value, None), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """The fields of a dataclass are annotations, and stay."""
        node.body = [each if isinstance(each, ast.AnnAssign) else self.visit(each) for each in node.body]
        return node


class _Resolved(ast.NodeTransformer):
    """Replaces global names of a module by the names under which a slice has them.

    A name is taken for a global one unless the definition binds it.
    """

    def __init__(self, owner: Slice, module: str, local: frozenset[str]) -> None:
        self.owner, self.module, self.local = owner, module, local

    def _value(self, name: str) -> Any:
        if name in self.local:
            return None
        return vars(sys.modules[self.module]).get(name)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        base = node.value
        if isinstance(base, ast.Name) and base.id not in self.local:
            value = self._value(base.id)
            if isinstance(value, ModuleType) and _is_ours(value.__name__):
                return ast.copy_location(ast.Name(self.owner.name_of(value.__name__, node.attr), node.ctx), node)
            own = _is_ours(type(value).__module__) and not isinstance(value, (type, FunctionType))
            if own and isinstance(getattr(value, node.attr, value), _LITERALS):
                return ast.copy_location(ast.Constant(getattr(value, node.attr)), node)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        known = node.id in self.local or node.id not in _statements(self.module)
        if known and node.id not in self.local and not hasattr(builtins, node.id):
            raise SliceError(f"{self.module} uses {node.id}, which no statement of the module binds")
        return node if known else ast.copy_location(ast.Name(self.owner.name_of(self.module, node.id), node.ctx), node)


def _locals(tree: ast.AST) -> frozenset[str]:
    """Every name that a definition binds: parameters, variables, its own nested functions, imports."""
    found = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node is not tree}
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= set(_bound(node))
    return frozenset(found)


class Slice:
    """Collects the definitions that some functions need, in an order in which Python can run them.

    `expression` gives the text that names a function or a value; `source` is everything that it needs. No definition
    takes a `reserved` name.
    """

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._imports: dict[str, None] = {}
        self._definitions: list[str] = []
        self._names: dict[tuple[str, str], str] = {("", name): name for name in reserved}
        self._closures: dict[FunctionType, str] = {}

    @property
    def source(self) -> str:
        """Imports and definitions, without an end of line at the end."""
        return "\n\n\n".join(["\n".join(sorted(self._imports)), *self._definitions]).strip("\n")

    def expression(self, value: Any) -> str:
        """Text that evaluates to `value` after `source`.

        Raises:
            SliceError: it is neither a literal nor made of functions of this package.
        """
        if isinstance(value, functools.partial):
            self._imports["import functools"] = None
            arguments = [self.expression(each) for each in value.args]
            arguments += [f"{name}={self.expression(each)}" for name, each in value.keywords.items()]
            return f"functools.partial({', '.join([self.expression(value.func), *arguments])})"
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, torch.dtype):
            self._imports["import torch"] = None
            return str(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self.expression(each)}, ' for each in value)})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {self.expression(each)}' for key, each in value.items())}}}"
        if isinstance(value, _LITERALS):
            return f'float("{value}")' if isinstance(value, float) and value - value != 0 else repr(value)
        raise SliceError(f"a {type(value).__name__} cannot be written as Python source")

    def name_of(self, module: str, name: str) -> str:
        """The name that a global of one of this package's modules has in the source, which then contains it."""
        statement = _statements(module).get(name)
        if statement is None:
            raise SliceError(f"{module} has no statement that binds {name}")
        if isinstance(statement, ast.Import):
            return self._imported(statement, name)
        if isinstance(statement, ast.ImportFrom):
            if not _is_ours(statement.module):
                return self._imported(statement, name)
            original = next(each.name for each in statement.names if (each.asname or each.name) == name)
            importlib.import_module(statement.module)
            return self.name_of(statement.module, original)
        key = (module, name)
        if key not in self._names:
            self._names[key] = self._free(name)
            self._define(module, name, statement)
        return self._names[key]

    def _imported(self, statement: ast.Import | ast.ImportFrom, name: str) -> str:
        chosen = [each for each in statement.names if (each.asname or each.name.partition(".")[0]) == name]
        one = (
            ast.Import(chosen)
            if isinstance(statement, ast.Import)
            else ast.ImportFrom(statement.module, chosen, statement.level)
        )
        self._imports[ast.unparse(ast.fix_missing_locations(one))] = None
        return name

    def _free(self, name: str) -> str:
        taken = {*self._names.values(), *self._closures.values()}
        number = 2
        chosen = name
        while chosen in taken:
            chosen, number = f"{name}_{number}", number + 1
        return chosen

    def _define(self, module: str, name: str, statement: ast.stmt) -> None:
        copy, own = ast.parse(ast.unparse(statement)).body[0], self._names[module, name]
        if isinstance(copy, (ast.FunctionDef, ast.ClassDef)):
            copy.name = own
            self._add(copy, module)
        elif isinstance(copy, (ast.Assign, ast.AnnAssign)) and copy.value is not None and _is_plain(copy):
            value = _Resolved(self, module, frozenset()).visit(copy.value)
            self._definitions.append(f"{own} = {ast.unparse(ast.fix_missing_locations(value))}")
        else:  # several names at once: the value of this one
            self._definitions.append(f"{own} = {self.expression(vars(sys.modules[module])[name])}")

    def _add(self, tree: ast.stmt, module: str) -> None:
        """Writes a definition after what it needs."""
        bare = _Unannotated().visit(tree)
        resolved = _Resolved(self, module, _locals(bare)).visit(bare)
        self._definitions.append(ast.unparse(ast.fix_missing_locations(resolved)))

    def _function(self, function: FunctionType) -> str:
        module = function.__module__
        if not _is_ours(module):
            raise SliceError(f"{module}.{function.__qualname__} is not a function of this package")
        if "<locals>" not in function.__qualname__:
            return self.name_of(module, function.__name__)
        if function not in self._closures:
            self._closures[function] = self._closure(function, module)
        return self._closures[function]

    def _closure(self, function: FunctionType, module: str) -> str:
        """A nested function, written inside of one that takes the variables that it reads from around it."""
        factory = _statements(module).get(function.__qualname__.partition(".")[0])
        nested = [
            node
            for node in ast.walk(factory or ast.Module([], []))
            if isinstance(node, ast.FunctionDef)
            and node.name == function.__name__
            and node.lineno == function.__code__.co_firstlineno
        ]
        if len(nested) != 1:
            raise SliceError(f"{module}.{function.__qualname__} is not a function that is defined by name")
        cells = {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        }
        arguments = [f"{name}={self.expression(value)}" for name, value in cells.items()]
        maker = self._free(f"make_{function.__name__}")
        copy = ast.parse(f"def {maker}({', '.join(cells)}):\n    pass\n    return {function.__name__}\n").body[0]
        assert isinstance(copy, ast.FunctionDef)
        copy.body[0] = nested[0]
        again = ast.parse(ast.unparse(copy)).body[0]
        self._names["", maker] = maker
        self._add(again, module)
        name = self._free(function.__name__)
        self._definitions.append(f"{name} = {maker}({', '.join(arguments)})")
        return name
