"""What a module declares: its functions, its classes and the names that it binds."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from tools.kernel_tracing.source.syntax import dotted_name, last_name

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(eq=False)
class FunctionInfo:
    """A function or lambda."""

    module: Module
    qualname: str
    node: FunctionNode
    owner: ClassInfo | None = None
    bound_on: int = 0  # the line of `name = wrap(...)`, for a function that a call returns

    @property
    def line(self) -> int:
        """The line that defines it."""
        return self.bound_on or self.node.lineno

    @cached_property
    def decorators(self) -> frozenset[str]:
        """Last component of each decorator's name: `property`, `jit`, `overload`."""
        names = set()
        for decorator in getattr(self.node, "decorator_list", []):
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            names.add(dotted_name(target).rpartition(".")[2])
        return frozenset(names)

    @cached_property
    def annotations(self) -> dict[str, ast.expr]:
        """The annotation of each parameter that has one."""
        arguments = self.node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return {argument.arg: argument.annotation for argument in every if argument.annotation is not None}


@dataclass(eq=False)
class ClassInfo:
    """A class: its methods, and its bases as written."""

    module: Module
    qualname: str
    node: ast.ClassDef
    methods: dict[str, FunctionInfo] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The unqualified name."""
        return self.node.name


Symbol: TypeAlias = "ClassInfo | FunctionInfo | Module | str"  # str: dotted path of something not traced


@dataclass(eq=False)
class Module:
    """One parsed file."""

    name: str
    file: str
    is_package: bool
    tree: ast.Module
    bindings: dict[str, list[ast.AST]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, ClassInfo] = field(default_factory=dict)
    functions: dict[ast.AST, FunctionInfo] = field(default_factory=dict)
    class_of: dict[ast.AST, ClassInfo] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    wrappers: dict[str, list[FunctionInfo]] = field(default_factory=dict)

    def wrapped(self, name: str, call: ast.Call) -> list[FunctionInfo]:
        """The function that `name = wrap("op")` binds, if `wrap` is a function of this module that returns its own."""
        maker = next((node for node in self.bindings.get(last_name(call.func), []) if node in self.functions), None)
        if not isinstance(maker, ast.FunctionDef) or not call.args or not isinstance(call.args[0], ast.Constant):
            return []
        if name not in self.wrappers:
            inner = [node for node in maker.body if isinstance(node, ast.FunctionDef)]
            self.wrappers[name] = [FunctionInfo(self, name, node, bound_on=call.lineno) for node in inner]
        return self.wrappers[name]

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that `from ... import` refers to."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])


def declare(module: Module, body: list[ast.stmt], prefix: str, owner: ClassInfo | None, top: bool) -> None:
    """Records definitions and bindings of a block; nested blocks (if, try, with) belong to the same scope."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            info = FunctionInfo(module, prefix + node.name, node, owner)
            module.functions[node] = info
            if owner is not None:
                # A later definition replaces an earlier one, unless it only adds a property's setter.
                if not info.decorators & {"setter", "deleter", "overload"}:
                    owner.methods[node.name] = info
            elif top:
                module.bindings[node.name].append(node)
        elif isinstance(node, ast.ClassDef):
            cls = ClassInfo(module, prefix + node.name, node)
            module.classes[cls.qualname] = cls
            module.class_of[node] = cls
            if top:
                module.bindings[node.name].append(node)
            declare(module, node.body, f"{cls.qualname}.", cls, top=False)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and top:
            for item in node.names:
                if item.name == "*" and isinstance(node, ast.ImportFrom):
                    module.stars.append(module.absolute(node))
                else:
                    bound = item.asname or (item.name if isinstance(node, ast.ImportFrom) else item.name.split(".")[0])
                    module.bindings[bound].append(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and top:
                    module.bindings[target.id].append(node)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, block, None)
            if inner and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                for part in inner:
                    nested = part.body if isinstance(part, (ast.ExceptHandler, ast.match_case)) else [part]
                    declare(module, nested, prefix, owner, top)
