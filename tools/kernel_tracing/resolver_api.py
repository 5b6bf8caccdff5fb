"""The resolver's answers for single calls, as `tools.kernel_tracing.benchmark` asks them.

A trace keeps only the calls that lead to kernels; here every call that the analysis of one model resolved is asked for.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tools.kernel_tracing.analysis import Analysis, analyse
from tools.kernel_tracing.index import FunctionInfo
from tools.kernel_tracing.sources import find_sources

__all__ = ["answers", "edges"]

Query = tuple[str, int, str]


def edges(
    sources: Path, queries: list[Query], model: str = "deepseek", platform: str = "cuda"
) -> dict[Query, set[str]]:
    """For each (file, line, called expression): the functions that it can enter, as "package.module:Class.method"."""
    return answers(analyse(find_sources(sources), model, platform=platform), queries)


def answers(analysis: Analysis, queries: list[Query]) -> dict[Query, set[str]]:
    """The same from an analysis that is there already."""
    found: dict[Query, set[str]] = defaultdict(set)
    for edge in analysis.solver.edges.values():
        _answer(found, edge.caller.function, edge.call, edge.callee.function)
    for kernel in analysis.solver.kernel_calls.values():
        if isinstance(kernel.target, FunctionInfo):
            _answer(found, kernel.caller.function, kernel.call, kernel.target)
    return {query: found.get(query, set()) for query in queries}


def _answer(found: dict[Query, set[str]], caller: FunctionInfo, call: ast.AST, callee: FunctionInfo) -> None:
    if isinstance(call, ast.Call):
        query = (caller.module.file, call.lineno, ast.unparse(call.func))
        found[query].add(f"{callee.module.name}:{callee.qualname}")
