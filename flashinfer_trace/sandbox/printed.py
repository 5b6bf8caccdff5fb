"""Reads the output of a process during the wait for it, so the process never blocks. Only the end is kept."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from flashinfer_trace.sandbox.limits import MAX_TEXT, printable_lines

#: Bytes that are read at once.
CHUNK = 1 << 16
#: Bytes that are read of a process that has ended: a pipe holds 64 KiB, and what it started may print on.
MOST_LEFT = 1 << 20


class Printed:
    """A pipe for a process's standard output and error. Its text is passed on to those of this process.

    Attributes:
        theirs: the end that the process gets; it is to be closed here once it was sent.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._tail = b""

    def wait(self, pipe: socket.socket, seconds: float) -> None:
        """Reads what is printed until something else comes through `pipe`, or for so many seconds."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if self._ours >= 0:
            poll.register(self._ours, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = [number for number, _ in poll.poll(1000 * left)]
            if self._ours in ready and not self.read():
                poll.unregister(self._ours)
            if pipe.fileno() in ready:
                return

    def read(self) -> bool:
        """Reads what has been printed; whether more may come."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._ours, CHUNK) if self._ours >= 0 else b""
            self._tail = (self._tail + data)[-2 * MAX_TEXT :]
            with contextlib.suppress(OSError):
                os.write(2, data)
            return bool(data)
        return True

    @property
    def text(self) -> str:
        """The end of what was printed, as far as it was read."""
        return printable_lines(self._tail.decode(errors="replace"))

    def close_theirs(self) -> None:
        """Closes the process's end here: reading then ends when the process does."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def close(self) -> None:
        """Reads what is left, at most so much as a pipe holds, and closes it."""
        self.close_theirs()
        if self._ours >= 0:
            for _ in range(MOST_LEFT // CHUNK):
                if not select.select([self._ours], [], [], 0)[0] or not self.read():
                    break
            os.close(self._ours)
            self._ours = -1
