"""The resolver's answers for single calls, for the benchmark.

A trace keeps only the calls that lead to kernels. This module gives every call that the analysis of one model resolved.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tools.kernel_tracing.engine import attributes
from tools.kernel_tracing.engine.solver import Solver
from tools.kernel_tracing.engine.values import Instance
from tools.kernel_tracing.graph import unmade
from tools.kernel_tracing.report.analysis import Analysis, analyse, deep
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo
from tools.kernel_tracing.source.sources import find_sources
from tools.resolver_benchmark.labels import Query

__all__ = ["answers", "edges"]


def edges(
    sources: Path, queries: list[Query], model: str = "deepseek", platform: str = "cuda"
) -> dict[Query, set[str]]:
    """(file, line, called expression) -> the functions that the call can enter, as "package.module:Class.method"."""
    analysis = analyse(find_sources(sources), model, platform=platform)
    with deep():
        _enter_unreached(analysis.solver, queries)
        analysis.solver.solve()
    unmade.remove(analysis.solver)
    return answers(analysis, queries)


def answers(analysis: Analysis, queries: list[Query]) -> dict[Query, set[str]]:
    """Like `edges`, for an existing analysis."""
    found: dict[Query, set[str]] = defaultdict(set)
    for edge in analysis.solver.edges.values():
        _answer(found, edge.caller.function, edge.call, edge.callee.function)
    for kernel in analysis.solver.kernel_calls.values():
        if isinstance(kernel.target, FunctionInfo):
            _answer(found, kernel.caller.function, kernel.call, kernel.target)
    for caller, call, leaf in analysis.solver.leaves:
        _answer(found, caller, call, leaf)
    return {query: found.get(query, set()) for query in queries}


def _enter_unreached(solver: Solver, queries: list[Query]) -> None:
    """Enters the methods that contain queried calls but that nothing runs, on the instances that exist."""
    reached = {context.function.node for context in solver.contexts.values()}
    asked = {(file, line) for file, line, _ in queries}
    for module in solver.index.parsed():
        lines = {line for file, line in asked if file == module.file}
        for info in module.classes.values() if lines else ():
            receivers = [cls for cls in solver.constructed if info in solver.index.mro(cls)]
            for name, method in info.methods.items():
                spanned = range(method.node.lineno, (method.node.end_lineno or 0) + 1)  # type: ignore[union-attr]
                if method.node in reached or lines.isdisjoint(spanned):
                    continue
                for cls in receivers:
                    if attributes.find_method_in(solver.index, cls, name) is method:
                        solver.start(solver.context(method, solver.universe.make(Instance, cls)))


def _answer(
    found: dict[Query, set[str]], caller: FunctionInfo, call: ast.AST, callee: FunctionInfo | ClassInfo
) -> None:
    if isinstance(call, ast.Call):
        query = (caller.module.file, call.lineno, ast.unparse(call.func))
        found[query].add(f"{callee.module.name}:{callee.qualname}")
