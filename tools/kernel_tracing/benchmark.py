"""Precision and recall of call-edge resolvers on hand-labelled calls.

python -m tools.kernel_tracing.benchmark --sources DIR                            # the tracer's own resolver
python -m tools.kernel_tracing.benchmark --sources DIR --with jedi pycg pyan3     # and other tools, where installed

A label says which project functions one call can enter (tests/kernel_tracing/labels/README.md). A resolver is asked for
the same calls. Precision is the share of its answers that are labelled, recall the share of labelled callees that it
found, both over all edges (micro-averaged); a call that enters nothing counts against precision when it is answered.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from flashinfer_trace.files import write_json
from tools.kernel_tracing import peers
from tools.kernel_tracing.syntax import parse

LABELS = Path(__file__).parents[2] / "tests" / "kernel_tracing" / "labels"
NO_LABELS = {"peers.json"}  # figures, beside the labels
PACKAGES = ("sglang", "sgl_kernel", "flashinfer")  # only what these define is labelled and scored
PEERS = ("jedi", "pycg", "pyan3")
OWN = "tools.kernel_tracing.resolver_api"

Query: TypeAlias = tuple[str, int, str]
"""(file relative to the sources, line of the call, `ast.unparse` of the called expression)"""
Edges: TypeAlias = Mapping[Query, "set[str]"]


class EdgeResolver(Protocol):
    """What is measured: for each query the callees, "package.module:Class.method"; none, or no key, for no answer."""

    def __call__(self, sources: Path, queries: list[Query]) -> Edges: ...


@dataclass(frozen=True)
class Label:
    """One labelled call.

    Attributes:
        file, line, call: the query.
        caller: qualified name of the enclosing function, "<module>" outside functions.
        callees: what the call can enter on CUDA in a DeepSeek model; empty for builtins, torch and pruned branches.
        also: callees that are neither required nor wrong, see the README of the labels.
        kind: "direct", "import", "method", "builtin", or the dynamic hop.
        note: why.
    """

    file: str
    line: int
    call: str
    caller: str
    callees: frozenset[str]
    kind: str
    note: str
    also: frozenset[str] = frozenset()

    @property
    def query(self) -> Query:
        return self.file, self.line, self.call


class LabelError(Exception):
    """A label file is not what it should be; the message names file, place and mend."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 measured, 1 labels and sources do not fit or nothing could be measured, 2 wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, metavar="DIR", help="holds sglang/, sgl_kernel/, ...")
    parser.add_argument("--labels", type=Path, default=LABELS, metavar="DIR", help="default: those of the tests")
    parser.add_argument("--with", dest="peers", nargs="+", choices=PEERS, default=[], help="other tools to measure too")
    parser.add_argument("--no-own", dest="own", action="store_false", help="leave the tracer's own resolver out")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the other tools")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for each other tool; default 300")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args(arguments)
    try:
        labels = read_labels(options.labels)
    except LabelError as error:
        print(error, file=sys.stderr)
        return 1
    if problems := label_problems(labels, options.sources):
        print("\n".join(problems), file=sys.stderr)
        print(f"{len(problems)} problems: is {options.sources} the release the labels were made for?", file=sys.stderr)
        return 1
    command = "python -m tools.kernel_tracing.benchmark --sources DIR"
    measured = []
    for tool in [*(["own"] if options.own else []), *options.peers]:
        try:
            entry = own_entry(labels, options.sources) if tool == "own" else peer_entry(tool, labels, options)
        except (peers.PeerError, ImportError) as error:
            entry = {"tool": tool, "failed": str(error)}
        if tool != "own":
            entry |= {"date": datetime.now(timezone.utc).date().isoformat(), "command": f"{command} --with {tool}"}
        measured.append(entry)
        print(table(entry))
    if options.json:
        write_json(options.json, measured)
    return 0 if any("failed" not in entry for entry in measured) else 1


def own_entry(labels: list[Label], sources: Path) -> dict[str, Any]:
    resolve = cast("EdgeResolver", importlib.import_module(OWN).edges)
    return {"tool": "own", **score(labels, resolve(sources, [label.query for label in labels]))}


