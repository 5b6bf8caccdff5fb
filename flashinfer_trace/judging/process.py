"""A submission's process as the judge sees it: it is given inputs, and what it leaves in the shared memory is read.

with Server() as server, server.start(submission, definition, "cpu", Limits()) as process:
    answer = process.call(inputs, poisoned, seed=0)
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from flashinfer_trace.isolation import protocol
from flashinfer_trace.judging import server
from flashinfer_trace.judging.answers import (
    OF_CALLS,
    Answer,
    Failed,
    Limits,
    Timed,
    Timing,
    returned_of,
    tampered_of,
    times_of,
)
from flashinfer_trace.judging.arena import Arena, Filled
from flashinfer_trace.judging.idle import Idle, Waiting, has_room, library_of
from flashinfer_trace.judging.spawning import available, forked, spawned
from flashinfer_trace.judging.submission import SubmissionError

__all__ = ["Answer", "Failed", "Limits", "Server", "SubmissionProcess", "Timed", "Timing"]

#: Seconds that it may take to import torch, on a busy machine with cold disks.
START_SECONDS = 300.0

#: Longest header of an answer, in bytes.
MAX_ANSWER = 64 << 10

#: Asks a process whether it is there, and has it give back its memory.
AWAKE, REST = {"awake": True}, {"rest": True}


class Server:
    """The process that submissions' processes are forked from.

    One that ran known kernels, and failed in nothing, waits for the next known kernel while half of the memory of its
    GPU is free: importing the libraries of kernels takes seconds, and no kernel of the dataset's own records has to be
    kept from what came before it. Anybody else's kernel has a process of its own.

    Args:
        fork: copy this process, which takes milliseconds and must have one thread, and not have touched CUDA; otherwise
            a new interpreter is started, which takes a second or two.
        kernel: a callable of this process that the forked ones are to run; needs `fork`.

    Attributes:
        alive: whether it was still there when it was last asked for something.
        keeps_apart: whether the system keeps its processes from the memory of this one (see `domain`).
    """

    def __init__(self, fork: bool = False, kernel: object | None = None) -> None:
        if not available():
            raise SubmissionError("the judge needs os.fork and Unix sockets, which this platform has not")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = None if fork else spawned(theirs)
            self._pid = self._process.pid if self._process is not None else forked(theirs, kernel)
        ours.settimeout(START_SECONDS)
        self._control = ours
        self.alive = True
        self._waiting = Waiting()
        try:
            self.keeps_apart = bool(self._reply())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self, request: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str], device: str, limits: Limits
    ) -> SubmissionProcess:
        """A new process with a submission loaded.

        Raises:
            Failed: it could not be loaded, or an earlier one ended this server.
        """
        process = self.begin(request, inputs, outputs, device, limits)
        try:
            process.loaded()
        except BaseException:
            process.close()
            raise
        return process

    def begin(
        self, request: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str], device: str, limits: Limits
    ) -> SubmissionProcess:
        """A new process that loads a submission meanwhile: `SubmissionProcess.loaded` waits for it.

        Raises:
            Failed: an earlier one ended this server.
        """
        names = {"inputs": list(inputs), "outputs": list(outputs)}
        told = {"submission": dict(request), "device": device, **names}
        library = library_of(request)
        idle = self._waiting.take(library, device)
        if idle is not None:
            with contextlib.suppress(Failed):  # it ended while it waited
                again = SubmissionProcess(self, idle.pipe, idle.pid, limits)
                again.ask(AWAKE, limits.call, "raised")
                return again.started(told, idle.libraries | {library})
        return self._forked(limits).started(told, frozenset({library} - {""}))

    def keep(self, idle: Idle) -> None:
        """Has a process wait for the next known kernel."""
        self._waiting.keep(idle)

    def _forked(self, limits: Limits) -> SubmissionProcess:
        """A new process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [server.COMMAND.pack(server.FORK, 0)], [theirs.fileno()])
                return SubmissionProcess(self, ours, self._reply(), limits)
        except (OSError, RuntimeError) as error:
            self.alive = False
            ours.close()
            raise Failed("died", "the process that submissions are forked from was ended") from error

    def end(self, pid: int, *, reap: bool) -> int:
        """Ends a process: its status as `os.waitpid` gives it, or -1 if this call ended it or it is out of reach."""
        try:
            self._control.sendall(server.COMMAND.pack(server.REAP if reap else server.KILL, pid))
            return self._reply()
        except (OSError, RuntimeError):
            self.alive = False
            return -1

    def close(self) -> None:
        """Ends all processes."""
        self._waiting.close()
        self._control.close()
        if self._process is not None:
            self._process.wait(timeout=30)
        else:
            os.waitpid(self._pid, 0)

    def _reply(self) -> int:
        data = self._control.recv(server.REPLY.size)
        if len(data) < server.REPLY.size:
            raise RuntimeError("the process that submissions are forked from has ended")
        (value,) = server.REPLY.unpack(data)
        return int(value)


