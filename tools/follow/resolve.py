"""Whether a dotted path names something that a package of Python sources defines, without importing it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Most modules that one import is followed through.
MAX_HOPS = 8
#: Conditions under which modules of kernels define or import names -> whether they hold on Linux with CUDA.
PLATFORM = {
    "torch.version.cuda is None": False,
    "torch.version.cuda is not None": True,
    "torch.version.hip is not None": False,
    "torch.version.hip is None": True,
    "torch.version.musa is not None": False,
    "sys.platform == 'darwin'": False,
}


class Roots:
    """Packages that were unpacked into different directories, read as if they were in one."""

    def __init__(self, packages: Mapping[str, Path]) -> None:
        """`packages`: package -> the directory that contains it."""
        self.packages = dict(packages)

    def joinpath(self, *parts: str) -> Path:
        """Where a package or a part of it is; a path that does not exist if no directory has the package."""
        return self.packages.get(parts[0], Path("/nonexistent")).joinpath(*parts)


@dataclass(frozen=True)
class Found:
    """The target of a dotted path: the module that defines it and the statement there; none if it names a module."""

    module: str
    node: ast.stmt | None


def exists(directory: Path | Roots, path: str) -> bool:
    """Whether ``package.module.name`` is defined, or imported from where it is defined, below `directory`."""
    return find(directory, path) is not None


def find(directory: Path | Roots, path: str, hops: int = MAX_HOPS) -> Found | None:
    """Where ``package.module.name`` is defined below `directory`, following imports and other names of it."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        module = _module(directory, parts[:count])
        if module is None:
            continue
        rest = parts[count:]
        if not rest:
            return Found(path, None)
        return _defines(directory, parts[:count], module, rest[0], hops) if len(rest) == 1 and hops > 0 else None
    return None


def _module(directory: Path | Roots, parts: list[str]) -> Path | None:
    base = directory.joinpath(*parts)
    return next((one for one in (base / "__init__.py", base.with_suffix(".py")) if one.is_file()), None)


def _defines(directory: Path | Roots, parts: list[str], module: Path, name: str, hops: int) -> Found | None:
    for node in _statements(_parse(module).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name and not _is_overload(node):
                return Found(".".join(parts), node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                other = node.value.id if isinstance(node.value, ast.Name) else name
                same = None if other == name else _defines(directory, parts, module, other, hops - 1)
                return same or Found(".".join(parts), node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name or (alias.name == "*" and not name.startswith("_")):
                    wanted = name if alias.name == "*" else alias.name
                    found = find(directory, _origin(node, parts, module, wanted), hops - 1)
                    if found is not None:
                        return found
    return None


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(one).split(".")[-1] == "overload" for one in node.decorator_list)


def _origin(node: ast.ImportFrom, parts: list[str], module: Path, name: str) -> str:
    """The dotted path that one import names."""
    package = parts if module.name == "__init__.py" else parts[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else []), name])


def public_names(directory: Path | Roots, module: str) -> set[str]:
    """Functions and classes of a module that users may call: what it defines, and what it imports from its package."""
    path = _module(directory, module.split("."))
    found = set[str]()
    for node in _statements(_parse(path).body) if path else ():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and path is not None:
            origins = {alias: _origin(node, module.split("."), path, alias.name) for alias in node.names}
            for alias, origin in origins.items():
                if origin.split(".")[0] != module.split(".")[0]:
                    continue
                if alias.name == "*":
                    found |= public_names(directory, origin.removesuffix(".*"))
                elif _module(directory, origin.split(".")) is None and exists(directory, origin):
                    found.add(alias.asname or alias.name)
    return {name for name in found if not name.startswith("_")}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also those under its attempts, and its conditions if they may hold on CUDA."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            taken = _on_cuda(node.test)
            yield from _statements([*(node.body if taken is not False else ()), *(node.orelse if not taken else ())])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *node.orelse])
            yield from _statements([*(s for handler in node.handlers for s in handler.body), *node.finalbody])


def _on_cuda(test: ast.expr) -> bool | None:
    """Whether a condition about the platform holds on Linux with CUDA; None of any other condition."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    known = [PLATFORM.get(ast.unparse(one)) for one in parts]
    if False in known:
        return False
    return True if None not in known else None


@functools.lru_cache(maxsize=512)
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def callers_of_ops(directory: Path | Roots, package: str) -> dict[str, set[str]]:
    """Op (``torch.ops.package.name``) -> functions of the package's modules that call it, directly or one step away.

    The functions are named as the package exports them, and only those that it exports.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(directory.joinpath(package).rglob("*.py")):
        functions = {node.name: node for node in _statements(_parse(path).body) if isinstance(node, ast.FunctionDef)}
        aliases = {
            target.id: node.value.id
            for node in _statements(_parse(path).body)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
            for target in node.targets
            if isinstance(target, ast.Name) and node.value.id in functions
        }
        direct = {name: set(_ops(node, package)) for name, node in functions.items()}
        for name, node in functions.items():
            called = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in functions}
            for op in direct[name].union(*(direct[other] for other in called)):
                for exported in (name, *(alias for alias, target in aliases.items() if target == name)):
                    if exists(directory, f"{package}.{exported}"):
                        found.setdefault(f"torch.ops.{package}.{op}", set()).add(f"{package}.{exported}")
    return found


def _ops(node: ast.AST, package: str) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == f"torch.ops.{package}":
            yield one.attr
