"""What a module declares: its functions, its classes and the names that it binds."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from tools.kernel_tracing.source import shapes
from tools.kernel_tracing.source.syntax import dotted_name, last_name, walk_scopes

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(eq=False)
class FunctionInfo:
    """A function, lambda or module body."""

    module: Module
    qualname: str
    node: FunctionNode | ast.Module
    owner: ClassInfo | None = None
    bound_on: int = 0  # the line of `name = wrap(...)`, for a function that a call returns

    @property
    def line(self) -> int:
        """The line that defines it."""
        return self.bound_on or getattr(self.node, "lineno", 1)

    @cached_property
    def decorators(self) -> frozenset[str]:
        """Last component of each decorator's name: `property`, `jit`, `overload`."""
        names = set()
        for decorator in getattr(self.node, "decorator_list", []):
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            names.add(dotted_name(target).rpartition(".")[2])
        return frozenset(names)

    @cached_property
    def parameters(self) -> list[str]:
        """Positional parameters, in order."""
        if isinstance(self.node, ast.Module):
            return []
        return [argument.arg for argument in (*self.node.args.posonlyargs, *self.node.args.args)]

    @cached_property
    def annotations(self) -> dict[str, ast.expr]:
        """The annotation of each parameter that has one."""
        if isinstance(self.node, ast.Module):
            return {}
        arguments = self.node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return {argument.arg: argument.annotation for argument in every if argument.annotation is not None}

    @cached_property
    def is_generator(self) -> bool:
        """Whether the body yields."""
        return self._facts[0]

    @property
    def tested_parameters(self) -> dict[str, ast.expr | None]:
        """Parameters that decide what is called, each with the class expression of its isinstance test, or None.

        These are parameters that are called, tested with isinstance, or given a nested function as an attribute; and
        those that a short function passes on to another one, which may test them. Parameters annotated as modules count
        even if the function does more than that. `module.forward = forward`, with a function defined here, wraps the
        module's old forward; if callers were merged, every patched module would call the methods of all the others.
        """
        return self._facts[1]

    @cached_property
    def optional(self) -> frozenset[str]:
        """Parameters of a decorator that works with and without arguments, which it tests for None."""
        return shapes.optional_functions(self.node)

    @cached_property
    def passes_to(self) -> str:
        """For a wrapper, the name of what it passes `*args, **kwargs` on to."""
        return shapes.passes_to(self.node)

    @cached_property
    def stands_for(self) -> str:
        """For a wrapper made with `functools.wraps`, the name of the function that it wraps and passes on to."""
        return shapes.stands_for(self.node)

    @cached_property
    def _facts(self) -> tuple[bool, dict[str, ast.expr | None]]:
        if isinstance(self.node, (ast.Module, ast.Lambda)):
            return False, {}
        names = {*self.parameters, *(argument.arg for argument in self.node.args.kwonlyargs)} - {"self", "cls"}
        found: dict[str, ast.expr | None] = {}
        yields = False
        last = self.node.body[-1]
        if isinstance(last, ast.Return) and isinstance(last.value, ast.Call) and len(self.node.body) <= 2:
            given = [*last.value.args, *(keyword.value for keyword in last.value.keywords)]
            found |= dict.fromkeys(value.id for value in given if isinstance(value, ast.Name))
        made = {node.name for node in self.node.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        for node, nested in walk_scopes(self.node):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    if node.func.id in names:
                        found[node.func.id] = None
                    elif node.func.id == "isinstance" and len(node.args) == 2 and isinstance(node.args[0], ast.Name):
                        found.setdefault(node.args[0].id, node.args[1])
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                passed = {value.id for value in node.value.args if isinstance(value, ast.Name)} & names
                for name in passed:
                    if dotted_name(self.annotations.get(name, node)).rpartition(".")[2] == "Module":
                        found[name] = None
            elif made and isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in made:
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                        found[target.value.id] = None
            elif not nested and isinstance(node, (ast.Yield, ast.YieldFrom)):
                yields = True
        return yields, {name: found[name] for name in sorted(found) if name in names}


@dataclass(eq=False)
class ClassInfo:
    """A class: its methods, and its bases as written."""

    module: Module
    qualname: str
    node: ast.ClassDef
    methods: dict[str, FunctionInfo] = field(default_factory=dict)
    annotations: dict[str, ast.expr] = field(default_factory=dict)

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
    body: FunctionInfo = field(init=False)
    bindings: dict[str, list[ast.AST]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, ClassInfo] = field(default_factory=dict)
    functions: dict[ast.AST, FunctionInfo] = field(default_factory=dict)
    class_of: dict[ast.AST, ClassInfo] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    wrappers: dict[str, list[FunctionInfo]] = field(default_factory=dict)
    rebound: set[str] = field(default_factory=set)  # names that functions declare global

    def function(self, node: FunctionNode, outer: str) -> FunctionInfo:
        """The function of a node; nested functions and lambdas get their name when they are first reached."""
        info = self.functions.get(node)
        if info is None:
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            info = self.functions[node] = FunctionInfo(self, name if outer == "<module>" else f"{outer}.{name}", node)
        return info

    def inner_class(self, node: ast.ClassDef, outer: str) -> ClassInfo:
        """The class of a node; a class defined in a function is declared when it is first reached."""
        if node not in self.class_of:
            declare(self, [node], "" if outer == "<module>" else f"{outer}.", None, top=False)
        return self.class_of[node]

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
                elif isinstance(target, ast.Name) and owner is not None and isinstance(node, ast.AnnAssign):
                    owner.annotations[target.id] = node.annotation
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, block, None)
            if inner and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                for part in inner:
                    nested = part.body if isinstance(part, (ast.ExceptHandler, ast.match_case)) else [part]
                    declare(module, nested, prefix, owner, top)
