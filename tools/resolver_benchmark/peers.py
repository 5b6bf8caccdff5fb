"""Call edges of other tools, for comparison: jedi (call sites), PyCG and pyan3 (whole graphs, callers only).

They are not dependencies of the project. Each runs as `PYTHON peers.py TOOL` in an interpreter that has it, reads a
JSON request from standard input and writes a JSON answer to standard output. This file therefore imports nothing from
the project.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {"jedi": "jedi", "pycg": "pycg", "pycg-file": "pycg", "pyan3": "pyan3"}
_RECURSION = 20_000  # PyCG and pyan3 recurse over syntax trees and import chains


class PeerError(Exception):
    """The tool is missing, failed or took too long; the message says which."""


def ask(tool: str, sources: Path, queries: Iterable[tuple[str, int, str]], python: str, limit_s: float) -> Any:
    """The answer of `tool`: {"version", "edges": [[file, line, call, [callee, ...]], ...]} or {"version", "graph"}.

    Raises:
        PeerError: it is not installed in `python`, failed, or did not finish within `limit_s` seconds.
    """
    request = json.dumps({"sources": str(sources.resolve()), "queries": [list(query) for query in queries]})
    try:
        process = subprocess.run(
            [python, str(Path(__file__).resolve()), tool],
            input=request,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"did not finish within {limit_s:g} s") from None
    except OSError as error:
        raise PeerError(f"cannot start {python}: {error}") from None
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerError(f"failed: {last}")
    return json.loads(process.stdout)


def main(arguments: list[str]) -> int:
    tool = arguments[0]
    try:
        version = importlib.metadata.version(DISTRIBUTIONS[tool])
    except importlib.metadata.PackageNotFoundError:
        print(
            f"not installed; run `pip install {DISTRIBUTIONS[tool]}` for the interpreter given by --python",
            file=sys.stderr,
        )
        return 1
    request = json.load(sys.stdin)
    sources = Path(request["sources"])
    answers = sys.stdout
    sys.setrecursionlimit(_RECURSION)
    with contextlib.redirect_stdout(sys.stderr):  # the tools print to standard output
        answer: dict[str, Any]
        if tool == "jedi":
            answer = {"edges": jedi_edges(sources, request["queries"])}
        else:
            files = sorted({query[0] for query in request["queries"]})
            graph = pyan_graph(sources, files) if tool == "pyan3" else pycg_graph(sources, files, tool == "pycg")
            answer = {"graph": graph}
    json.dump({"version": version, **answer}, answers)
    return 0


# --- jedi ---


def jedi_edges(sources: Path, queries: list[list[Any]]) -> list[list[Any]]:
    """For each call, the functions and classes that jedi infers for the last name of the called expression."""
    jedi = importlib.import_module("jedi")
    project = jedi.Project(sources, sys_path=[str(sources), *sys.path], smart_sys_path=False)
    definitions: dict[Path, dict[int, str]] = {}
    scripts: dict[str, tuple[Any, dict[tuple[int, str], ast.expr]]] = {}
    answers = []
    for file, line, call in queries:
        if file not in scripts:
            text = (sources / file).read_text(encoding="utf-8")
            called = {
                (n.lineno, ast.unparse(n.func)): n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)
            }
            scripts[file] = (jedi.Script(text, path=sources / file, project=project), called)
        script, called = scripts[file]
        found: set[str] = set()
        position = name_position(called.get((line, call)))
        if position is not None:
            for ask_jedi in (script.infer, partial(script.goto, follow_imports=True)):
                try:
                    names = ask_jedi(*position)
                except Exception as error:  # jedi fails on some code: no answer for this call
                    print(f"jedi: {file}:{line} {call}: {error!r}", file=sys.stderr)
                    names = []
                found = {callee for name in names if (callee := project_callee(name, sources, definitions))}
                if found:  # infer gives the decorator's result, or nothing, where goto finds the function
                    break
        answers.append([file, line, call, sorted(found)])
    return answers


def project_callee(name: Any, sources: Path, definitions: dict[Path, dict[int, str]]) -> str | None:
    """module:qualname if jedi's name is a function or class of the sources; None for anything else."""
    path = name.module_path
    if name.type not in ("function", "class") or path is None or not path.is_relative_to(sources):
        return None
    if path not in definitions:
        definitions[path] = qualified_names(path)
    qualname = definitions[path].get(name.line)
    return f"{module_name(path.relative_to(sources))}:{qualname}" if qualname else None


def name_position(expression: ast.expr | None) -> tuple[int, int] | None:
    """Line and column of the last name of a called expression; None if it has none, as in f(x)(y)."""
    if isinstance(expression, ast.Subscript):  # kernel[grid](...)
        expression = expression.value
    if isinstance(expression, ast.Name):
        return expression.lineno, expression.col_offset
    if isinstance(expression, ast.Attribute):
        assert expression.end_lineno is not None and expression.end_col_offset is not None
        return expression.end_lineno, expression.end_col_offset - len(expression.attr)
    return None


def qualified_names(path: Path) -> dict[int, str]:
    """Line of each `def` and `class` of a file -> its qualified name ("outer.inner")."""
    names: dict[int, str] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names[child.lineno] = prefix + child.name
                walk(child, f"{prefix}{child.name}.")
            else:
                walk(child, prefix)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return names


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# --- whole graphs ---


def pycg_graph(sources: Path, files: list[str], follow_imports: bool) -> dict[str, list[str]]:
    """PyCG's graph of `files` and of the modules in the tree that they import: dotted caller -> dotted callees."""
    import importlib.abc
    import importlib.machinery
    import importlib.util  # PyCG uses it without importing it; otherwise it follows no imports

    with contextlib.suppress(ImportError):  # version 0.0.8 installs the package as PyCG but imports it as pycg
        sys.modules["pycg"] = importlib.import_module("PyCG")
    generator_class = importlib.import_module("pycg.pycg").CallGraphGenerator
    operation = importlib.import_module("pycg.utils.constants").CALL_GRAPH_OP
    if not follow_imports:
        importlib.import_module("pycg.machinery.imports").ImportManager.handle_import = lambda *arguments: None
    os.chdir(sources)
    generator = generator_class([str(sources / file) for file in files], str(sources), -1, operation)
    generator.analyze()
    return {caller: sorted(callees) for caller, callees in generator.output().items()}


def pyan_graph(sources: Path, files: list[str]) -> dict[str, list[str]]:
    """pyan3's graph of `files` and of what they import, two modules deep: dotted caller -> dotted names that it uses.

    pyan3 only reads the files that it is given, and does not finish in acceptable time on the whole tree.
    """
    reached = set(files)
    for _ in range(2):
        reached |= {imported for file in reached for imported in imported_files(sources, file)}
    visitor = importlib.import_module("pyan.analyzer").CallGraphVisitor(
        [str(sources / file) for file in sorted(reached)], root=str(sources)
    )
    return {
        source.get_name(): sorted(target.get_name() for target in targets if target.namespace is not None)
        for source, targets in visitor.uses_edges.items()
    }


def imported_files(sources: Path, file: str) -> set[str]:
    """Files of the tree that a file imports, at any nesting depth of its code, including relative imports."""
    found: set[str] = set()
    package = Path(file).parent.parts
    for node in ast.walk(ast.parse((sources / file).read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (up, node.module) if part)
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        for name in names:
            path = Path(*name.split("."))
            found |= {
                str(f) for f in (path.with_name(f"{path.name}.py"), path / "__init__.py") if (sources / f).is_file()
            }
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
