"""The trace: all results as one document, which schema/kernel_traces.schema.json describes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from tools.kernel_tracing.engine.solver import Context, Edge
from tools.kernel_tracing.engine.values import Instance
from tools.kernel_tracing.graph import unresolved
from tools.kernel_tracing.graph.chains import Chain
from tools.kernel_tracing.graph.kernels import Kernel
from tools.kernel_tracing.graph.ops import use
from tools.kernel_tracing.report.analysis import Analysis, Progress, analyse
from tools.kernel_tracing.source.sources import SourceTree

MAX_CALL = 70
__all__ = ["Progress", "Writer", "document", "trace"]


def trace(
    sources: SourceTree,
    model: str,
    entries: Sequence[str] = (),
    platform: str = "cuda",
    kernel: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trace a model.

    Args:
        sources: the source tree.
        model: the name of the model's file, without `.py`: `deepseek` means deepseek.py, deepseek_v2.py, ...
        entries: entry classes as MODULE:CLASS, instead of those in the model's files.
        platform: the platform to trace; branches of others are ignored.
        kernel: if given, only kernels of this name.
        progress: called with a phase, the steps done and their total.

    Returns: the document; `problems`, which is not part of the schema, lists files that do not parse.

    Raises: roots.RootsError for an unknown model or entry.
    """
    return document(analyse(sources, model, entries, platform, progress), kernel, progress)


def document(analysis: Analysis, kernel: str = "", progress: Progress | None = None) -> dict[str, Any]:
    """The document of an analysis; arguments and result are as for `trace`."""
    kernels = [one for one in analysis.kernels if not kernel or kernel in (one.name, one.name.rpartition(".")[2])]
    writer = Writer(analysis)
    documents = []
    for number, one in enumerate(kernels):
        if progress is not None:
            progress("following chains", number, len(kernels))
        found, omitted = analysis.chains.of(one)
        if found:
            documents.append(writer.kernel(one, found, omitted))
    return {
        "sources": analysis.solver.index.sources.describe(),
        "model": analysis.model,
        "platform": analysis.platform.name,
        "kernels": documents,
        "unresolved": unresolved.report(analysis.solver, writer.frame),
        "problems": analysis.solver.index.problems,
    }


class Writer:
    """Turns kernels and chains into JSON objects."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.solver = analysis.solver
        self._texts: dict[ast.AST, str] = {}
        self._frames: dict[tuple[Edge, str], dict[str, Any]] = {}

    def kernel(self, kernel: Kernel, chains: list[Chain], omitted: int) -> dict[str, Any]:
        """One kernel of the document."""
        written = {str(frames): frames for frames in (self.chain(chain) for chain in chains)}
        ordered = sorted(written.values(), key=self._order)
        sites = {str(site): site for site in ({key: frames[0][key] for key in _SITE} for frames in ordered)}
        document: dict[str, Any] = {
            "name": kernel.name,
            "source": kernel.source,
            "category": kernel.category,
            "definition": {"file": kernel.file, "line": kernel.line},
            "call_sites": list(sites.values()),
            "ops": sorted({use(chain, kernel.name, self.analysis.in_model).op for chain in chains}),
        }
        if omitted:
            document["omitted_chains"] = omitted
        return {**document, "chains": ordered}

    def _order(self, frames: list[dict[str, Any]]) -> tuple[Any, ...]:
        """The order of chains: those that end in the model first, then by length."""
        outside = frames[-1]["file"] not in self.analysis.files
        return (outside, len(frames), [(frame["file"], frame["line"], frame["function"]) for frame in frames])

    def chain(self, chain: Chain) -> list[dict[str, Any]]:
        """The frames of one chain."""
        call = chain.kernel_call
        first, *conditions = self.analysis.conditions.of_chain(chain)
        frames = [{**self.frame(call.caller, call.call), "condition": first}]
        if call.approximate:
            frames[0]["approximate"] = call.approximate
        return [*frames, *(self._edge(edge, text) for edge, text in zip(chain.edges, conditions, strict=True))]

    def _edge(self, edge: Edge, condition: str) -> dict[str, Any]:
        known = self._frames.get((edge, condition))
        if known is None:
            known = {**self.frame(edge.caller, edge.call), "condition": condition}
            reason = edge.approximate or self._approximation(edge.callee)
            if reason:
                known["approximate"] = reason
            self._frames[edge, condition] = known
        return known

    def _approximation(self, callee: Context) -> str:
        receiver = callee.receiver
        if isinstance(receiver, Instance) and receiver.info not in self.solver.constructed:
            base = self.solver.expanded.get(receiver.info)
            if base is not None:
                return f"any subclass of {base}, which is all that the annotation says"
        return ""

    def frame(self, context: Context, node: ast.AST) -> dict[str, Any]:
        """File, line, function and text of a call."""
        line = getattr(node, "lineno", 1) if isinstance(node, ast.Call) else getattr(node, "end_lineno", 1)
        return {
            "file": context.function.module.file,
            "line": line,
            "function": context.function.qualname,
            "call": self._text(context, node),
        }

    def _text(self, context: Context, node: ast.AST) -> str:
        text = self._texts.get(node)
        if text is None:
            lines = self.solver.index.sources.lines(context.function.module.name)
            text = " ".join(_segment(lines, node).split())
            if len(text) > MAX_CALL:
                text = text[: MAX_CALL - 3].rstrip() + "..."
            self._texts[node] = text
        return text


_SITE = ("file", "line", "function")


def _segment(lines: list[bytes], node: ast.AST) -> str:
    """The source of a node; columns count UTF-8 bytes."""
    first, last = getattr(node, "lineno", 1) - 1, getattr(node, "end_lineno", 1) - 1
    chosen = list(lines[first : last + 1])
    chosen[-1] = chosen[-1][: getattr(node, "end_col_offset", 0)]
    chosen[0] = chosen[0][getattr(node, "col_offset", 0) :]
    return b" ".join(chosen).decode(errors="replace")
