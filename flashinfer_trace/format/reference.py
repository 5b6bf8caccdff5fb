"""Renders, compiles and embeds the references under ``reference/``.

A family keeps one source file, ``reference/<op_type>/<family>.py``, which people edit, lint and type-check as plain
Python. A Definition embeds a *rendering* of it: module constants named after const axes (``HIDDEN_SIZE`` for the axis
``hidden_size``) take the Definition's values, and functions imported from a sibling file (``from ._shared import f``)
are copied in, with the constants that they read, so every embedded reference stands alone. ``from
..sampling._shared import f`` names a file of another op_type.

A family that differs from another in constants imports its ``run`` and sets these: ``from .rmsnorm import run`` and
``EPS = 1e-5``. Code that its constants switch off is left out (see `folding`).

Nothing here imports torch; only the compiled reference does, when it is first run.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import linecache
import opcode
import re
import symtable
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace.format.allow_list import allowed, static
from flashinfer_trace.format.files import UnreadableFile, read_text
from flashinfer_trace.format.folding import FoldingError, fold, is_switch, literals
from flashinfer_trace.format.roots import shared

#: Most violations of the allow-list that one error lists: the first ones tell what is wrong.
MAX_VIOLATIONS = 10


#: The instruction of an import statement.
IMPORT_STATEMENT = opcode.opmap["IMPORT_NAME"]

#: Largest source of a family, in bytes; the largest has about 12 KiB.
MAX_SOURCE_BYTES = 256 * 1024

#: A line as Python counts them: `str.splitlines` also ends one at a form feed and at U+2028.
LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")


class ReferenceSourceError(ValueError):
    """A reference source is missing, malformed, or cannot be rendered. The message names the file and the fix."""


@functools.lru_cache(maxsize=4096)
def sha256(reference: str) -> str:
    """The hash that evidence is bound to, as 64 hex digits: SHA-256 of the embedded reference without docstrings."""
    import hashlib  # here, because loading it takes a tenth of what importing the whole package does

    return hashlib.sha256(_without_docstrings(reference)).hexdigest()


def _without_docstrings(reference: str) -> bytes:
    """The text without docstrings that have lines of their own; as it is where it is not Python."""
    try:
        tree = ast.parse(reference)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return reference.encode()
    if "\r" in reference or "\f" in reference:  # lines end elsewhere for Python
        return reference.encode()
    lines: list[bytes | None] = [*reference.encode().split(b"\n")]
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    for body in (tree.body, *(one.body for one in functions)):
        first = body[0] if body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            start, stop = first.lineno - 1, first.end_lineno or first.lineno
            around = (lines[start] or b"")[: first.col_offset] + (lines[stop - 1] or b"")[first.end_col_offset :]
            if not around.strip():
                lines[start:stop] = [None] * (stop - start)
    return b"\n".join(line for line in lines if line is not None)


def source_path(root: Path, op_type: str, family: str) -> Path:
    """Where the source of a family lives under a dataset root; a private one may leave it to the dataset."""
    return shared(root, "reference", op_type, f"{family}.py")


def render(root: Path, op_type: str, family: str, const_axes: Mapping[str, int]) -> str:
    """The text that a Definition of `family` with these const axes embeds.

    Raises:
        ReferenceSourceError: the source is missing, is not Python, or imports a sibling function that does not exist.
    """
    path = source_path(root, op_type, family)
    return substitute_constants(_standalone_source(path, _modification_time(path)), const_axes, label=str(path))


def substitute_constants(source: str, const_axes: Mapping[str, int], label: str = "reference") -> str:
    """`source` with each module constant that is named after an axis (upper case) set to the axis's value.

    Constants that belong to no axis (an epsilon, a block size) and axes without a constant are left alone.

    Raises:
        ReferenceSourceError: `source` is not Python.
    """
    return _with_constants(source, {axis.upper(): str(value) for axis, value in const_axes.items()}, label)


def _with_constants(source: str, texts: Mapping[str, str], label: str) -> str:
    for name, start, end in reversed(_constant_spans(source, label)):
        if name in texts:
            source = source[:start] + texts[name] + source[end:]
    return source


@functools.lru_cache(maxsize=256)
def _constant_spans(source: str, label: str) -> tuple[tuple[str, int, int], ...]:
    """(name, start and end in `source`) of the value of each module constant."""
    spans = []
    lines = LINE.findall(source)
    starts = [0, *itertools.accumulate(map(len, lines))]
    for node in _parse(source, label).body:
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            continue
        value = node.value
        if node.targets[0].id.isupper() and isinstance(value, ast.Constant):
            # Columns count bytes.
            first, last = lines[value.lineno - 1].encode(), lines[(value.end_lineno or value.lineno) - 1].encode()
            start = starts[value.lineno - 1] + len(first[: value.col_offset].decode())
            end = starts[(value.end_lineno or value.lineno) - 1] + len(last[: value.end_col_offset].decode())
            spans.append((node.targets[0].id, start, end))
    return tuple(spans)


def compile_reference(source: str, label: str, op_type: str | None = None) -> Callable[..., Any]:
    """The ``run`` function of an embedded reference that uses allowed syntax and names only.

    Raises:
        ReferenceSourceError: `source` is not Python, uses what `allow_list.allowed` does not list, or defines no
            ``run``.
    """
    check_allowed(source, label, op_type)
    return load_run(source, label)


def check_allowed(source: str, label: str, op_type: str | None = None, waived: Collection[str] = ()) -> None:
    """Refuses a reference that uses what `allow_list.allowed` does not list, whether it was ever validated or not.

    Args:
        source, label, op_type: see `compile_reference`.
        waived: ids of rules that it need not meet.

    Raises:
        ReferenceSourceError: with construct, line and hint of the first violations.
    """
    module = _parse(source, label)
    found = static.check(module, symtable.symtable(source, label, "exec"), op_type)
    found = [violation for violation in found if violation.rule not in waived]
    if found:
        lines = [f"{label}:{v.line}: {v.message} ({v.hint})" for v in found[:MAX_VIOLATIONS]]
        more = [f"and {len(found) - MAX_VIOLATIONS} more"] if len(found) > MAX_VIOLATIONS else []
        raise ReferenceSourceError("\n".join(lines + more))


def load_run(source: str, label: str) -> Callable[..., Any]:
    """The ``run`` function of a source that `check_allowed` accepted, in a namespace of its own with few builtins.

    Raises:
        ReferenceSourceError: `source` is not Python or defines no ``run``.
    """
    filename = f"<reference of {label}>"
    namespace: dict[str, Any] = {"__builtins__": _restricted_builtins(), "__name__": f"reference_{label}"}
    exec(compile(_parse(source, label), filename, "exec"), namespace)
    run = namespace.get("run")
    if not callable(run):
        raise ReferenceSourceError(
            f"{label}: the reference defines no run(); add `def run(<inputs in declared order>):`"
        )
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return run  # type: ignore[no-any-return]


def _restricted_builtins() -> dict[str, Any]:
    names: dict[str, Any] = {name: getattr(builtins, name) for name in allowed.BUILTINS}
    return {**names, "__import__": _guarded_import}


def _guarded_import(name: str, *args: Any, **kwargs: Any) -> Any:
    """The importers in the namespace of a reference: its own statements, and torch's compiled code that it calls.

    Where that code dispatches to Python (`TorchDispatchMode`, `FakeTensorMode`), it asks for modules of torch by the
    `__import__` of the function that runs, and then takes them from `sys.modules`. The instruction tells the two apart.
    Whatever is not an import statement, and so a call that a reference might make as well, gets torch itself, which
    every reference has; and only for a module of torch that is loaded, so none is because of it.

    Raises:
        ImportError: a statement names a module that references may not import, or a call one that is not torch's own.
    """
    frame = sys._getframe(1)
    statement = frame.f_code.co_code[frame.f_lasti] == IMPORT_STATEMENT
    if statement and name in allowed.MODULES:
        return builtins.__import__(name, *args, **kwargs)
    if not statement and name.split(".")[0] == "torch" and name in sys.modules:
        return sys.modules["torch"]
    raise ImportError(f"a reference may import {' '.join(sorted(allowed.MODULES))} only, not {name}")


def _parse(source: str, label: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in a string is the linter's matter
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ReferenceSourceError(
            f"{label}{f':{line}' if line else ''}: the reference is not Python: {error}"
        ) from error


def _modification_time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise ReferenceSourceError(
            f"{path}: cannot read the family's reference ({error.strerror}); write it there or correct the name"
        ) from error


def _read(path: Path) -> str:
    try:
        return read_text(path, MAX_SOURCE_BYTES)
    except UnreadableFile as error:
        raise ReferenceSourceError(str(error)) from None


@functools.lru_cache(maxsize=256)
def _standalone_source(path: Path, _modified: int) -> str:
    """The family's source with what it imports from siblings copied in, and folded (cached by modification time)."""
    source = _read(path)
    module = _parse(source, str(path))
    imports = _sibling_imports(module)
    own: dict[str, str] = {}
    if [alias.name for node in imports for alias in node.names] == ["run"]:
        own = {name: source[start:end] for name, start, end in _constant_spans(source, str(path))}
        family, path = path, _sibling(path, imports[0])
        source = _read_sibling(family, path, imports[0].lineno)
        module = _parse(source, str(path))
        imports = _sibling_imports(module)
    if imports:
        source = _with_imports_copied(path, source, module, imports)
    if unknown := set(own) - {name for name, *_ in _constant_spans(source, str(path))}:
        raise ReferenceSourceError(f"{family}: sets {min(unknown)}, which {path.name} does not have; correct the name")
    try:
        return _squeeze_blank_lines(fold(_with_constants(source, own, str(path))))
    except FoldingError as error:
        raise ReferenceSourceError(f"{path}: {error}") from None


