"""Kernels: the name, source, category and definition of a recorded kernel call."""

from __future__ import annotations

from dataclasses import dataclass, field

from tools.kernel_tracing.engine.solver import KernelCall, Solver
from tools.kernel_tracing.rules import boundaries
from tools.kernel_tracing.rules.categories import categorise
from tools.kernel_tracing.source.declarations import FunctionInfo
from tools.kernel_tracing.source.libraries import LIBRARIES


@dataclass(eq=False)
class Kernel:
    """One kernel, with all its calls."""

    name: str
    source: str
    category: str
    file: str
    line: int
    calls: list[KernelCall] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What distinguishes kernels and orders them in a trace."""
        return (self.name, self.source, self.file, self.line)


def collect(solver: Solver) -> list[Kernel]:
    """All kernels that were called, ordered by name."""
    found: dict[tuple[str, str, str, int], Kernel] = {}
    for call in solver.kernel_calls.values():
        source, file, line = _origin(call.target)
        kernel = Kernel(call.name, source, categorise(call.name, file, call.caller.function.module.file), file, line)
        found.setdefault(kernel.key, kernel).calls.append(call)
    return [found[key] for key in sorted(found)]


def _origin(target: FunctionInfo | str) -> tuple[str, str, int]:
    """Source, and file and line of the definition."""
    if isinstance(target, str):  # torch.ops.<namespace>.<name>
        namespace = target.split(".")[2]
        return LIBRARIES.get(namespace, "torch.ops"), "", 0
    library = LIBRARIES.get(target.module.name.partition(".")[0])
    if library is not None:
        source = library
    elif boundaries.is_triton(target):
        source = "triton"
    else:
        source = "jit"
    return source, target.module.file, target.line
