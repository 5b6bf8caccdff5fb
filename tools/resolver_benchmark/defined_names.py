"""What a source tree defines and calls, read from its syntax alone, independently of the tracer's resolver."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.kernel_tracing.source.syntax import parse


def calls_of(text: str) -> dict[tuple[int, str], str]:
    """Line and called expression of each call in a module -> the qualified name of the enclosing function."""
    calls: dict[tuple[int, str], str] = {}

    def walk(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for decorator in child.decorator_list:
                    walk(ast.Expr(decorator), scope)
                walk(child, f"{scope}.{child.name}" if scope else child.name)
                continue
            if isinstance(child, ast.Call):
                calls.setdefault((child.lineno, ast.unparse(child.func)), scope or "<module>")
            walk(child, scope)

    walk(parse(text), "")
    return calls


class DefinedNames:
    """What the modules of a source tree define, and where a dotted name leads through re-exports."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        self._modules: dict[str, Module | None] = {}

    def __contains__(self, name: str) -> bool:
        module, _, qualname = name.partition(":")
        found = self._module(module)
        return found is not None and qualname in found.names

    def locate(self, dotted: str, depth: int = 8) -> str:
        """Turns package.module.Class.method into package.module:Class.method; other names stay unchanged."""
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:cut])
            found = self._module(module)
            if found is None:
                continue
            if ".".join(parts[cut:]) in found.names:
                return f"{module}:{'.'.join(parts[cut:])}"
            targets = [found.aliases[parts[cut]]] if parts[cut] in found.aliases else found.stars
            for target in targets if depth else []:
                tail = parts[cut + 1 :] if parts[cut] in found.aliases else parts[cut:]
                located = self.locate(".".join([target, *tail]), depth - 1)
                if ":" in located:
                    return located
            return dotted
        return dotted

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self.sources.joinpath(*name.split("."))
            files = [path.with_name(f"{path.name}.py"), path / "__init__.py"]
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = Module(name, file) if file else None
        return self._modules[name]


class Module:
    """Names, imported names and star imports of one module."""

    def __init__(self, name: str, file: Path) -> None:
        self.name = name
        self.names: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.stars: list[str] = []
        self._package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        self._collect(parse(file.read_text(encoding="utf-8")), "")

    def _collect(self, node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.names.add(scope + child.name)
                self._collect(child, f"{scope}{child.name}.")
                continue
            if isinstance(child, ast.ImportFrom) and not scope:
                up = self._package[: len(self._package) - child.level + 1] if child.level else []
                origin = ".".join([*up, *([child.module] if child.module else [])])
                for alias in child.names:
                    if alias.name == "*":
                        self.stars.append(origin)
                    else:
                        self.aliases.setdefault(alias.asname or alias.name, f"{origin}.{alias.name}")
            elif isinstance(child, ast.Assign) and isinstance(child.value, ast.Name) and not scope:
                for target in child.targets:
                    if isinstance(target, ast.Name):
                        self.aliases.setdefault(target.id, f"{self.name}.{child.value.id}")
            self._collect(child, scope)
