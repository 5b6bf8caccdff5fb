"""Checks a trace against the sources from which it was made, without the tracer's index and resolver.

Every file must exist, every line must contain the call, every function must enclose its line, and every call must be
able to enter the function that encloses the frame before it. This is decided by name where names suffice (scopes,
imports, hierarchies), and otherwise by evidence in the sources that the called value may be that function (see
check_links).
"""

from __future__ import annotations

import ast
import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

from tools.kernel_tracing.source.sources import DISTRIBUTIONS
from tools.kernel_tracing.verify.check_files import Sources
from tools.kernel_tracing.verify.check_links import Links, Target
from tools.kernel_tracing.verify.check_source import Site, Sites, SourceFile, last_name
from tools.shared.source_packages import package_hash

__all__ = ["check", "schema_problems"]

SCHEMA = Path(__file__).resolve().parents[3] / "schema" / "kernel_traces.schema.json"
CUT = ("...", "…")
# The text of a call is shortened only if it is long: a short text that ends in dots is a different call.
SHORTEST_CUT = 60


def check(trace: dict[str, Any], sources: Path) -> list[str]:
    """The problems of a trace, one line per problem, in the order of the trace; empty if there are none.

    Args:
        trace: the parsed JSON document; it may be malformed.
        sources: the directory that contains sglang/, sgl_kernel/ and flashinfer/, or git checkouts of them.
    """
    problems = list(schema_problems(trace))
    if problems:
        return problems
    if not trace["kernels"]:
        return ["/kernels: empty, so there is nothing to check"]
    if not sources.is_dir():
        return [f"{sources}: no such directory; fetch it with `python -m tools.fetch_sources --dest {sources}`"]
    # Thousands of syntax trees are built and kept. Garbage collection would double the time and find nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return list(dict.fromkeys(_Checker(trace, sources).problems()))
    finally:
        if collecting:
            gc.enable()


def schema_problems(trace: Any) -> Iterator[str]:
    """Violations of the schema, and indexes outside of their tables."""
    validator = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    errors = sorted(validator.iter_errors(trace), key=lambda error: [str(part) for part in error.path])[:50]
    for error in errors:
        yield f"/{'/'.join(map(str, error.path))}: {error.message[:300]}"
    if not errors:
        yield from _outside(trace)


def _outside(trace: Mapping[str, Any]) -> Iterator[str]:
    """References to entries that a table lacks, and entries that nothing refers to."""
    used: dict[str, set[int]] = {name: set() for name in ("frames", "uses", "tests", "runs", "configurations")}
    for kernel in trace["kernels"]:
        for chain in kernel["chains"]:
            used["uses"].add(chain["uses"])
            for name, field in (("frames", "frames"), ("tests", "undecided"), ("runs", "seen")):
                used[name].update(chain.get(field, ()))
    used["configurations"] = {at for use in trace["uses"] for _, found in use for at in found}
    for name, found in used.items():
        for index in sorted(found - set(range(len(trace[name])))):
            yield f"/{name}: has no entry {index}, to which the trace refers"
        unused = sorted(set(range(len(trace[name]))) - found)
        if unused and name != "configurations":
            yield f"/{name}/{unused[0]}: nothing refers to this entry"


class Frame(NamedTuple):
    """One frame of a trace."""

    file: str
    line: int
    function: str
    call: str