def _sibling_imports(module: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in module.body if isinstance(node, ast.ImportFrom) and node.level in (1, 2)]


def _sibling(path: Path, node: ast.ImportFrom) -> Path:
    return path.parents[node.level - 1] / f"{(node.module or '').replace('.', '/')}.py"


def _read_sibling(path: Path, sibling: Path, line: int) -> str:
    if not sibling.is_file():
        absent = sibling.relative_to(path.parents[1])
        raise ReferenceSourceError(f"{path}:{line}: imports from {absent}, which does not exist")
    return _read(sibling)


def _with_imports_copied(path: Path, source: str, module: ast.Module, imports: Sequence[ast.ImportFrom]) -> str:
    """`source` with the functions that its sibling imports name and that these call, and what they read."""
    lines = LINE.findall(source)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise ReferenceSourceError(f"{path}: the reference defines no function; add `def run(...)`")
    wanted: dict[Path, list[tuple[str, int]]] = {}
    for node in imports:
        for alias in node.names:
            if alias.asname is not None:
                told = f"imports {alias.name} as {alias.asname}; import it by its own name, which is copied with it"
                raise ReferenceSourceError(f"{path}:{node.lineno}: {told}")
        wanted.setdefault(_sibling(path, node), []).extend((alias.name, node.lineno) for alias in node.names)
    copied = [_copied(path, sibling, names, module) for sibling, names in wanted.items()]
    modules, constants, helpers = ([text for one in texts for text in one] for texts in zip(*copied, strict=True))
    lines.insert(functions[0].lineno - 1, "\n\n".join(helpers) + "\n\n")
    assigned = [node.end_lineno or node.lineno for node in module.body if isinstance(node, ast.Assign)]
    lines.insert(max(assigned, default=imports[-1].lineno), "".join(constants))
    for node in imports:
        for line in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[line] = ""
    first = min((node.lineno for node in module.body if isinstance(node, ast.Import)), default=functions[0].lineno)
    lines.insert(first - 1, "".join(dict.fromkeys(modules)))
    return "".join(lines)


