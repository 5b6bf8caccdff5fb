"""Which names a reference uses: imports, builtins, attributes of torch, undefined names."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Iterator

from flashinfer_trace.reference import ALLOWED_BUILTINS
from flashinfer_trace.validation.reference_limits import (
    ALLOWED_IMPORTS,
    FORBIDDEN_ATTRIBUTES,
    FORBIDDEN_TORCH,
    TORCH_MODULES,
)

__all__ = ["check_names"]

#: Adds one problem: rule, node, message, hint.
Add = Callable[[str, ast.AST, str, str], None]

_BUILTINS = frozenset(dir(builtins))


def check_names(module: ast.Module, nodes: list[ast.AST], table: symtable.SymbolTable, add: Add) -> None:
    """Checks imports, dunders, builtins, attributes and undefined names of a reference."""
    modules = _check_imports(module, nodes, add)
    _check_spelling(nodes, add)
    _check_torch(nodes, modules, add)
    _check_globals(nodes, table, add)


def _check_imports(module: ast.Module, nodes: list[ast.AST], add: Add) -> dict[str, str]:
    """Checks import statements; returns local name -> dotted path of the module or member it stands for."""
    bound: dict[str, str] = {}
    top_level = {id(statement) for statement in module.body}
    hint = "a reference imports torch and math only (torch.nn.functional, torch.linalg, torch.fft, torch.special too)"
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in ALLOWED_IMPORTS:
                    add("reference-import", node, f"imports {alias.name[:80]}", hint)
                # `import a.b` binds a; `import a.b as c` binds c to a.b.
                package = alias.name.split(".")[0]
                bound[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            for alias in node.names:
                path = f"{source}.{alias.name}"
                if source not in ALLOWED_IMPORTS or alias.name == "*":
                    add("reference-import", node, f"imports {alias.name} from {source[:80]}", hint)
                bound[alias.asname or alias.name] = path
        else:
            continue
        if id(node) not in top_level:
            add("reference-import", node, "an import inside a function", "import at the top of the module")
    return bound


def _check_spelling(nodes: list[ast.AST], add: Add) -> None:
    """Dunder names anywhere, and attributes that no object of a reference needs."""
    for node in nodes:
        for name in _spelled(node):
            if name.startswith("__") or name.endswith("__"):
                add("reference-attribute", node, f"the dunder name {name[:80]}", "a reference needs none")
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            hint = "use an f-string" if node.attr.startswith("format") else "compute with tensor operations only"
            add("reference-attribute", node, f"the attribute .{node.attr}", hint)


def _spelled(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
        yield node.arg
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
        if node.asname:
            yield node.asname


def _check_torch(nodes: list[ast.AST], bound: dict[str, str], add: Add) -> None:
    """Dotted paths that begin at torch: no forbidden part, and no module as a value."""
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                _check_path(f"{node.module}.{alias.name}", node, add)
        # Only whole paths: the outermost attribute, or a name that nothing follows.
        if not isinstance(node, (ast.Attribute, ast.Name)) or id(node) in inner:
            continue
        path = _dotted(node, bound)
        if path is None:
            continue
        _check_path(path, node, add)
        if path in TORCH_MODULES:
            add("reference-torch", node, f"the module {path} as a value", "write the whole path of what is called")


def _check_path(path: str, node: ast.AST, add: Add) -> None:
    first, *parts = path.split(".")
    if first != "torch":
        return
    for part in parts:
        if part in FORBIDDEN_TORCH or part.startswith("_"):
            hint = "no files, compilers, seeds or global state; see validation/reference_limits.py"
            add("reference-torch", node, f"{path[:80]} reaches outside the computation", hint)
            return


def _dotted(node: ast.AST, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(parts)])


def _check_globals(nodes: list[ast.AST], table: symtable.SymbolTable, add: Add) -> None:
    """Names that are looked up in the module: they are defined there, or harmless builtins."""
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    missing: set[str] = set()
    queue = [table]
    while queue:
        scope = queue.pop()
        queue += scope.get_children()
        missing |= {
            s.get_name()
            for s in scope.get_symbols()
            if s.is_referenced() and s.is_global() and s.get_name() not in defined
        }
        if scope is table:  # in the module itself a name that is only read is not "global" in every Python
            missing |= {s.get_name() for s in scope.get_symbols() if s.is_referenced()} - defined
    missing -= set(ALLOWED_BUILTINS)
    reported: set[str] = set()
    for node in nodes:
        # _check_spelling reports dunder names.
        if isinstance(node, ast.Name) and node.id in missing - reported and not node.id.startswith("__"):
            reported.add(node.id)
            if node.id in _BUILTINS:
                hint = f"harmless builtins only: {' '.join(ALLOWED_BUILTINS)}"
                add("reference-builtin", node, f"the builtin {node.id}", hint)
            else:
                add("reference-undefined", node, f"the name {node.id[:80]} is not defined", "define or import it")
