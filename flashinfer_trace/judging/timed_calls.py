"""A series of timed calls inside of a submission's process, all on the same inputs."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C import TensorBase
from torch.cuda import current_stream, set_stream

from flashinfer_trace.judging.after_call import Undisturbed, hush, stored, unhush, unreplaced
from flashinfer_trace.judging.stopwatch import Stopwatch

__all__ = ["TimedCalls", "captured", "seed_all"]

globals()["__builtins__"] = dict(vars(builtins))  # a copy for the functions here, which a submission cannot change

#: What is told of words that were hidden.
_HIDDEN = ("places", "words")

_tensor, _int64 = torch.tensor, torch.int64


class TimedCalls:
    """Some calls: before each, memory is as the judge filled it; after each, the outputs are copied.

    Some words of the inputs are wrong there, as the judge left them, until the clock of a call is about to start. What
    computes before that, be it on another stream while this one is held, computes something else.

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
        code of the submission by itself hushed.

        Args:
            hidden: words of the inputs, as `shared_memory.Filled.hide` gives them.
        """
        hush()
        watch = self._stopwatch
        stream = current_stream() if self._memory.is_cuda else None
        described: dict[str, Any] = {}
        with Undisturbed():
            unreplaced()
            places, words = (_tensor(hidden[one], dtype=_int64, device=self._memory.device) for one in _HIDDEN)
        for number, (snapshot, outputs) in enumerate(self._copies):
            seed_all(self._seed + number)
            returned = None
            with Undisturbed():
                self._restore()
                watch.hold()
                TensorBase.index_copy_(self._inputs, 0, places, words)
            watch.stream = stream
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
            self._found.append((late_phase if phases else late, start, end, phases))
        watch.stream = stream
        watch.wait(watch.mark())
        watch.stream = None
        return described

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
    """Seeds torch's generators, so that a verdict can be repeated."""
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
