"""The index: modules (parsed when first needed), their classes and functions, and which classes derive from which.

Parsing everything would take most of the time. Instead, a textual scan of all files finds subclasses and users of
decorators. Only the files that the scan finds, and those that reachable code imports, are parsed.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict

from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo, Module, Symbol, declare
from tools.kernel_tracing.source.libraries import LIBRARIES
from tools.kernel_tracing.source.sources import SourceTree
from tools.kernel_tracing.source.syntax import parse

_BASES = re.compile(r"(\w+)[ \t]*\(([^)]*)\)[ \t]*:")
_GLOBAL = re.compile(r"^[ \t]+global[ \t]+([\w, \t]+)", re.M)
_COMMENT = re.compile(r"#.*")
_REGISTERS = re.compile(r"^@register_\w+\(", re.M)


class Index:
    """All modules of a source tree, parsed on demand."""

    def __init__(self, sources: SourceTree) -> None:
        self.sources = sources
        self.problems: list[dict[str, str | int]] = []
        self._modules: dict[str, Module | None] = {}
        self._mro: dict[ClassInfo, tuple[list[ClassInfo], list[str]]] = {}
        self._derived: dict[str, list[str]] = defaultdict(list)
        self._sensitive: dict[FunctionInfo, tuple[str, ...]] = {}
        self._scanned = False
        self._registering: dict[str, bool] = {}

    def parsed(self) -> list[Module]:
        """Modules parsed so far."""
        return [module for module in self._modules.values() if module is not None]

    def module(self, name: str) -> Module | None:
        """The module, parsed; None if it is not in the sources or does not parse (which is recorded)."""
        if name not in self._modules:
            self._modules[name] = self._parse(name) if name in self.sources.modules else None
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        try:
            tree = parse(self.sources.text(name))
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None) or 1
            self.problems.append({"file": self.sources.files[name], "line": line, "reason": f"does not parse: {error}"})
            return None
        module = Module(name, self.sources.files[name], self.sources.is_package(name), tree)
        module.body = FunctionInfo(module, "<module>", tree)
        for match in _GLOBAL.finditer(self.sources.text(name)):
            module.rebound.update(word.strip() for word in match[1].split(","))
        declare(module, tree.body, "", None, top=True)
        return module

    def _scan(self) -> None:
        """Find by text which modules derive a class from which base name."""
        self._scanned = True
        for name in self._traced_modules():
            for part in self.sources.text(name).split("\nclass ")[1:]:
                match = _BASES.match(part)
                for base in _COMMENT.sub("", match[2]).split(",") if match else ():
                    terminal = base.partition("[")[0].strip().rpartition(".")[2]
                    if terminal and name not in self._derived[terminal]:
                        self._derived[terminal].append(name)

    def _traced_modules(self) -> list[str]:
        return [name for name in self.sources.modules if name.partition(".")[0] not in LIBRARIES]

    def users_of_decorator(self, name: str) -> list[str]:
        """Modules whose text contains the decorator `@name`."""
        return [module for module in self._traced_modules() if f"@{name}" in self.sources.text(module)]

    def registers(self, module: str) -> bool:
        """Whether a module of the sources registers functions by decorators, so that importing it has an effect."""
        if module not in self._registering:
            self._registering[module] = bool(_REGISTERS.search(self.sources.text(module)))
        return self._registering[module]

    def mro(self, info: ClassInfo) -> list[ClassInfo]:
        """The method resolution order, without classes that are not traced."""
        return self._linearise(info)[0]

    def external_bases(self, info: ClassInfo) -> list[str]:
        """Dotted paths of the direct and indirect bases that are not traced."""
        return self._linearise(info)[1]

    def sensitive_parameters(self, function: FunctionInfo) -> tuple[str, ...]:
        """Parameters for whose values a function is analysed separately, because merging would mix up its callers."""
        if function not in self._sensitive:
            self._sensitive[function] = tuple(
                name
                for name, test in function.tested_parameters.items()
                if test is None or self._names_class(function.module, test)
            )
        return self._sensitive[function]

    def _names_class(self, module: Module, test: ast.expr) -> bool:
        if isinstance(test, ast.Tuple):
            return any(self._names_class(module, part) for part in test.elts)
        # A class that is imported inside the function is traced as well.
        return (
            not isinstance(test, ast.Name)
            or (test.id not in module.bindings and not hasattr(builtins, test.id))
            or any(isinstance(symbol, ClassInfo) for symbol in self.resolve(module, test))
        )

    def _linearise(self, info: ClassInfo) -> tuple[list[ClassInfo], list[str]]:
        if info not in self._mro:
            self._mro[info] = ([info], [])  # a class that derives from itself by mistake must not loop
            order, outside = [info], list[str]()
            parents: list[list[ClassInfo]] = []
            for base in info.node.bases:
                target = base.value if isinstance(base, ast.Subscript) else base
                for symbol in self.resolve(info.module, target):
                    if isinstance(symbol, ClassInfo):
                        parents.append(self._linearise(symbol)[0])
                        outside += self._linearise(symbol)[1]
                    elif isinstance(symbol, str):
                        outside.append(symbol)
            # Depth first, each class after all classes that derive from it. This equals C3 for chains and diamonds,
            # and nothing else occurs here.
            flat = [cls for parent in parents for cls in parent]
            order += [cls for position, cls in enumerate(flat) if cls not in flat[position + 1 :]]
            self._mro[info] = (order, list(dict.fromkeys(outside)))
        return self._mro[info]

    def subclasses(self, info: ClassInfo) -> list[ClassInfo]:
        """The class and all classes in the sources that derive from it."""
        if not self._scanned:
            self._scan()
        found, names, looked = [info], [info.name], {info.name}
        while names:
            for module_name in sorted(self._derived.get(names.pop(), [])):
                module = self.module(module_name)
                for candidate in module.classes.values() if module else ():
                    if candidate not in found and info in self.mro(candidate):
                        found.append(candidate)
                        if candidate.name not in looked:
                            looked.add(candidate.name)
                            names.append(candidate.name)
        return found

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
