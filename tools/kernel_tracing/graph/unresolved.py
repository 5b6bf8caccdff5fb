"""Calls that were not resolved and might reach a kernel.

Most calls on unknown receivers are tensor methods. A call might reach a kernel if a function in the sources that
reaches one has the called name; names that tensors, strings and containers also have do not count. A call into a
library whose sources are not given might always reach one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from tools.kernel_tracing.engine.solver import Context, Solver
from tools.kernel_tracing.rules import external_libraries

_COMMON = frozenset(dir(str)) | frozenset(dir(list)) | frozenset(dir(dict)) | frozenset(dir(set))
_COMMON |= {
    "apply",
    "close",
    "flush",
    "forward",
    "get_name",
    "load",
    "next",
    "reset",
    "result",
    "run",
    "sample",
    "save",
}
_COMMON |= {"register_buffer", "start", "step", "stop", "submit", "wait", "write"}
# Methods of tensors.
_COMMON |= {"abs", "add", "add_", "all", "any", "bool", "byte", "chunk", "contiguous", "copy_", "cpu", "cuda", "detach"}
_COMMON |= {"empty", "expand", "fill_", "float", "half", "index_select", "int", "item", "log", "long", "max", "mean"}
_COMMON |= {"min", "mul", "mul_", "narrow", "numel", "numpy", "ones", "permute", "repeat", "reshape", "size", "split"}
_COMMON |= {"squeeze", "stride", "sum", "t", "to", "tolist", "transpose", "type", "unsqueeze", "view", "zero_"}


def report(solver: Solver, frame: Callable[[Context, ast.AST], dict[str, Any]]) -> list[dict[str, Any]]:
    """Unresolved calls, ordered by place."""
    resolved = {(caller.function, call) for caller, call, _ in solver.edges}
    resolved |= {(call.caller.function, call.call) for call in solver.kernel_calls.values()}
    reaching = _reaching_names(solver)
    found = {}
    for open_call in solver.open_calls.values():
        function = open_call.caller.function
        if open_call.library:
            if external_libraries.is_work(open_call.name) and open_call.name not in _COMMON - {
                "apply",
                "forward",
                "run",
            }:
                entry = frame(open_call.caller, open_call.call)
                entry["reason"] = f"external library {open_call.library}: its sources are not among those given"
                found[entry["file"], entry["line"], entry["function"], entry["call"]] = entry
        elif open_call.name in reaching and (function, open_call.call) not in resolved:
            entry = frame(open_call.caller, open_call.call)
            entry["reason"] = f"the receiver is unknown, and a function named {open_call.name} reaches a kernel"
            found[entry["file"], entry["line"], entry["function"], entry["call"]] = entry
    return [found[key] for key in sorted(found)]


def _reaching_names(solver: Solver) -> set[str]:
    """Names of the functions that reach a kernel."""
    callers: dict[Context, list[Context]] = {}
    for caller, _, callee in solver.edges:
        callers.setdefault(callee, []).append(caller)
    pending = [call.caller for call in solver.kernel_calls.values()]
    seen = dict.fromkeys(pending)
    while pending:
        for caller in callers.get(pending.pop(), ()):
            if caller not in seen:
                seen[caller] = None
                pending.append(caller)
    return {context.function.qualname.rpartition(".")[2] for context in seen} - _COMMON
