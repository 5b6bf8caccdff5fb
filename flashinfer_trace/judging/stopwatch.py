"""Times calls inside of a submission's process, with what was taken from torch before the submission was loaded.

A submission that replaces `torch.cuda.Event` or a clock changes names that nobody looks up any more: events are of
torch's C++ class, whose methods Python cannot replace. What a submission could still do, it has to do to the memory of
its own process; `Timed.outside` is a bound from the judge's clock on what that can gain.
"""

from __future__ import annotations

import builtins
import importlib
import time
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch

__all__ = ["Stopwatch"]

globals()["__builtins__"] = dict(vars(builtins))  # a copy for the functions here, which a submission cannot change

#: A point in time: an event on a GPU's stream, or nanoseconds.
Mark = Any

#: Cycles, about four milliseconds, in which a GPU waits for what is launched next: twice what a processor takes to
#: launch the longest eager function that is known.
HEAD_START = 8_000_000


class Stopwatch:
    """Marks points on the stream of a device, and says how far apart they are.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._now = time.perf_counter_ns
        self._event: Callable[..., Any] = torch._C._CudaEventBase if self._on_gpu else object
        self._spin: Callable[[int], Any] = torch._C._cuda_sleep if self._on_gpu else int
        self._phases: dict[str, list[Callable[[], float]]] = {}
        self._late = False
        self._restored: Callable[[], None] = lambda: None
        self.stream: Any = None

    def hold(self) -> None:
        """Keeps the GPU busy for a while without touching memory, so that the processor can launch a call in time."""
        self._spin(HEAD_START)

    def mark(self) -> Mark:
        """The point that `stream` is at, when it gets there."""
        if not self._on_gpu:
            return self._now()
        event = self._event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, mark: Mark) -> None:
        """Waits until a point was reached."""
        if self._on_gpu:
            mark.synchronize()

    def late(self, mark: Mark) -> bool:
        """Whether a GPU has reached a point already, so that it may have waited for what was launched behind it."""
        return self._on_gpu and bool(mark.query())

    def seconds(self, start: Mark, end: Mark) -> float:
        """From one point to another; both were reached."""
        return float(start.elapsed_time(end)) * 1e-3 if self._on_gpu else _nanoseconds(start, end)

    def watch_phases(self, path: str) -> None:
        """Times plan() and run() apart if a dotted path is that of a class that has both, as flashinfer's wrappers."""
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:  # of an operator that torch looks up by itself, such as those in torch.ops
            return
        if isinstance(found, type) and hasattr(found, "plan") and hasattr(found, "run"):
            own = {phase: vars(found)[phase] for phase in ("plan", "run") if phase in vars(found)}
            for phase, timed_by in (("plan", self._planned), ("run", self._run)):
                setattr(found, phase, self._watched(timed_by, getattr(found, phase)))
            self._restored = partial(_restore, found, own)

    def watch_no_phases(self) -> None:
        """Undoes `watch_phases`: the methods of a class may be those of another one, whose calls are timed next."""
        self._restored()
        self._restored = lambda: None

    def take_phases(self) -> tuple[dict[str, list[Callable[[], float]]], bool]:
        """What gives the seconds of the phases since the last time, by name; and whether one was launched late."""
        found = self._phases, self._late
        self._phases, self._late = {}, False
        return found

    def _watched(self, timed_by: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            call = partial(method, *arguments, **options)
            # Not a timed call where there is no stream.
            return call() if self.stream is None and self._on_gpu else timed_by(call)

        return timed

    def _planned(self, call: Callable[[], Any]) -> Any:
        """Planning is work of the processor, which its clock times until the GPU has what was planned."""
        self.wait(self.mark())
        start = self._now()
        result = call()
        self.wait(self.mark())
        self._phases.setdefault("plan", []).append(partial(_nanoseconds, start, self._now()))
        return result

    def _run(self, call: Callable[[], Any]) -> Any:
        """The GPU is held again, because planning waited for it."""
        self.hold()
        start = self.mark()
        result = call()
        end = self.mark()
        self._late = self._late or self.late(start)
        self._phases.setdefault("run", []).append(partial(self.seconds, start, end))
        return result


def _nanoseconds(start: int, end: int) -> float:
    return (end - start) * 1e-9


def _restore(found: type, own: Mapping[str, Any]) -> None:
    """Gives a class the methods that it had; those that it inherited come from its base again."""
    for phase in ("plan", "run"):
        if phase in own:
            setattr(found, phase, own[phase])
        else:
            delattr(found, phase)
