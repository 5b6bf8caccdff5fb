"""Shared by all commands: one line per error, JSON on standard output even after an error, and exit statuses."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from flashinfer_trace.dataset.store import DatasetError
from flashinfer_trace.format.json_values import finite
from flashinfer_trace.judging.user_inputs import out_of_memory

#: Exit statuses. 0 means success, and click exits with 2 for wrong usage. NO_MEMORY: this program ran out of memory,
#: and not a kernel that it judges.
FAILED = 1
NOTHING_VERIFIED = 3
NOT_JUDGED = 4
NO_MEMORY = 5
INTERRUPTED = 130
#: Characters of an error message.
LONGEST_LINE = 2000


class NotJudged(click.ClickException):
    """A kernel was not judged."""

    exit_code = NOT_JUDGED


class OutOfMemory(click.ClickException):
    """The command itself ran out of memory, be it a GPU's."""

    exit_code = NO_MEMORY

    def __init__(self, error: Exception) -> None:
        told = f"{type(error).__name__}: {message(error)}".partition("\n")[0]
        super().__init__(
            f"flashinfer-trace itself ran out of memory ({told.rstrip(': ')}); this says nothing about a kernel"
        )


class CommandGroup(click.Group):
    """Turns errors in data into one line, with ``{"error": ...}`` on standard output if JSON was requested."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parses the options before the command; `--help` and `--version` print at once."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except OSError as error:
            if error.errno == errno.EPIPE:  # click exits quietly
                raise
            _discard_output()
            raise click.ClickException(message(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands with the first sentence of each help, which is wrapped, not cut."""
        rows = [(name, command.get_short_help_str(limit=500)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Also records whether the command must print JSON: an error may occur before its options are parsed."""
        pairs = zip(args, [*args[1:], ""], strict=True)
        ctx.meta["json"] = any(pair == ("--format", "json") or pair[0] == "--format=json" for pair in pairs)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            self._reported(ctx, error)
            raise
        except DatasetError as error:
            raise self._reported(ctx, click.UsageError(message(error))) from error
        except Exception as error:
            # click exits quietly if the reader closed the pipe; any other error is a bug in this package.
            bad_data = is_ours(error) or (isinstance(error, OSError) and error.errno != errno.EPIPE)
            if not (bad_data or out_of_memory(error)):
                raise
            _discard_output()
            reported = click.ClickException(message(error)) if bad_data else OutOfMemory(error)
            raise self._reported(ctx, reported) from error
        except KeyboardInterrupt:
            self._reported(ctx, click.ClickException("interrupted"))
            click.echo("\ninterrupted", err=True)
            ctx.exit(INTERRUPTED)

    @staticmethod
    def _reported(ctx: click.Context, error: click.ClickException) -> click.ClickException:
        if ctx.meta.get("json"):
            echo_json({"error": error.format_message()})
        return error


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], int]]:
    """Makes SIGTERM, as a limit of time sends it, an interrupt; yields what tells the exit status after one."""
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()  # where Python handles signals
    before = signal.signal(signal.SIGTERM, interrupt) if here else None
    try:
        yield lambda: 128 + came[0] if came else INTERRUPTED
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _discard_output() -> None:
    """Drops what standard output cannot take, as on a full disk: Python would try again at its end, and say so."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def message(error: Exception) -> str:
    """The text of an error. A line can quote a value of a file, however long that is; it is cut."""
    lines = str(error).split("\n")
    return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in lines)


def is_ours(error: Exception) -> bool:
    """Whether this package defines the error: its message then names the file and the fix."""
    return type(error).__module__.startswith("flashinfer_trace.")


def echo_json(document: object) -> None:
    """Prints the JSON of a command, in a form that every reader accepts: infinities and NaN become null."""
    echo_json_text(json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False))


def echo_json_text(text: str) -> None:
    """Prints the JSON of a command. It remains the only document, even if an error interrupts the printing."""
    click.get_current_context().meta["json"] = False
    click.echo(text)
