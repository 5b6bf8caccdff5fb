"""The log of kernel calls: what was called, from where, with which arguments, inside which other logged call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tools.runtime_tracing import frames

#: A name in the profiler's timeline -> the context in which work carries that name.
Marker = Callable[[str], AbstractContextManager[object]]
#: Start of the names by which the profiler's timeline is linked with the log: ``kernel-call:<call>:<layer>``.
MARK = "kernel-call:"


@dataclass
class LoggedCall:
    """Calls that cannot be told apart: the same phase, kernel, stack, arguments and enclosing call.

    Attributes:
        number: its index in the log.
        phase: what was running: ``prefill``, ``decode`` or ``capture`` (of a CUDA graph).
        library: which wrapper saw it: sgl_kernel, flashinfer, deep_gemm, triton, torch.ops, jit or torch.
        kernel: dotted path of what was called.
        stack: frames of SGLang and the libraries, the call site first.
        arguments: see `arguments.arguments_text`.
        parent: number of the enclosing logged call; None if SGLang made the call by itself.
        count: how often it was called.
    """

    number: int
    phase: str
    library: str
    kernel: str
    stack: tuple[frames.RawFrame, ...]
    arguments: str
    parent: int | None
    count: int = 0


@dataclass
class CallLog:
    """Collects calls while a phase is set.

    Attributes:
        phase: the running phase; None while nothing is recorded.
        layer: the index of the running decoder layer, or None outside of the layers.
        marker: how the profiler's timeline is marked; None while no profiler runs.
        calls: what was recorded.
    """

    phase: str | None = None
    layer: int | None = None
    marker: Marker | None = None
    calls: list[LoggedCall] = field(default_factory=list)
    _known: dict[tuple[object, ...], LoggedCall] = field(default_factory=dict)
    _local: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def call(self, library: str, kernel: str, arguments: Callable[[], str]) -> Iterator[None]:
        """Records a call around its body; does nothing while no phase is set."""
        if self.phase is None:
            yield
            return
        open_calls: list[int] = self._local.__dict__.setdefault("open", [])
        logged = self._find(self.phase, library, kernel, arguments(), open_calls[-1] if open_calls else None)
        logged.count += 1
        open_calls.append(logged.number)
        layer = "" if self.layer is None else str(self.layer)
        mark = contextlib.nullcontext() if self.marker is None else self.marker(f"{MARK}{logged.number}:{layer}")
        try:
            with mark:
                yield
        finally:
            open_calls.pop()

    def _find(self, phase: str, library: str, kernel: str, arguments: str, parent: int | None) -> LoggedCall:
        stack = frames.stack()
        place = tuple((id(frame.code), frame.offset) for frame in stack)
        key = (phase, library, kernel, place, arguments, parent)
        if key not in self._known:
            self._known[key] = LoggedCall(len(self.calls), phase, library, kernel, stack, arguments, parent)
            self.calls.append(self._known[key])
        return self._known[key]