class _Checker:
    def __init__(self, trace: dict[str, Any], root: Path) -> None:
        self.trace = trace
        self.root = root
        self.sources = Sources(root)
        self.links = Links(self.sources)
        self.frames = [Frame(*frame) for frame in trace["frames"]]
        self._found: dict[Frame, tuple[list[Site], str]] = {}
        self._entered: dict[tuple[Any, ...], bool] = {}

    def problems(self) -> Iterator[str]:
        yield from self._origin()
        # First, so that no search parses a frame's file in vain; by files, so that the sites of one are kept at a time.
        for file, frames in groupby(sorted(self.frames), lambda frame: frame.file):
            self._found |= self._find(file, frames)
        for kernel in self.trace["kernels"]:
            yield from (f"{kernel['name']}: {problem}" for problem in self._kernel(kernel))

    def _origin(self) -> Iterator[str]:
        packages = {distribution: package for distribution, package, _ in DISTRIBUTIONS}
        for name, expected in self.trace["sources"].items():
            package = self.sources.packages.get(packages[name])
            if package is None:
                yield f"{self.root}: {packages[name]} is missing; run `python -m tools.fetch_sources`"
            elif (found := package_hash(package)) != expected["sha256"]:
                yield (
                    f"{package}: not the {name} {expected['version']} that was traced (sha256 {found[:12]}, the trace "
                    f"has {expected['sha256'][:12]}); check against those sources, or trace again"
                )

    def _kernel(self, kernel: Mapping[str, Any]) -> Iterator[str]:
        yield from self._definition(kernel)
        seen = set()
        for chain in kernel["chains"]:
            key = tuple(chain["frames"])
            frames = [self.frames[index] for index in key]
            if key in seen:
                yield f"{_place(frames[0])}: a chain from here is listed twice"
            seen.add(key)
            yield from self._chain(kernel, frames)

    def _chain(self, kernel: Mapping[str, Any], chain: list[Frame]) -> Iterator[str]:
        for position, frame in enumerate(chain):
            sites, problem = self._found[frame]
            if problem:
                yield problem
            elif position == 0:
                if not self._calls_kernel(frame, sites, kernel):
                    yield f"{_place(frame)}: `{frame.call}` does not call {kernel['name']}"
            elif self._found[inner := chain[position - 1]][1]:
                continue  # the frame that the call should enter is wrong, which is already reported
            elif not self._enters(frame, sites, inner.file, inner.function) and not self._is_given(
                frame, sites, inner, chain[position + 1 : position + 2]
            ):
                yield (
                    f"{_place(frame)}: no evidence that `{frame.call}` in {frame.function} enters "
                    f"{inner.function} of {inner.file}, which encloses the previous frame"
                )

    def _find(self, file: str, frames: Iterable[Frame]) -> dict[Frame, tuple[list[Site], str]]:
        """For each frame in a file, the expressions that it may refer to, or what is wrong with it."""
        source, text = self.sources.get(file), self.sources.text(file)
        if source is None or text is None:
            missing = self.sources.path(file) is None
            wrong = f"no such file in {self.root}" if missing else "the file is not valid Python"
            return {frame: ([], f"{_place(frame)}: {wrong}") for frame in frames}
        sites = Sites(source, text)
        return {frame: _referred(frame, sites) for frame in frames}

    def _enters(self, frame: Frame, sites: list[Site], file: str, function: str) -> bool:
        key = (frame, file, function)
        if key not in self._entered:
            target = self.links.target(file, function)
            self._entered[key] = self._replaces_torch(target) or any(
                self.links.enters(site, frame.file, target) for site in sites
            )
        return self._entered[key]

    def _is_given(self, frame: Frame, sites: list[Site], inner: Frame, callers: list[Frame]) -> bool:
        """Whether the call is one of a parameter, and the next frame hands it the function that is entered."""
        target = self.links.target(inner.file, inner.function)
        calls = [(caller.file, site) for caller in callers for site in self._found[caller][0]]
        return any(self.links.given_by(site, frame.file, target, calls) for site in sites)

    def _replaces_torch(self, target: Target) -> bool:
        """Whether a function is registered as an operator of torch itself, which any code may call."""
        text = self.sources.text(target.file)
        pattern = rf'\.impl\(\s*"aten::[\w.]+",\s*{re.escape(target.name)}\b'
        return text is not None and bool(re.search(pattern, text))

    # The kernel itself.

    def _definition(self, kernel: Mapping[str, Any]) -> Iterator[str]:
        file, line = kernel["definition"]["file"], kernel["definition"]["line"]
        if not file:
            return
        text = self.sources.text(file)
        if text is None:
            yield f"{file}:{line}: the definition's file does not exist or is not valid Python"
            return
        if kernel["source"] == "jit" and _last(kernel["name"]) in text:
            return  # compiled from other languages: Python only names it where it is loaded
        source = self.sources.get(file)
        if source is not None and _last(kernel["name"]) not in _defined_on(source, line):
            yield f"{file}:{line}: does not define {_last(kernel['name'])}"

    def _calls_kernel(self, frame: Frame, sites: list[Site], kernel: Mapping[str, Any]) -> bool:
        name = _last(kernel["name"])
        callees = [site.node.func if isinstance(site.node, ast.Call) else site.node for site in sites]
        # torch.ops.library.operator.overload
        overloads = [
            callee.value for callee in callees if isinstance(callee, ast.Attribute) and callee.attr == "default"
        ]
        if any(last_name(callee) == name for callee in (*callees, *overloads)):
            return True
        file, line = kernel["definition"]["file"], kernel["definition"]["line"]
        if not file:
            target = Target("", name, name, name)
            return any(self.links.enters(site, frame.file, target) for site in sites)
        source = self.sources.get(file)
        if kernel["source"] == "jit" and frame.file == file:
            return True  # a function of the module that this file loads
        if source and any(name in _aliased(source, last_name(callee)) for callee in callees):
            return True
        for qualified, node in source.definitions.items() if source else ():
            if line in _lines(node) and self._enters(frame, sites, file, qualified):
                return True
        for site, callee in zip(sites, callees, strict=True):
            found = self.links.names.resolve(frame.file, site.scope, last_name(callee))
            if any(one.file == file and getattr(one.node, "lineno", 0) == line for one in found):
                return True
        return False


