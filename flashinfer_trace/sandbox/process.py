"""One confined process and the pipe to it: it speaks only when asked, and every way not to answer has a name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flashinfer_trace.sandbox import protocol
from flashinfer_trace.sandbox.fork_server import ForkServer, ServerEnded
from flashinfer_trace.sandbox.limits import Failed

#: Longest header of an answer, in bytes.
MAX_ANSWER = 64 << 10


class ConfinedProcess:
    """A process of a fork server. Not for several threads at once. After a failure, a new one is needed.

    Every method raises `failure` (a `Failed`) once it has ended, says something unasked, or does not answer in time.

    Attributes:
        who: runs in it, for messages.
        failure: the class of the errors.
    """

    who = "its"
    failure: type[Failed] = Failed

    def __init__(self, server: ForkServer, forked: tuple[socket.socket, int] | None = None) -> None:
        try:
            self._pipe, self._pid = forked or server.begin()
        except ServerEnded as error:
            raise self.failure("died", "the process that it is forked from was ended") from error
        if self._pid <= 1:  # os.killpg(0) and os.killpg(1) mean other processes than ours
            raise self.failure("protocol", f"{self._pid} is not a process of its own")
        self._server = server
        self._ended = self._stopped = False
        self._seconds = self._deadline = 0.0

    def begin_request(self, seconds: float) -> None:
        """Grants time for a request and its answer, and has a stopped process go on."""
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        with self.failures():
            self._pipe.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if self._pipe.recv(1, socket.MSG_PEEK):
                    raise self.failure("protocol", f"{self.who} process sent bytes that nobody asked for")
                raise self._death()
            if self._stopped:
                self._signal(signal.SIGCONT)
                self._stopped = False

    def send(self, pieces: Sequence[bytes | memoryview], descriptors: Sequence[int] = ()) -> None:
        """Sends a message, and open files after it."""
        with self.failures():
            for piece in pieces:
                self._pipe.settimeout(self._left())
                self._pipe.sendall(piece)
            if descriptors:
                socket.send_fds(self._pipe, [b"A"], descriptors)

    def read(self, target: memoryview) -> None:
        """Fills memory with the next bytes: a `protocol.Read`. Errors are those of the pipe; see `failures`."""
        while target:
            self._pipe.settimeout(self._left())
            count = self._pipe.recv_into(target)
            if count == 0:
                raise self._death()
            target = target[count:]

    def header(self, late: str = "did not answer") -> dict[str, Any]:
        """The header of the answer; `late` says what the process did not do in time."""
        with self.failures(late):
            return protocol.read_header(self.read, MAX_ANSWER)

    @contextmanager
    def failures(self, late: str = "did not answer") -> Iterator[None]:
        """Errors of the pipe as failures of what runs there; `late` says what it did not do in time."""
        try:
            yield
        except TimeoutError as error:
            self.end()
            subject = "it" if self.who == "its" else self.who.removesuffix("'s")
            raise self.failure("timed-out", f"{subject} {late} within {self._seconds:g} s") from error
        except protocol.ProtocolError as error:
            raise self.failure("protocol", f"{self.who} process answered {error}") from error
        except OSError as error:
            raise self._death() from error

    def stop(self) -> None:
        """Stops all of its threads until the next request."""
        with self.failures():
            self._signal(signal.SIGSTOP)
        self._stopped = True

    def end(self, *, reap: bool = False) -> int:
        """Ends it, and what it started: the status that it ended with, or -1 if it was ended here or before."""
        if self._ended:
            return -1
        self._ended = True
        self._pipe.close()
        try:
            return self._server.end(self._pid, reap=reap)
        except ServerEnded:
            return -1

    def _signal(self, number: int) -> None:
        """Signals it, and what it started. Its id stays its own until the server is told to end it."""
        if self._ended or not self._server.alive:
            raise ProcessLookupError
        os.killpg(self._pid, number)

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 1e-3)

    def _death(self) -> Failed:
        status = self.end(reap=True)
        if status == -1:
            how = "closed its pipe"
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = f"was ended by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
        else:
            how = f"ended with exit status {os.WEXITSTATUS(status)}"
        return self.failure("died", f"{self.who} process {how} before it answered")
