"""The work of a submission's process after a call has returned: it keeps the outputs, and runs no submitted code.

The clock of a timed call has stopped by then, so work done here would not be timed. Everything used here is taken from
Python and torch before a submission can replace it. That includes builtins: the functions here have their own copy of
them.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from gc import disable, enable, isenabled
from sys import getprofile, gettrace, setprofile, settrace
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, TensorBase, _DisableTorchDispatch, _dispatch_dump_table
from torch.nn import Parameter

from flashinfer_trace.judging.loading import ReturnError

globals()["__builtins__"] = dict(vars(builtins))  # before the functions that look there

#: Longest name, of an output or a type, that is told, in characters.
MAX_NAME = 200

#: Torch's operators that copy outputs and restore the memory to its state before a call.
_OPERATORS = (
    *("_to_copy", "as_strided", "clone", "copy_", "detach", "empty.memory_format", "empty_like", "empty_strided"),
    *("fill_", "index_copy_", "lift_fresh", "slice.Tensor", "sum", "sum.dim_IntList", "view.dtype", "zero_"),
)
_TABLES = {f"aten::{name}": _dispatch_dump_table(f"aten::{name}") for name in _OPERATORS}

_FORM = {name: getattr(TensorBase, name).__get__ for name in ("dtype", "shape", "device", "layout")}
_NAME = vars(type)["__name__"].__get__
_signal: Any = importlib.import_module("_signal")  # what `signal` makes of it can be replaced
_mask: Any = _signal.pthread_sigmask
_BLOCK, _UNBLOCK, _SIGNALS = _signal.SIG_BLOCK, _signal.SIG_UNBLOCK, frozenset(_signal.valid_signals())
_monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12
_tool: Any = getattr(_monitoring, "get_tool", None)
_set_events: Any = getattr(_monitoring, "set_events", None)
_TOOLS = range(6 if _monitoring else 0)


def hush() -> None:
    """Stops what would run code of the submission by itself, for good: profile and trace functions, and tools that
    monitor; and until `unhush`: the collection of garbage, which has callbacks, and signals, which have handlers."""
    disable()
    _mask(_BLOCK, _SIGNALS)
    if getprofile() is not None:  # Python tells hooks that audit of each that is set
        setprofile(None)
    if gettrace() is not None:
        settrace(None)
    for tool in _TOOLS:
        if _tool(tool) is not None:
            _set_events(tool, 0)


def unhush() -> None:
    """Collects garbage and takes signals again."""
    enable()
    _mask(_UNBLOCK, _SIGNALS)


class Undisturbed:
    """Hushed, and without what makes torch ask the submission: tensors of its classes, and modes that are active.

    A class, because whatever `contextlib` makes can be replaced.
    """

    def __enter__(self) -> None:
        self._hushed = not isenabled()
        hush()
        self._guards = DisableTorchFunction(), _DisableTorchDispatch()
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: object) -> None:
        for guard in self._guards[::-1]:
            guard.__exit__(None, None, None)  # neither guard handles exceptions
        if not self._hushed:
            unhush()


class Replaced(Exception):
    """A submission has given torch a kernel of its own for what outputs are copied with. The message names it."""


def unreplaced() -> None:
    """Checks that torch computes what follows a call as it did before the submission was loaded: kernels that Python
    registers for its operators are code of the submission, whatever torch is told not to ask.

    Raises:
        Replaced: an operator has another kernel.
    """
    for name, table in _TABLES.items():
        if _dispatch_dump_table(name) != table:
            raise Replaced(f"it replaced {name}, with which outputs are copied")


def stored(returned: Any, outputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Copies what was returned into the outputs, and describes each value: what does not fit is only described.

    Classes of the submission's own are read as the container that they derive from, and never asked for anything.

    Raises:
        ReturnError: there are too few or too many values, or their names are not strings.
    """
    described: dict[str, Any] = {}
    for name, value in _named(returned, outputs):
        kind = type(value)
        if kind is Tensor or kind is Parameter:  # a subclass could compute when it is copied, or compared
            form = _form(value)
            described[name[:MAX_NAME]] = {
                **{"dtype": str(form["dtype"]).removeprefix("torch."), "shape": list(form["shape"])},
                **{"device": str(form["device"]), "layout": str(form["layout"])},
            }
            if name in outputs and form == _form(outputs[name]):
                TensorBase.copy_(outputs[name], value)
        elif issubclass(kind, (bool, int, float)):
            described[name[:MAX_NAME]] = {"number": value}
        else:
            described[name[:MAX_NAME]] = {"type": _NAME(kind)[:MAX_NAME]}
    return described


def _named(returned: Any, outputs: Mapping[str, torch.Tensor]) -> list[tuple[str, Any]]:
    """The values that were returned, with the names of outputs."""
    kind = type(returned)
    if issubclass(kind, dict):
        named = list(dict.items(returned))
        if not named:  # which would say that the outputs were written
            raise ReturnError(f"it returned an empty dict; it must return the outputs {list(outputs)}, by name")
        if any(type(name) is not str for name, _ in named):
            raise ReturnError(f"it returned a dict whose keys are not all plain strings, as {list(outputs)} are")
        return named
    values: Sequence[Any] = [returned]
    for base in (tuple, list):
        if issubclass(kind, base):
            values = list(base.__iter__(returned))
    if len(values) != len(outputs):
        results = f"{len(values)} result{'' if len(values) == 1 else 's'}"
        raise ReturnError(f"it returned {results}; it must return the outputs {list(outputs)}, in this order")
    return list(zip(outputs, values, strict=True))


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: read(tensor) for name, read in _FORM.items()}