def _copied(
    path: Path, sibling: Path, names: list[tuple[str, int]], module: ast.Module
) -> tuple[list[str], list[str], list[str]]:
    """The functions of `sibling` with these names that `module`, the source at `path`, lacks.

    Returns the import statements of modules, the constants (those that are read, and the switches), and the functions.
    """
    text = _read_sibling(path, sibling, names[0][1])
    tree, lines = _parse(text, str(sibling)), LINE.findall(text)
    functions = _functions_of(path, sibling, tree, names)
    read = {node.id for function in functions for node in ast.walk(function) if isinstance(node, ast.Name)}
    there = {alias.name for node in module.body if isinstance(node, ast.Import) for alias in node.names}
    modules = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    read |= {name for name, value in literals(tree).items() if is_switch(value)}
    return (
        [f"import {name}\n\n" for name in modules if name in read - there],
        [
            f"{name} = {text[start:end]}\n"
            for name, start, end in _constant_spans(text, str(sibling))
            if name in read - literals(module).keys()
        ],
        ["".join(lines[f.lineno - 1 : f.end_lineno]).rstrip() + "\n" for f in functions],
    )


def _functions_of(path: Path, sibling: Path, tree: ast.Module, queue: list[tuple[str, int]]) -> list[ast.FunctionDef]:
    """The functions of `sibling` that the queue names, each with the line of `path` that asks for it, and their own."""
    available = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    wanted = set[str]()
    while queue:
        name, line = queue.pop()
        if name not in available:
            raise ReferenceSourceError(f"{path}:{line}: {sibling.name} has no function {name}")
        if name not in wanted:
            wanted.add(name)
            nodes = ast.walk(available[name])
            queue += [(n.id, line) for n in nodes if isinstance(n, ast.Name) and n.id in available]
    return [available[name] for name in available if name in wanted]


def _squeeze_blank_lines(text: str) -> str:
    """At most two blank lines in a row: what removed imports leave behind is closed."""
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text