def peer_entry(tool: str, labels: list[Label], options: argparse.Namespace) -> dict[str, Any]:
    """Asks one other tool; PyCG, which may not end on a whole tree, is then asked file by file."""
    known = Definitions(options.sources)

    def ask(name: str, asked: list[Label]) -> Any:
        return peers.ask(name, options.sources, [label.query for label in asked], options.python, options.limit)

    notes = []
    try:
        answers = [(ask(tool, labels), labels)]
    except peers.PeerError as error:
        if tool != "pycg" or "not installed" in str(error):
            raise
        notes.append(f"whole tree: {error}; each labelled file by itself instead")
        answers = []
        for file in sorted({label.file for label in labels}):
            asked = [label for label in labels if label.file == file]
            try:
                answers.append((ask("pycg-file", asked), asked))
            except peers.PeerError as failure:
                notes.append(f"{file}: {failure}")
        if not answers:
            raise peers.PeerError("; ".join(notes)) from error
    edges: dict[Query, set[str]] = {}
    for answer, asked in answers:
        if "edges" in answer:
            edges |= {(file, line, call): set(callees) for file, line, call, callees in answer["edges"]}
        else:
            graph = {caller: {known.locate(name) for name in names} for caller, names in answer["graph"].items()}
            edges |= attribute(asked, graph)
    entry = {"tool": tool, "version": answers[0][0]["version"], **score(labels, edges)}
    return entry | ({"notes": notes} if notes else {})


# --- labels ---


def read_labels(directory: Path) -> list[Label]:
    """All labels of a directory, by file and line.

    Raises:
        LabelError: the directory has none, or one is malformed or labelled twice.
    """
    labels: dict[Query, Label] = {}
    for path in sorted(directory.glob("*.json")):
        if path.name in NO_LABELS:
            continue
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise LabelError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
        for position, entry in enumerate(entries):
            sets = {key: frozenset(entry[key]) for key in ("callees", "also") if key in entry}
            try:
                label = Label(**{**entry, **sets})
            except TypeError as error:
                raise LabelError(f"{path}: label {position}: {error}; see the README beside it") from None
            if label.query in labels:
                raise LabelError(f"{path}: label {position}: {label.file}:{label.line} {label.call} is labelled twice")
            labels[label.query] = label
    if not labels:
        raise LabelError(f"{directory}: no labels (*.json) here")
    return list(labels.values())


def label_problems(labels: Iterable[Label], sources: Path) -> list[str]:
    """What does not fit: the call is not at its line, the caller is another one, or a callee is defined nowhere."""
    problems = []
    known = Definitions(sources)
    calls: dict[str, dict[tuple[int, str], str]] = {}
    for label in labels:
        place = f"{label.file}:{label.line}"
        if label.file not in calls:
            path = sources / label.file
            calls[label.file] = calls_of(path.read_text(encoding="utf-8")) if path.is_file() else {}
        caller = calls[label.file].get((label.line, label.call))
        if caller is None:
            problems.append(f"{place}: no call of `{label.call}` starts on this line")
        elif caller != label.caller:
            problems.append(f"{place}: `{label.call}` is called in {caller}, not in {label.caller}")
        missing = [name for name in sorted(label.callees | label.also) if name not in known]
        problems += [f"{place}: {name} is defined nowhere" for name in missing]
        problems += [f"{place}: {name} is both in callees and in also" for name in sorted(label.callees & label.also)]
    return problems


def calls_of(text: str) -> dict[tuple[int, str], str]:
    """Each call of a module, by line and called expression -> the qualified name of the enclosing function."""
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


