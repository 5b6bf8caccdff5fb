"""How a tool's process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

#: Exit status after an interrupt, as of a shell.
INTERRUPTED = 130


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs a command and ends the process with its exit status.

    An interrupt and what the system refuses (a full disk, a missing file) are one line on standard error; a reader that
    has closed the pipe gets nothing more.
    """
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        status = 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        _discard_output()
        status = 1
    sys.exit(status)


def names_its_cause(error: Exception) -> bool:
    """Whether the message of an error is enough for a person: it is the system's, or this project defines its class."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or package in ("benchmarks", "flashinfer_trace", "tools")


def _discard_output() -> None:
    """Otherwise Python writes what is left when it ends, and says that it cannot."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
