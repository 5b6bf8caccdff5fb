"""The index: modules (parsed when first needed), their classes and functions, and what was found out about them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, TypeVar

from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo, Module, Symbol, declare
from tools.kernel_tracing.source.sources import SourceTree

_REGISTERS = re.compile(r"^@register_\w+\(", re.M)
_Subject = TypeVar("_Subject")
_Fact = TypeVar("_Fact")


class Index:
    """All modules of a source tree, parsed on demand. Evaluations share one, so what it keeps is found out once."""

    def __init__(self, sources: SourceTree) -> None:
        self.sources = sources
        self._modules: dict[str, Module | None] = {}
        self._mro: dict[ClassInfo, list[ClassInfo]] = {}
        self._facts: dict[Any, Any] = {}
        #: Answers of `rules.boundaries.is_native`.
        self.natives: dict[FunctionInfo, bool] = {}

    def fact(self, find: Callable[[_Subject], _Fact], subject: _Subject) -> _Fact:
        """What `find` says of a part of the sources, such as a syntax tree; it is asked once."""
        key = (find, subject)
        if key not in self._facts:
            self._facts[key] = find(subject)
        found: _Fact = self._facts[key]
        return found

    def module(self, name: str) -> Module | None:
        """The module, parsed; None if it is not in the sources or does not parse."""
        if name not in self._modules:
            self._modules[name] = self._parse(name) if name in self.sources.modules else None
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        try:
            tree = self.sources.tree(name)
        except (SyntaxError, ValueError, RecursionError):
            return None
        module = Module(name, self.sources.files[name], self.sources.is_package(name), tree)
        declare(module, tree.body, "", None, top=True)
        return module

    def class_modules(self, package: str, name: str) -> list[str]:
        """The modules of a package that define a class of this name."""
        return self.fact(self._class_modules, (package, name))

    def _class_modules(self, wanted: tuple[str, str]) -> list[str]:
        package, name = wanted
        defines = re.compile(rf"^class {re.escape(name)}\b", re.M)
        modules = (one for one in self.sources.modules if one.startswith(package))
        return [one for one in modules if defines.search(self.sources.text(one))]

    def registers(self, module: str) -> bool:
        """Whether a module of the sources registers functions by decorators, so that importing it has an effect."""
        return self.fact(self._registers, module)

    def _registers(self, module: str) -> bool:
        return bool(_REGISTERS.search(self.sources.text(module)))

    def mro(self, info: ClassInfo) -> list[ClassInfo]:
        """The method resolution order, without classes that are not traced."""
        if info not in self._mro:
            self._mro[info] = [info]  # a class that derives from itself by mistake must not loop
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in info.node.bases]
            symbols = [symbol for base in bases for symbol in self.resolve(info.module, base)]
            flat = [cls for symbol in symbols if isinstance(symbol, ClassInfo) for cls in self.mro(symbol)]
            # Depth first, each class after all classes that derive from it. This equals C3 for chains and diamonds,
            # and nothing else occurs here.
            self._mro[info] = [info, *(cls for position, cls in enumerate(flat) if cls not in flat[position + 1 :])]
        return self._mro[info]

    def resolve(self, module: Module, expression: ast.expr, depth: int = 0) -> list[Symbol]:
        """What a dotted name refers to in a module's scope, from its imports and definitions alone."""
        if depth > 20:
            return []
        if isinstance(expression, ast.Name):
            return self.lookup(module, expression.id, depth)
        if isinstance(expression, ast.Attribute):
            symbols: list[Symbol] = []
            for base in self.resolve(module, expression.value, depth + 1):
                if isinstance(base, Module):
                    symbols += self.lookup(base, expression.attr, depth + 1)
                elif isinstance(base, str):
                    symbols.append(f"{base}.{expression.attr}")
                elif isinstance(base, ClassInfo):
                    inner = base.module.classes.get(f"{base.qualname}.{expression.attr}")
                    symbols += [inner] if inner else []
            return symbols
        return []

    def lookup(self, module: Module, name: str, depth: int = 0) -> list[Symbol]:
        """What a name refers to in a module's scope."""
        symbols: list[Symbol] = []
        for node in module.bindings.get(name, []):
            if node in module.class_of:
                symbols.append(module.class_of[node])
            elif node in module.functions:
                symbols.append(module.functions[node])
            elif isinstance(node, ast.ImportFrom):
                original = next(item.name for item in node.names if (item.asname or item.name) == name)
                symbols += self.imported(module.absolute(node), original, depth + 1)
            elif isinstance(node, ast.Import):
                item = next(item for item in node.names if (item.asname or item.name.partition(".")[0]) == name)
                symbols += self.imported(item.name if item.asname else name, None, depth + 1)
            elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
                symbols += self.resolve(module, node.value, depth + 1)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                symbols += module.wrapped(name, node.value)
        if not symbols and depth < 20:
            for star in module.stars:
                other = self.module(star)
                symbols += self.lookup(other, name, depth + 1) if other else []
        if not symbols and module.is_package and (inner := self.module(f"{module.name}.{name}")):
            symbols.append(inner)
        return list(dict.fromkeys(symbols))

    def imported(self, module_name: str, name: str | None, depth: int = 0) -> list[Symbol]:
        """What `from module_name import name` (or `import module_name`) binds."""
        module = self.module(module_name)
        if name is None:
            return [module] if module else [] if module_name in self.sources.modules else [module_name]
        if module is None:
            submodule = self.module(f"{module_name}.{name}")
            return [submodule] if submodule else [f"{module_name}.{name}"]
        found = self.lookup(module, name, depth + 1) if depth < 20 else []
        submodule = None if found else self.module(f"{module_name}.{name}")
        return found or ([submodule] if submodule else [])
