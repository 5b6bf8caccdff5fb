"""One analysis: a model's solved call graph, and what the kernel trace and the op trace derive from it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from tools.kernel_tracing.configuration.conditions import Conditions
from tools.kernel_tracing.engine import interpreter
from tools.kernel_tracing.engine.solver import Context, Solver
from tools.kernel_tracing.graph import roots, unmade
from tools.kernel_tracing.graph.chains import Chains
from tools.kernel_tracing.graph.kernels import Kernel, collect
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.declarations import ClassInfo
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import SourceTree

Progress = Callable[[str, int, int], None]


@dataclass(eq=False)
class Analysis:
    """A solved call graph.

    Attributes:
        model: the name of the model's file, without `.py`.
        platform: the platform whose branches were kept.
        solver: contexts, edges and kernel calls.
        entries: the model's entry classes.
        ends: contexts where chains end: the forward of the entries, and what the runtime calls by itself.
        fallbacks: contexts where chains end if they reach none of `ends`.
        files: the files of all models, which form one library: models inherit from and call each other.
    """

    model: str
    platform: Platform
    solver: Solver
    entries: list[ClassInfo]
    ends: list[Context]
    fallbacks: list[Context]
    files: frozenset[str]

    def in_model(self, context: Context) -> bool:
        """Whether a context's function is in a model's file."""
        return context.function.module.file in self.files

    @cached_property
    def kernels(self) -> list[Kernel]:
        """All kernels that are called, ordered by name."""
        return collect(self.solver)

    @cached_property
    def chains(self) -> Chains:
        """The chains of these kernels."""
        return Chains(self.solver, self.ends, self.fallbacks, self.in_model, self.conditions.consistent)

    @cached_property
    def conditions(self) -> Conditions:
        """The conditions under which hops are taken."""
        return Conditions(self.solver, [*self.ends, *self.fallbacks])


def analyse(
    sources: SourceTree,
    model: str,
    entries: Sequence[str] = (),
    platform: str = "cuda",
    progress: Progress | None = None,
) -> Analysis:
    """Solve the call graph of a model; the arguments are those of `tools.kernel_tracing.report.trace.trace`.

    Raises: roots.RootsError for an unknown model or entry.
    """
    with deep():
        index = Index(sources)
        classes = roots.find_entries(index, model, entries)
        solver = Solver(index, Platform(platform), interpreter.interpret)
        if progress is not None:
            solver.on_progress = lambda contexts, waiting: progress("resolving calls", contexts - waiting, contexts)
        ends, fallbacks = roots.start(solver, classes)
        solver.solve()
        unmade.remove(solver)
    files = frozenset({info.module.file for info in classes} | roots.model_files(index))
    return Analysis(model, solver.platform, solver, classes, ends, fallbacks, files)


@contextmanager
def deep() -> Iterator[None]:
    """Raises the recursion limit, because calls nest as deeply as in the traced program, and pauses garbage collection.

    The trees of a whole program are never garbage; a collection would visit millions of live nodes again and again.
    """
    limit, collecting = sys.getrecursionlimit(), gc.isenabled()
    sys.setrecursionlimit(max(limit, 100_000))
    gc.disable()
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
        if collecting:
            gc.enable()
