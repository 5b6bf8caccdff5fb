"""Runs references in a process of their own: time, memory and output are limited, and only tensors cross.

    with ReferenceWorker() as worker:
        outputs = worker.run(definition, inputs, seed)

A process serves one reference, at any sizes: Definitions of a family differ in the constants of their references only.
It is replaced when another reference comes, or when it died, hung or answered nonsense: no reference meets another.
Processes are forked from one that has imported torch (`zygote`), so that each costs
milliseconds.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from flashinfer_trace.allow_list import allowed
from flashinfer_trace.definition import Definition
from flashinfer_trace.isolation import protocol
from flashinfer_trace.isolation.confine import STRONGEST
from flashinfer_trace.isolation.limits import Budget, Limits, ReferenceFailed
from flashinfer_trace.isolation.processes import Start, Zygote, available
from flashinfer_trace.reference import check_allowed, substitute_constants

__all__ = ["Limits", "ReferenceFailed", "ReferenceWorker", "reference_worker"]

#: Longest header of an answer, in bytes.
MAX_ANSWER = 64 << 10


#: Kinds of failure that a worker itself may report.
_REPORTED = ("not-loaded", "raised", "memory", "output", "random", "state", "inputs", "outputs", "memory-shared")


class ReferenceWorker:
    """Runs references in worker processes. Not for several threads at once.

    Args:
        limits: of each process and call.
        start: how the process that others are forked from comes to be (see `processes.Zygote`).

    Attributes:
        limits: of each process and call.
        level: what confines the processes, a key of `confine.LEVELS`; empty before the first call.
    """

    def __init__(self, limits: Limits | None = None, start: Start = "spawn") -> None:
        self.limits = limits or Limits()
        self.level = ""
        self._start: Start = start
        self._zygote = Zygote(start) if start == "fork" else None  # a fork is of this process as it is now
        self._pipe: socket.socket | None = None
        self._pid = 0
        self._serves: tuple[str, bool] | None = None
        self._started_for: tuple[str, bool] | None = None
        self._budget: Budget | None = None

    def __enter__(self) -> ReferenceWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes; a later `run` starts new ones."""
        self._drop()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    @contextmanager
    def within(self, budget: Budget | None) -> Iterator[None]:
        """Calls in this block take their time from a budget, and are ended when it is spent."""
        before, self._budget = self._budget, budget
        try:
            yield
        finally:
            self._budget = before

    def run(self, definition: Definition, inputs: Mapping[str, Any], seed: int, uniform: Any = None) -> dict[str, Any]:
        """Outputs of the embedded reference by name: contiguous tensors on the CPU, or Python numbers.

        Args:
            definition: whose reference runs.
            inputs: every declared input: dense tensors on the CPU (strides are kept), or Python numbers.
            seed: of torch's global generator, for operations that draw.
            uniform: a tensor of numbers that torch.rand returns instead, in the shape and dtype that it is asked for.

        Raises:
            ReferenceFailed: there are no outputs, or something happened that must not; the next call is not affected
                unless the time of a budget is spent (see `within`).
            InputError: the number of outputs is not the declared one.
        """
        given = [inputs[name] for name in definition.inputs] + ([] if uniform is None else [uniform])
        values = [protocol.describe_value(value, strided=True) for value in given]
        self._serve(definition)
        draws = definition.op_type in allowed.DRAWING_OP_TYPES
        header = {
            **{"names": list(definition.inputs), "outputs": list(definition.outputs)},
            **{"values": [described for described, _ in values], "seed": seed, "draws": draws},
        }
        budget = self._budget
        try:
            with nullcontext() if budget is None else budget.spending():
                deadline = time.monotonic() + min(self.limits.seconds, budget.left if budget else math.inf)
                self._check_silence()
                for piece in protocol.in_few_pieces([protocol.pack_header(header), *(data for _, data in values)]):
                    self._send(piece, deadline)
                outputs = self._receive(deadline)
        except BaseException as error:
            # An exception of the reference is a whole answer; after all else, Ctrl-C too, half of one may be under way.
            kind = error.kind if isinstance(error, ReferenceFailed) else ""
            if kind != "raised":
                self._drop()
            if kind == "timed-out" and budget is not None and budget.left <= 0:
                raise budget.spent() from error
            raise
        return definition.name_outputs(tuple(outputs))

    def _serve(self, definition: Definition) -> None:
        """Sees to it that the process at hand serves this reference."""
        draws = definition.op_type in allowed.DRAWING_OP_TYPES
        serves = (definition.reference, draws)
        if self._pipe is not None and self._serves == serves:
            return
        try:
            check_allowed(definition.reference, definition.name, definition.op_type)
        except ValueError as error:
            self._drop()
            raise ReferenceFailed("refused", str(error)) from error
        any_size = substitute_constants(definition.reference, dict.fromkeys(definition.const_axes, 0), definition.name)
        deadline = time.monotonic() + self.limits.seconds
        try:
            if self._pipe is None or self._started_for != (any_size, draws):
                self._begin(deadline)
            request = {"source": definition.reference, "label": definition.name}
            self._send(protocol.pack_header(request), deadline)
        except BaseException:
            self._drop()
            raise
        self._serves, self._started_for = serves, (any_size, draws)

    def _begin(self, deadline: float) -> None:
        """Starts a process, after ending the one at hand."""
        self._drop()
        self._zygote = self._zygote or Zygote(self._start)
        limits = self.limits
        self._pipe, self._pid = self._zygote.fork(limits.memory_bytes, limits.output_bytes, limits.threads)
        self.level = str(protocol.read_header(self._reader(deadline), MAX_ANSWER)["level"])

    def _drop(self, *, reap: bool = False) -> int:
        """Ends the process at hand; the status that it ended with, or -1 if it was ended here."""
        pipe, self._pipe, self._serves = self._pipe, None, None
        if pipe is None:
            return -1
        pipe.close()
        assert self._zygote is not None
        try:
            return self._zygote.end(self._pid, reap=reap)
        except (OSError, RuntimeError):  # it was ended from outside; the next call starts another
            zygote, self._zygote = self._zygote, None
            zygote.close()
            return -1

    # Messages

    def _check_silence(self) -> None:
        """A worker speaks only when asked: bytes that wait already are not an answer to what comes now."""
        assert self._pipe is not None
        if select.select([self._pipe], [], [], 0)[0]:
            if self._pipe.recv(1, socket.MSG_PEEK):
                raise ReferenceFailed("protocol", "the reference's process sent bytes that nobody asked for")
            raise self._death()

    def _send(self, data: bytes | memoryview, deadline: float) -> None:
        assert self._pipe is not None
        self._pipe.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            self._pipe.sendall(data)
        except TimeoutError as error:
            raise self._timeout() from error
        except OSError as error:
            raise self._death() from error

    def _receive(self, deadline: float) -> list[Any]:
        read = self._reader(deadline)
        try:
            answer = protocol.read_header(read, MAX_ANSWER)
            if "failed" in answer:
                raise _reported(answer["failed"])
            return protocol.read_values(answer.get("values"), read, self.limits.output_bytes)
        except protocol.ProtocolError as error:
            raise ReferenceFailed("protocol", f"the reference's process answered {error}") from error

    def _reader(self, deadline: float) -> protocol.Read:
        pipe = self._pipe
        assert pipe is not None

        def read(target: memoryview) -> None:
            while target:
                pipe.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    count = pipe.recv_into(target)
                except TimeoutError as error:
                    raise self._timeout() from error
                except OSError as error:
                    raise self._death() from error
                if count == 0:
                    raise self._death()
                target = target[count:]

        return read

    def _timeout(self) -> ReferenceFailed:
        return ReferenceFailed("timed-out", f"the reference did not answer within {self.limits.seconds:g} s")

    def _death(self) -> ReferenceFailed:
        """Reaps the process whose pipe is closed, and says how it ended."""
        status = self._drop(reap=True)
        if status == -1:
            how = "closed its pipe"
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = f"was ended by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
        else:
            how = f"ended with exit status {os.WEXITSTATUS(status)}"
        return ReferenceFailed("died", f"the reference's process {how} before it answered")


@contextmanager
def reference_worker(device: str, full: bool) -> Iterator[ReferenceWorker | None]:
    """The worker for a run of `flashinfer-trace verify`, forked from this process as it is now; none on a GPU.

    A warning on standard error says so where a platform cannot isolate references, or not fully.
    """
    if device != "cpu":
        yield None
        return
    if not available():
        print("warning: this platform cannot isolate references; they run in this process", file=sys.stderr)
        yield None
        return
    limits = Limits(600.0, 1 << 40, 64 << 30, os.cpu_count() or 1, 100.0) if full else Limits()
    with ReferenceWorker(limits, "fork") as worker:
        yield worker
        if worker.level not in ("", STRONGEST):
            print(f"warning: references were isolated by {worker.level} only; see SECURITY.md", file=sys.stderr)


def _reported(failed: Any) -> ReferenceFailed:
    """The failure that a worker reports, if it has the form of one."""
    if isinstance(failed, list) and len(failed) == 2 and failed[0] in _REPORTED and isinstance(failed[1], str):
        error = failed[1].partition(":")[0] if failed[0] == "raised" else ""
        return ReferenceFailed(failed[0], f"the reference failed: {failed[1]}", error)
    return ReferenceFailed("protocol", "the reference's process answered a failure of no known form")
