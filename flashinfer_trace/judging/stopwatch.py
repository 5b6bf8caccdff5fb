"""Times calls inside of a submission's process, with what was taken from torch before the submission was loaded.

A submission that replaces `torch.cuda.Event` or a clock changes names that nobody looks up any more: events are of
torch's C++ class, whose methods Python cannot replace. A submission could still change the memory of its own process;
`Timed.outside`, from the judge's clock, bounds how much that can gain.
"""

from __future__ import annotations

import builtins
import importlib
import time
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch._C import TensorBase
from torch.cuda import current_stream, set_stream

from flashinfer_trace.judging.after_call import Undisturbed, hush, stored, unhush, unreplaced

globals()["__builtins__"] = dict(vars(builtins))  # a copy for the functions here, which a submission cannot change

#: A moment: an event on a GPU's stream, or nanoseconds.
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
        self.now = time.perf_counter_ns
        self._event: Callable[..., Any] = torch._C._CudaEventBase if self._on_gpu else object
        self._spin: Callable[[int], Any] = torch._C._cuda_sleep if self._on_gpu else int
        self._phases: dict[str, list[Callable[[], float]]] = {}
        self._late = False
        self._restored: Callable[[], None] = lambda: None
        self.stream: Any = None

    def hold(self) -> None:
        """Keeps the GPU busy for a while without touching memory. Meanwhile the processor can launch a call."""
        self._spin(HEAD_START)

    def mark(self) -> Mark:
        """The point that `stream` is at, when it gets there."""
        if not self._on_gpu:
            return self.now()
        event = self._event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, mark: Mark) -> None:
        """Waits until a point was reached."""
        if self._on_gpu:
            mark.synchronize()

    def late(self, mark: Mark) -> bool:
        """Whether a GPU has already reached a point. If so, it may have waited for later launches."""
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
        """Functions for the seconds of the phases since the last time, by name; and whether one was launched late."""
        found = self._phases, self._late
        self._phases, self._late = {}, False
        return found

    def _watched(self, timed_by: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            call = partial(method, *arguments, **options)
            # Without a stream it is not a timed call.
            return call() if self.stream is None and self._on_gpu else timed_by(call)

        return timed

    def _planned(self, call: Callable[[], Any]) -> Any:
        """Planning is work of the processor, which its clock times until the GPU has what was planned."""
        self.wait(self.mark())
        start = self.now()
        result = call()
        self.wait(self.mark())
        self._phases.setdefault("plan", []).append(partial(_nanoseconds, start, self.now()))
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


#: The entries about hidden words, and the bytes of a word.
_HIDDEN, _WORD = ("places", "words"), 8

_tensor, _int64 = torch.tensor, torch.int64


class TimedCalls:
    """Some calls: before each, memory is as the judge filled it; after each, the outputs are copied.

    Some words of the inputs are wrong there, as the judge left them, until the clock of a call is about to start. Code
    that computes earlier, for example on another stream while this one is held, computes something else.

    Args:
        stopwatch: made before the submission was loaded.
        memory: bytes of inputs and outputs, on the device of the submission.
        first: where the outputs begin in it.
        seed: of torch's generators before the first call; each further call has the next.
        timing: fields of `process.Timing`.

    Attributes:
        snapshots: bytes of the outputs after each call, uint8 [repeats, bytes].
    """

    def __init__(
        self, stopwatch: Stopwatch, memory: torch.Tensor, first: int, seed: int, timing: Mapping[str, Any]
    ) -> None:
        self._stopwatch, self._memory, self._seed, self._timing = stopwatch, memory, seed, timing
        self._original, self._inputs = memory.clone(), memory[:first].view(torch.int64)
        self._cache = torch.empty(timing["flush"], dtype=torch.uint8, device=memory.device)
        self.snapshots = torch.empty(timing["repeats"], len(memory) - first, dtype=torch.uint8, device=memory.device)
        self._copies = [(snapshot, memory[first:]) for snapshot in self.snapshots]
        self._found: list[tuple[bool, Any, Any, dict[str, list[Callable[[], float]]]]] = []
        self._plan: Callable[[], Any] | None = None
        self._known: list[tuple[int, int]] = []

    def plan_with(self, plan: Callable[[], Any], known: list[tuple[int, int]]) -> None:
        """Plans before each call, which is timed apart. Only the inputs that are known then (bytes from, to) have no
        wrong words."""
        self._plan, self._known = plan, known

    def prepare(self, call: Callable[[], Any], outputs: dict[str, torch.Tensor]) -> None:
        """Takes the call that is timed, which returns its results or writes into the outputs, and lets clocks rise."""
        self._call, self._outputs = call, outputs
        for _ in range(self._timing["warm_up"]):
            self._cache.zero_()
        if self._memory.is_cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def run(self, hidden: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the calls, and waits for the last copy; the description of what was returned last. It leaves what runs
        code of the submission by itself hushed. `hidden` are the words that `shared_memory.Filled.hide` gives."""
        hush()
        watch = self._stopwatch
        stream = current_stream() if self._memory.is_cuda else None
        described: dict[str, Any] = {}
        with Undisturbed():
            unreplaced()
            known, unknown = self._split(hidden)
        for number, (snapshot, outputs) in enumerate(self._copies):
            seed_all(self._seed + number)
            returned = None
            with Undisturbed():
                self._restore()
                TensorBase.index_copy_(self._inputs, 0, *known)
            watch.stream, planned = stream, None
            if self._plan is not None:
                planned = self._planned()
            with Undisturbed():
                watch.hold()
                TensorBase.index_copy_(self._inputs, 0, *unknown)
            watch.take_phases()
            start = watch.mark()
            unhush()
            returned = self._call()
            hush()
            end = watch.mark()
            late = watch.late(start)
            watch.stream = None
            with Undisturbed():
                unreplaced()
                if stream is not None:
                    set_stream(stream)  # the submission may have left another one
                described = {} if returned is None else stored(returned, self._outputs)
                TensorBase.copy_(snapshot, outputs)
            phases, late_phase = watch.take_phases()
            late = late_phase if phases else late
            if planned is not None:
                phases = {"plan": [planned], "run": [partial(watch.seconds, start, end)]}
            self._found.append((late, start, end, phases))
        watch.stream = stream
        watch.wait(watch.mark())
        watch.stream = None
        return described

    def _split(self, hidden: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Places and words of the inputs that a plan knows, and of all others."""
        parts: list[list[tuple[int, int]]] = [[], []]
        for place, word in zip(*(hidden[one] for one in _HIDDEN), strict=True):
            early = any(first <= place * _WORD < end for first, end in self._known)
            parts[0 if early else 1].append((place, word))
        device = self._memory.device
        return [
            (
                _tensor([place for place, _ in part], dtype=_int64, device=device),
                _tensor([word for _, word in part], dtype=_int64, device=device),
            )
            for part in parts
        ]

    def _planned(self) -> Callable[[], float]:
        """Plans, and gives the seconds of it by the processor's clock, until the GPU has what was planned."""
        watch, plan = self._stopwatch, self._plan
        assert plan is not None
        watch.wait(watch.mark())
        start = watch.now()
        unhush()
        plan()
        hush()
        watch.wait(watch.mark())
        end = watch.now()
        with Undisturbed():
            unreplaced()
            if watch.stream is not None:
                set_stream(watch.stream)
        return partial(_nanoseconds, start, end)

    def _restore(self) -> None:
        """Brings memory, and the cache, into the state before a call."""
        TensorBase.copy_(self._memory, self._original)
        spoiled = [TensorBase.clone(tensor) for tensor in self._outputs.values()]
        del spoiled  # memory that the submission allocates is likely this one, and not that of its last result
        if self._timing["flush"]:
            TensorBase.zero_(self._cache)
        else:  # a call would leave in the cache what the next one needs, but it could also leave its results to it
            TensorBase.sum(self._inputs)

    def times(self) -> list[dict[str, float]]:
        """Seconds of each call by phase, and ``ahead``: 1 if the GPU did not begin it before all of it was launched."""
        found = []
        for late, start, end, phases in self._found:
            seconds = {name: sum(each() for each in calls) for name, calls in phases.items()}
            total = sum(seconds.values()) or self._stopwatch.seconds(start, end)
            found.append({"total": total, **seconds, "ahead": float(not late)})
        return found


def seed_all(seed: int) -> None:
    """Seeds torch's generators to make a verdict repeatable."""
    torch.default_generator.manual_seed(seed)
    for generator in torch.cuda.default_generators:  # none where CUDA is not in use
        generator.manual_seed(seed)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call that replays what the given one launches on a GPU, after one that is not captured.

    Raises:
        RuntimeError: it cannot be captured, for example because it waits for the GPU.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        returned = call()

    def replay() -> Any:
        graph.replay()
        return returned

    return replay