class Definitions:
    """What the modules of a source tree define, and where a dotted name leads through re-exports."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        self._modules: dict[str, _Module | None] = {}

    def __contains__(self, name: str) -> bool:
        module, _, qualname = name.partition(":")
        found = self._module(module)
        return found is not None and qualname in found.names

    def locate(self, dotted: str, depth: int = 8) -> str:
        """Turns package.module.Class.method into package.module:Class.method; leaves names unknown to the tree."""
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

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            path = self.sources.joinpath(*name.split("."))
            files = [path.with_name(f"{path.name}.py"), path / "__init__.py"]
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = _Module(name, file) if file else None
        return self._modules[name]


class _Module:
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


# --- scores ---


def normal(callee: str) -> str:
    """One name for a class and its constructor."""
    return callee.removesuffix(".__init__")


def attribute(labels: Iterable[Label], graph: Mapping[str, set[str]]) -> dict[Query, set[str]]:
    """Edges of a tool that only knows callers, given to labelled calls as favourably as can be.

    An edge is counted for every labelled call of its caller that expects it. An edge that no labelled call of the
    caller expects is blamed on a call with the same last name, if there is one; other edges belong to calls without
    a label.
    """
    by_caller: dict[str, list[Label]] = {}
    for label in labels:
        module = peers.module_name(Path(label.file))
        by_caller.setdefault(module if label.caller == "<module>" else f"{module}.{label.caller}", []).append(label)
    edges: dict[Query, set[str]] = {}
    for caller, asked in by_caller.items():
        found = {normal(callee) for callee in graph.get(caller, ()) if ":" in callee}
        expected = {normal(callee) for label in asked for callee in label.callees | label.also}
        for label in asked:
            wanted = {normal(callee) for callee in label.callees | label.also}
            last = label.call.split("[")[0].rpartition(".")[2]
            blamed = {callee for callee in found - expected if callee.replace(":", ".").rpartition(".")[2] == last}
            edges[label.query] = found & wanted | blamed
    return edges


@dataclass
class Tally:
    """Counts over labels of one kind."""

    labels: int = 0
    negatives: int = 0
    negatives_clean: int = 0
    exact: int = 0
    expected: int = 0
    predicted: int = 0
    correct: int = 0

    def add(self, expected: set[str], predicted: set[str]) -> None:
        self.labels += 1
        self.negatives += not expected
        self.negatives_clean += not expected and not predicted
        self.exact += expected == predicted
        self.expected += len(expected)
        self.predicted += len(predicted)
        self.correct += len(expected & predicted)

    def document(self) -> dict[str, Any]:
        """precision and recall are null where nothing was predicted or expected."""
        return {
            "precision": round(self.correct / self.predicted, 4) if self.predicted else None,
            "recall": round(self.correct / self.expected, 4) if self.expected else None,
            **vars(self),
        }


def score(labels: Iterable[Label], edges: Edges) -> dict[str, Any]:
    """Figures of all labels and of each kind; callees outside `PACKAGES` and those in `also` are not counted."""
    total = Tally()
    kinds: dict[str, Tally] = {}
    for label in labels:
        expected = {normal(callee) for callee in label.callees}
        ignored = {normal(callee) for callee in label.also}
        answers = {normal(callee) for callee in edges.get(label.query, ()) if callee.split(".")[0] in PACKAGES}
        for tally in (total, kinds.setdefault(label.kind, Tally())):
            tally.add(expected, answers - ignored)
    return {**total.document(), "by_kind": {kind: kinds[kind].document() for kind in sorted(kinds)}}


def table(entry: dict[str, Any]) -> str:
    """The figures of one tool as text."""
    title = f"{entry['tool']} {entry.get('version', '')}".rstrip()
    if "failed" in entry:
        return f"{title}: not measured: {entry['failed']}\n"

    def share(value: float | None) -> str:
        return "   -  " if value is None else f"{value:6.1%}"

    rows = [(kind, figures) for kind, figures in entry["by_kind"].items()] + [("all", entry)]
    lines = [f"{title:20} precision  recall  exact/labels  edges"]
    lines += [
        f"{kind:20}   {share(row['precision'])}  {share(row['recall'])}  {row['exact']:5}/{row['labels']:<6}"
        f"  {row['correct']} of {row['expected']} found, {row['predicted'] - row['correct']} wrong"
        for kind, row in rows
    ]
    lines.append(f"negatives left alone: {entry['negatives_clean']} of {entry['negatives']}")
    return "\n".join([*lines, *(f"note: {note}" for note in entry.get("notes", [])), ""])


if __name__ == "__main__":
    sys.exit(main())
