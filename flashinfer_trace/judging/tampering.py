"""Functions of clocks, of synchronisation and of torch that a submission has no reason to replace.

The judge relies on none of them: it compares outputs and memory in its own process. That a submission replaces one says
that its author expects to be timed or compared with it, so it is reported. Like every look from inside of a process it
finds the careless; what keeps a verdict true is that nothing but tensors leaves the process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

__all__ = ["changed", "watched"]

_NAMES = {
    "builtins": ("abs", "all", "any", "isinstance", "max", "min", "open", "print"),
    "time": (
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "process_time",
        "sleep",
        "time",
        "time_ns",
    ),
    "torch": ("all", "allclose", "empty", "empty_like", "equal", "isclose", "isnan", "zeros"),
    "torch.Tensor": ("allclose", "clone", "copy_", "data_ptr", "equal", "fill_", "isclose", "isnan", "item", "tolist"),
    "torch.cuda": ("Event", "current_stream", "default_stream", "stream", "synchronize"),
    "torch.cuda.Event": ("elapsed_time", "query", "record", "synchronize", "wait"),
    "torch.cuda.Stream": ("query", "record_event", "synchronize", "wait_event", "wait_stream"),
    "torch.testing": ("assert_close",),
}


def watched() -> dict[str, object]:
    """The functions as they are now, by dotted name."""
    return {f"{owner}.{name}": getattr(_owner(owner), name, None) for owner, names in _NAMES.items() for name in names}


def changed(before: Mapping[str, object]) -> list[str]:
    """Dotted names of the functions that are others than `before`, in order."""
    return [name for name, value in watched().items() if value is not before[name]]


def _owner(path: str) -> object:
    if path in sys.modules:
        return sys.modules[path]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:  # a class
        parent, _, name = path.rpartition(".")
        return getattr(_owner(parent), name)
