"""The resolver's answers for single calls, as `tools.kernel_tracing.benchmark` asks them.

A trace keeps only the calls that lead to kernels; here every call that the analysis of one model resolved is asked for.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

from tools.kernel_tracing import interpreter, roots
from tools.kernel_tracing.index import FunctionInfo, Index
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.solver import Solver
from tools.kernel_tracing.sources import find_sources

__all__ = ["edges"]

Query = tuple[str, int, str]


def edges(
    sources: Path, queries: list[Query], model: str = "deepseek", platform: str = "cuda"
) -> dict[Query, set[str]]:
    """For each (file, line, called expression): the functions that it can enter, as "package.module:Class.method"."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 100_000))
    index = Index(find_sources(sources))
    solver = Solver(index, Platform(platform), interpreter.interpret)
    roots.start(solver, roots.find_entries(index, model))
    solver.solve()
    answers: dict[Query, set[str]] = defaultdict(set)
    for edge in solver.edges.values():
        _answer(answers, edge.caller.function, edge.call, edge.callee.function)
    for kernel in solver.kernel_calls.values():
        if isinstance(kernel.target, FunctionInfo):
            _answer(answers, kernel.caller.function, kernel.call, kernel.target)
    return {query: answers.get(query, set()) for query in queries}


def _answer(answers: dict[Query, set[str]], caller: FunctionInfo, call: ast.AST, callee: FunctionInfo) -> None:
    if isinstance(call, ast.Call):
        query = (caller.module.file, call.lineno, ast.unparse(call.func))
        answers[query].add(f"{callee.module.name}:{callee.qualname}")