class SubmissionProcess:
    """One process with one submission: a context manager that ends it. After `Failed`, a new one is needed.

    After a call it is stopped until the next one: what its threads would do then comes too late to be seen, and would
    take time from other kernels.
    """

    def __init__(self, server_: Server, pipe: socket.socket, pid: int, limits: Limits) -> None:
        self._server, self._pipe, self._pid, self._limits = server_, pipe, pid, limits
        self._arena: Arena | None = None
        self._calls = 0
        self._ended = False
        self._asked = self._stopped = False
        self._device, self._libraries = "", frozenset[str]()
        self._seconds = self._deadline = 0.0

    def __enter__(self) -> SubmissionProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def started(self, told: Mapping[str, Any], libraries: frozenset[str]) -> SubmissionProcess:
        """Tells the process what to load, and returns this object.

        Args:
            told: what, and for which device.
            libraries: that it will have imported; none if it runs anybody else's kernel, and is not used again.

        Raises:
            Failed: it has ended.
        """
        self._device, self._libraries = str(told["device"]), libraries
        try:
            self.tell(told, self._limits.load)
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
                    self._server.keep(Idle(self._pipe, self._pid, self._device, self._libraries))
        self.end()

    def end(self) -> None:
        """Ends the process, and what it started."""
        self._end(reap=False)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def call(self, inputs: Mapping[str, Any], poisoned: Mapping[str, torch.Tensor], seed: int) -> Answer:
        """Calls the submission on copies of the inputs.

        Args:
            inputs: tensors on any device, and numbers.
            poisoned: of each output, what its memory holds before the call.
            seed: of torch's generators in the process.

        Raises:
            Failed: it raised, took too long, or its process ended.
        """
        filled, request = self._filled(inputs, poisoned, seed, 0)
        seconds = self._limits.call if self._calls else self._limits.first_call
        self._calls += 1
        answer = self.ask(request, seconds, "raised")
        self.pause()
        return Answer(filled.outputs(), returned_of(answer), filled.changed(), filled.outside(), tampered_of(answer))

    def timed(
        self, inputs: Mapping[str, Any], poisoned: Mapping[str, torch.Tensor], seed: int, timing: Timing
    ) -> Timed:
        """Calls the submission several times on the same inputs, after a `call` or series with others like them.

        Args:
            inputs, poisoned, seed: as `call` takes them.
            timing: how.

        Raises:
            Failed: it raised, took too long, or its process ended.
        """
        filled, request = self._filled(inputs, poisoned, seed, timing.repeats)
        hidden = filled.hide()
        self.ask({**request, "timing": asdict(timing)}, self._limits.first_call, "raised")
        started = time.perf_counter()
        self.ask({"go": True, **hidden}, self._limits.call * timing.repeats, "raised")
        outside = time.perf_counter() - started
        answer = self.ask({"collect": True}, self._limits.call, "raised")
        self.pause()
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
        new_arena = self._room_for(filled.size + copies * (filled.size - filled.first))
        assert self._arena is not None
        filled.fill(self._arena.memory)
        slots = {name: slot.to_json() for name, slot in filled.slots.items()}
        return filled, {"size": filled.size, "slots": slots, "numbers": numbers, "seed": seed, **new_arena}

    def loaded(self) -> None:
        """Waits until the submission is loaded.

        Raises:
            Failed: it could not be.
        """
        self.answer("not-loaded")

    def pause(self) -> None:
        """Stops all threads of the submission until it is told something.

        Raises:
            Failed: it has ended.
        """
        with self._failures():
            os.killpg(self._pid, signal.SIGSTOP)
        self._stopped = True

    def ask(self, request: Mapping[str, Any], seconds: float, kind: str) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            Failed: of `kind`, with what the process says went wrong; or it did not answer.
        """
        self.tell(request, seconds)
        return self.answer(kind)

    def tell(self, request: Mapping[str, Any], seconds: float) -> None:
        """Sends a request, which the process must answer within so many seconds from now.

        Raises:
            Failed: it has ended, or does not read.
        """
        if select.select([self._pipe], [], [], 0)[0] and self._pipe.recv(1, socket.MSG_PEEK):
            raise Failed("protocol", "its process sent an answer that nobody had asked for")
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._asked = True
        with self._failures():
            if self._stopped:
                os.killpg(self._pid, signal.SIGCONT)
                self._stopped = False
            self._pipe.settimeout(seconds)
            self._pipe.sendall(protocol.pack_header(request))
            if "arena" in request:
                assert self._arena is not None
                socket.send_fds(self._pipe, [b"A"], [self._arena.descriptor])

    def answer(self, kind: str) -> dict[str, Any]:
        """Waits for the answer to the last request.

        Raises:
            Failed: of `kind`, or of one in `OF_CALLS`, with what the process says went wrong; or it did not answer.
        """
        with self._failures("was not loaded" if kind == "not-loaded" else "did not return"):
            answer = protocol.read_header(self._read, MAX_ANSWER)
        if "failed" in answer:
            said = answer.get("kind")
            raise Failed(said if kind == "raised" and said in OF_CALLS else kind, str(answer["failed"]))
        self._asked = False
        return answer

    @contextmanager
    def _failures(self, late: str = "did not return") -> Iterator[None]:
        """Errors of the pipe as failures of the submission; `late` is what it did not do in time."""
        try:
            yield
        except TimeoutError as error:
            raise self._timeout(late) from error
        except protocol.ProtocolError as error:
            raise Failed("protocol", f"its process answered {error}") from error
        except OSError as error:
            raise self._death() from error

    def _room_for(self, size: int) -> dict[str, int]:
        """Sees to it that the memory is large enough; what a request says of new memory."""
        if self._arena is not None and self._arena.size >= size:
            return {}
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena(2 * size)
        return {"arena": self._arena.size}

    def _read(self, target: memoryview) -> None:
        while target:
            self._pipe.settimeout(max(self._deadline - time.monotonic(), 1e-3))
            count = self._pipe.recv_into(target)
            if count == 0:
                raise self._death()
            target = target[count:]

    def _timeout(self, late: str) -> Failed:
        self._end(reap=False)
        return Failed("timed-out", f"it {late} within {self._seconds:g} s")

    def _death(self) -> Failed:
        status = self._end(reap=True)
        if status == -1:
            how = "closed its pipe"
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = f"was ended by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
        else:
            how = f"ended with exit status {os.WEXITSTATUS(status)}"
        return Failed("died", f"its process {how} before it answered")

    def _end(self, *, reap: bool) -> int:
        if self._ended:
            return -1
        self._ended = True
        self._pipe.close()
        return self._server.end(self._pid, reap=reap)