def _referred(frame: Frame, sites: Sites) -> tuple[list[Site], str]:
    """The expressions that a frame may refer to, or what is wrong with it."""
    line, call = frame.line, frame.call
    here = [*sites.calls.get(line, ()), *sites.attributes.get(line, ())]
    matching = [site for site in here if _matches(sites.text_of(site.node), call)]
    if not matching:
        other = sorted({number for number, sites_there in sites.calls.items() for site in sites_there
                        if abs(number - line) <= 20 and _matches(sites.text_of(site.node), call)})  # fmt: skip
        found = f"; it is on line {', '.join(map(str, other))}" if other else ""
        return [], f"{_place(frame)}: no call `{call}` begins on this line{found}"
    enclosed = [site for site in matching if frame.function in site.functions]
    if not enclosed:
        names = sorted({name for site in matching for name in site.functions})
        return [], f"{_place(frame)}: `{call}` is not in {frame.function}, but in {' or '.join(names)}"
    return enclosed, ""


def _aliased(source: SourceFile, alias: str) -> set[str]:
    """The names of a module that `alias = name` binds once more."""
    return {
        last_name(node.value)
        for node in source.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        if any(last_name(target) == alias for target in node.targets)
    }


def _matches(text: str, call: str) -> bool:
    """Whether a frame's text is the text of an expression, or the beginning of a long one."""
    call = call.removeprefix("@")
    for cut in CUT:
        if call.endswith(cut) and len(call) >= SHORTEST_CUT and text.startswith(call.removesuffix(cut).rstrip()):
            return True
    return text == call


def _defined_on(source: SourceFile, line: int) -> set[str]:
    """The names that a definition or an assignment on this line binds."""
    names = set()
    statements: list[ast.AST] = [source.tree]
    for node in statements:
        # Definitions are statements, so expressions need not be searched.
        statements += [part for part in ast.iter_child_nodes(node) if isinstance(part, (ast.stmt, ast.ExceptHandler))]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and line in _lines(node):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno == line:
            names |= {last_name(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    return names


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterable[int]:
    """The lines that a trace may give for a definition: its own and those of its decorators."""
    return range(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.lineno + 1)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _place(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}"
