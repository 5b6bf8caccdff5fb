"""The limits of a reference, for one call and for all of its cases together, and the errors of confined processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Longest text of a stranger that is shown, in characters.
MAX_MESSAGE = 2000
#: The same of several lines: a traceback, or the end of what it printed.
MAX_TEXT = 4000


def printable(text: str) -> str:
    """Untrusted text, in one line that a terminal can show."""
    line = " ".join(text[:MAX_MESSAGE].split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def printable_lines(text: str) -> str:
    """The end of what a stranger wrote in several lines, as a terminal can show it."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text.strip("\n")[-MAX_TEXT:])


@dataclass(frozen=True)
class ReferenceLimits:
    """The limits of one worker process.

    Attributes:
        seconds: for one call, from sending its inputs to reading its outputs.
        memory_bytes: address space beyond what an idle worker has; inputs, outputs and all between count.
        output_bytes: of all outputs of one call together.
        threads: that torch computes with.
        case_seconds: for all calls of a run together, times the number of its cases. Honest references take 0.06 s a
            case at most on a CPU; on an H200 that eight processes share, a Definition took 1.6 s a case at most, its
            kernels and their compilation included.
    """

    seconds: float = 120.0
    memory_bytes: int = 8 << 30
    output_bytes: int = 2 << 30
    threads: int = 1
    case_seconds: float = 20.0


class Failed(Exception):
    """The code in a confined process gave no outputs.

    Attributes:
        kind: of a submission ``not-loaded``, ``raised``, ``outputs``, ``tampered``, ``timed-out``, ``died`` or
            ``protocol``.
        message: what happened, in one line of printable characters.
        error: of the kind ``raised``, the name of the type of exception, if the process tells it.
        traceback: the lines of its code that an error came through, if the process tells them.
        printed: the end of what it printed.
    """

    def __init__(self, kind: str, message: str, error: str = "") -> None:
        self.kind, self.message, self.error = kind, printable(message), error
        self.traceback = self.printed = ""
        super().__init__(kind, self.message)

    def __str__(self) -> str:
        return self.message


class ReferenceFailed(Failed):
    """A reference did not give outputs that can be judged.

    Its kinds are ``refused`` (by the allow-list), ``not-loaded``, ``raised``, ``timed-out``, ``too-slow``, ``memory``,
    ``output``, ``died``, ``protocol``, ``random``, ``state``, ``inputs``, ``outputs`` or ``memory-shared``.
    """

    def __str__(self) -> str:
        return f"{self.message} [{self.kind}]"


class Budget:
    """The time that a reference has for all cases of one run together.

    Without it, one that takes a little less than it may in each call would hold whoever runs it for an hour.

    Attributes:
        left: seconds.
    """

    def __init__(self, definition: str, cases: int, limits: ReferenceLimits) -> None:
        """`definition` is its name, `cases` the number of corners and of cases that are to be drawn."""
        self._definition, self._cases, self._each = definition, cases, limits.case_seconds
        self.left = cases * limits.case_seconds

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of a block.

        Raises:
            ReferenceFailed: there was none left before it.
        """
        if self.left <= 0:
            raise self.spent()
        started = time.monotonic()
        try:
            yield
        finally:
            self.left -= time.monotonic() - started

    def spent(self) -> ReferenceFailed:
        return ReferenceFailed(
            "too-slow",
            f"{self._definition}: its reference took all of the {self._cases * self._each:g} s that it has for "
            f"{self._cases} cases, {self._each:g} s each; compute with whole tensors instead of loops, or have the "
            f"family's plans draw smaller cases",
        )
