"""A submission's process as the judge sees it: it is given inputs, and what it leaves in shared memory is read.

with Server() as server, Launch(server, request, inputs, outputs, "cpu", RunLimits()).start() as process:
    answer = process.call(inputs, poisoned, seed=0)

Its words are checked, and proven by nothing.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashinfer_trace.judging.server import Idle, Server, has_room, library_of
from flashinfer_trace.judging.submission import RunLimits
from flashinfer_trace.sandbox import protocol
from flashinfer_trace.sandbox.far_rows import FarRows
from flashinfer_trace.sandbox.limits import Failed, printable, printable_lines
from flashinfer_trace.sandbox.printed import Printed
from flashinfer_trace.sandbox.process import ConfinedProcess
from flashinfer_trace.sandbox.shared_memory import Filled, SharedMemory

__all__ = ["Answer", "Failed", "Launch", "SubmissionProcess", "Timed", "Timing"]

#: Kinds of failures that a process may say a call has instead of having raised an error.
OF_CALLS = ("outputs", "tampered")

#: Asks a process whether it is there, and has it give back its memory.
AWAKE, REST = {"awake": True}, {"rest": True}


@dataclass(frozen=True)
class Answer:
    """The result of one call.

    Attributes:
        outputs: as they were in the memory when the call returned.
        returned: what the submission says of each value that it returned, by name; empty if it returned nothing.
        changed: inputs that hold other bits than before.
        outside: whether it wrote outside the tensors that it was given.
        tampered: functions that it replaced, as its process says.
    """

    outputs: dict[str, torch.Tensor]
    returned: dict[str, Any]
    changed: list[str]
    outside: bool
    tampered: list[str]


@dataclass(frozen=True)
class Timing:
    """How calls are timed.

    Attributes:
        flush: bytes that are written before each call to evict its inputs from the cache; 0 writes nothing.
        warm_up: how often they are written before the first call, for clocks to rise.
        graph: whether calls are captured, and replayed as a CUDA graph.
    """

    repeats: int
    flush: int = 0
    warm_up: int = 0
    graph: bool = False


@dataclass(frozen=True)
class Timed:
    """The results of timed calls.

    Attributes:
        calls: seconds of each call by phase: ``total``, also ``plan`` and ``run`` if a kernel has both; and
            ``ahead``: 1 if all of it was launched before the GPU began it, else 0.
        outside: seconds of all of them together, flushes included, by the judge's clock.
    """

    answers: list[Answer]
    calls: list[dict[str, float]]
    outside: float


class SubmissionProcess(ConfinedProcess):
    """One process with one submission: a context manager that ends it. After `Failed`, a new one is needed.

    After a call it is stopped until the next one: what its threads would do then comes too late to be seen, and would
    take time from other kernels.
    """

    def __init__(self, server: Server, limits: RunLimits, forked: tuple[socket.socket, int] | None = None) -> None:
        super().__init__(server, forked)
        self._kept_by, self._limits = server, limits
        self._shared: SharedMemory | None = None
        self._calls = 0
        self._asked = False
        self._device, self._libraries = "", frozenset[str]()
        self.plans = False
        self._printed: Printed | None = None

    def __enter__(self) -> SubmissionProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def loading(self, told: Mapping[str, Any], libraries: frozenset[str]) -> SubmissionProcess:
        """Tells the process what to load, and returns this object. `libraries` will have been imported by it; none if
        it runs anybody else's kernel, and is not used again."""
        self._device, self._libraries = str(told["device"]), libraries
        if told["submission"]["kind"] != "known" and self._printed is None:
            self._printed = Printed()
        try:
            self.tell({**told, "printed": self._printed is not None}, self._limits.load)
        except BaseException:
            self.end()
            raise
        return self

    def close(self) -> None:
        """Ends the process, and what it started; after a known kernel that failed in nothing, it waits for the next, if
        its device has room."""
        if self._libraries and not (self._ended or self._asked):
            with contextlib.suppress(Failed):
                self.ask(REST, self._limits.call, "raised")
                if has_room(self._device):
                    self._ended = True  # to this object, which no longer has it
                    self._kept_by.keep(Idle(self._pipe, self._pid, self._device, self._libraries))
        self.end()

    def end(self, *, reap: bool = False) -> int:
        status = super().end(reap=reap)
        if self._printed is not None:
            self._printed.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        return status

    @property
    def printed(self) -> str:
        if self._printed is None:
            return ""
        self._printed.read()
        return self._printed.text

    def read(self, target: memoryview) -> None:
        """Fills memory with the next bytes of an answer, and reads what is printed until they come."""
        if self._printed is not None and target:
            self._printed.wait(self._pipe, self._left())
        super().read(target)

    def call(
        self, inputs: Mapping[str, Any], poisoned: Mapping[str, torch.Tensor], seed: int, far: FarRows | None = None
    ) -> Answer:
        """Calls the submission on copies of the inputs.

        Args:
            poisoned: of each output, what its memory holds before the call.
            seed: of torch's generators in the process.
            far: the rows that its process puts before these; only these come back.

        Raises:
            Failed: it raised, took too long, or its process ended.
        """
        filled, request = self._filled(inputs if far is None else far.moved(inputs), poisoned, seed, 0)
        if far is not None:
            request["far"] = FarRows(far.inputs, far.outputs).to_json()
        seconds = self._limits.call if self._calls else self._limits.first_call
        self._calls += 1
        answer = self.ask(request, seconds, "raised")
        self.stop()
        return Answer(filled.outputs(), returned_of(answer), filled.changed(), filled.outside(), tampered_of(answer))

    def timed(
        self, inputs: Mapping[str, Any], poisoned: Mapping[str, torch.Tensor], seed: int, timing: Timing
    ) -> Timed:
        """As `call`, several times on the same inputs, after a `call` or series with others like them."""
        filled, request = self._filled(inputs, poisoned, seed, timing.repeats)
        hidden = filled.hide()
        self.ask({**request, "timing": asdict(timing)}, self._limits.first_call, "raised")
        started = time.perf_counter()
        self.ask({"go": True, **hidden}, self._limits.call * timing.repeats, "raised")
        outside = time.perf_counter() - started
        answer = self.ask({"collect": True}, self._limits.call, "raised")
        self.stop()
        outputs = [filled.outputs(copy) for copy in range(timing.repeats)]
        changed, beside = filled.changed(), filled.outside()
        answers = [Answer(each, returned_of(answer), changed, beside, tampered_of(answer)) for each in outputs]
        return Timed(answers, times_of(answer, timing.repeats), outside)

    def _filled(
        self, inputs: Mapping[str, Any], poisoned: Mapping[str, torch.Tensor], seed: int, copies: int
    ) -> tuple[Filled, dict[str, Any]]:
        """The memory of a call, with room for copies of its outputs, and the request that says where all lies."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in inputs.items() if name not in tensors}
        filled = Filled(tensors, poisoned)
        new_memory = self._room_for(filled.size + copies * (filled.size - filled.first))
        assert self._shared is not None
        filled.fill(self._shared.memory)
        slots = {name: slot.to_json() for name, slot in filled.slots.items()}
        return filled, {"size": filled.size, "slots": slots, "numbers": numbers, "seed": seed, **new_memory}

    def loaded(self) -> None:
        """Waits until the submission is loaded; `plans` says then whether it has `plan` and `run`."""
        self.plans = self.answer("not-loaded").get("plans") is True

    def ask(self, request: Mapping[str, Any], seconds: float, kind: str) -> dict[str, Any]:
        self.tell(request, seconds)
        return self.answer(kind)

    def tell(self, request: Mapping[str, Any], seconds: float) -> None:
        """Sends a request, which the process must answer within so many seconds from now."""
        self.begin_request(seconds)
        self._asked = True
        descriptors = []
        if "memory" in request:
            assert self._shared is not None
            descriptors = [self._shared.descriptor]
        elif request.get("printed"):
            assert self._printed is not None
            descriptors = [self._printed.theirs]
        self.send([protocol.pack_header(request)], descriptors)
        if self._printed is not None:
            self._printed.close_theirs()

    def answer(self, kind: str) -> dict[str, Any]:
        """Waits for the answer to the last request.

        Raises:
            Failed: of `kind`, or of one in `OF_CALLS`, with what the process says went wrong; or it did not answer.
        """
        try:
            answer = self.header("was not loaded" if kind == "not-loaded" else "did not return")
            if "failed" in answer:
                said = answer.get("kind")
                raised = Failed(said if kind == "raised" and said in OF_CALLS else kind, str(answer["failed"]))
                raised.traceback = printable_lines(str(answer.get("traceback") or ""))
                raise raised
        except Failed as failed:
            failed.printed = self.printed
            raise
        self._asked = False
        return answer

    def _room_for(self, size: int) -> dict[str, int]:
        """Sees to it that the memory is large enough; what a request says of new memory."""
        if self._shared is not None and self._shared.size >= size:
            return {}
        if self._shared is not None:
            self._shared.close()
        self._shared = SharedMemory(2 * size)
        return {"memory": self._shared.size}


@dataclass(frozen=True)
class Launch:
    """How a submission is started: as often as somebody asks, each time in a process of its own.

    Attributes:
        server: that it is forked from, or that has one that waits for a known kernel.
        request: the submission, as `Submission.on_disk` describes it.
    """

    server: Server
    request: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]
    device: str
    limits: RunLimits

    def start(self) -> SubmissionProcess:
        process = self.begin()
        try:
            process.loaded()
        except BaseException:
            process.close()
            raise
        return process

    def begin(self) -> SubmissionProcess:
        """A process that loads the submission meanwhile: `SubmissionProcess.loaded` waits for it."""
        names = {"inputs": list(self.inputs), "outputs": list(self.outputs)}
        limits = {"memory_bytes": self.limits.memory_bytes}
        told = {"submission": dict(self.request), "device": self.device, **names, **limits}
        library = library_of(self.request)
        idle = self.server.take(library, self.device)
        if idle is not None:
            with contextlib.suppress(Failed):  # it ended while it waited
                again = SubmissionProcess(self.server, self.limits, (idle.pipe, idle.pid))
                again.ask(AWAKE, self.limits.call, "raised")
                return again.loading(told, idle.libraries | {library})
        return SubmissionProcess(self.server, self.limits).loading(told, frozenset({library} - {""}))


def returned_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    returned = answer.get("returned")
    return returned if isinstance(returned, dict) else {}


def tampered_of(answer: Mapping[str, Any]) -> list[str]:
    """The functions that a process says were replaced in it.

    Raises:
        Failed: it says so in no list.
    """
    names = answer.get("tampered") or []
    if not isinstance(names, list):
        raise Failed("protocol", "its process answered no list of replaced functions")
    return [printable(str(name)) for name in names]


def times_of(answer: Mapping[str, Any], repeats: int) -> list[dict[str, float]]:
    """The times of some calls. They come from untrusted code, so only positive numbers are accepted.

    Raises:
        Failed: they are none, or not as many as there were calls.
    """
    times = answer.get("times")
    try:
        found = [{str(name): float(value) for name, value in call.items()} for call in times or []]
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise Failed("protocol", "its process answered values that are not times") from error
    right = all(0 < call.get("total", 0) < float("inf") and call.get("ahead") in (0, 1) for call in found)
    if len(found) != repeats or not right:
        raise Failed("protocol", f"its process answered {len(found)} times of {repeats}, or one that is not positive")
    return found
