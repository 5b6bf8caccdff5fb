"""Makes one hostile file, gives it to the commands of its kind (`sandbox.KINDS`), and says what went wrong: nothing
should.

A case is a group, a seed and a number: these alone determine its content, so one line repeats it.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from click.testing import CliRunner

from tools.fuzz.mutations import ON_DISK, hostile_json, hostile_python, sealed
from tools.fuzz.sandbox import EVERY, KINDS, Command, Kind, Sandbox
from tools.shared.limited_pool import limit_memory

#: Limits of one command for one file: seconds of a processor, and memory beyond what the process had at the start.
SECONDS = 5.0
MEGABYTES = 500
#: One file in so many is a link, a FIFO, a directory, missing, or has a name that is hard to print.
ON_DISK_SHARE = 0.03
#: Longest line that a command may print for a hostile file.
LONGEST_LINE = 5000


@dataclass(frozen=True)
class Case:
    """One hostile file."""

    group: str
    seed: int
    number: int

    @property
    def replay(self) -> str:
        """The command that repeats it."""
        return f"python -m tools.fuzz --seed {self.seed} --replay {self.group}:{self.number}"


@dataclass
class Outcome:
    """The outcome of one hostile file.

    Attributes:
        kind: of the file.
        change: what was done to it.
        commands: how many commands read it.
        refused: how many of them ended with an exit status that is neither 0 nor that for a valid file.
        findings: what must not happen, a line each.
        seconds, megabytes: the most that a command took of a processor; how far the process has grown since its start.
    """

    kind: str
    change: str
    commands: int = 0
    refused: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    megabytes: float = 0.0


_sandbox: Sandbox | None = None
_baseline = 0
#: Command -> its exit status for valid files. It is 1 of tools that compare the small trace with something.
_usual: dict[Command, int] = {}


def peak() -> int:
    """Bytes of memory that this process has used at most."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def start_worker(directory: str, limited: bool = True) -> None:
    """Prepares this process: a dataset of its own, everything imported and run once, then the limit of memory."""
    global _sandbox, _baseline
    warnings.simplefilter("ignore")  # Python warns of odd syntax when it compiles a hostile reference
    os.environ["COLUMNS"] = "200"
    _sandbox = Sandbox(Path(tempfile.mkdtemp(dir=directory)))
    for kinds in KINDS.values():
        for kind in kinds:
            for command in (*kind.commands, *kind.sometimes):
                status, told = run_command(command, _sandbox, _sandbox.bases(kind.name)[0])
                _usual[command] = status
                if status not in ((0,) if command[0] == "cli" else (0, 1)):
                    raise RuntimeError(f"{' '.join(command)} does not work on valid files: {told[-500:]}")
    _baseline = peak()
    if limited:
        limit_memory(MEGABYTES * 10**6)


def kind_of(case: Case) -> Kind:
    """The kind of a case: among as many successive numbers as the shares add up to, each kind has its share."""
    place = (
        case.number * 7919 % sum(kind.share for kind in KINDS[case.group])
    )  # 7919 is prime: the kinds of successive numbers alternate
    for kind in KINDS[case.group]:
        place -= kind.share
        if place < 0:
            return kind
    raise AssertionError(f"{case.group} has no kinds")


def run_case(case: Case) -> Outcome:
    """Makes the file and runs the commands, in a process that `start_worker` has prepared."""
    assert _sandbox is not None
    sandbox, kind = _sandbox, kind_of(case)
    source = random.Random(f"{case.group}:{case.seed}:{case.number}")
    path = source.choice(sandbox.bases(kind.name))
    content = path.read_bytes()
    if source.random() < ON_DISK_SHARE:
        change = source.choice(ON_DISK)
        change(source, path)
        outcome = Outcome(kind.name, change.__name__)
    else:
        made = hostile_python if path.suffix == ".py" else hostile_json
        told, hostile = made(source, content)
        if kind.sealed and source.random() < 0.5:
            hostile = sealed(hostile)
        path.write_bytes(hostile)
        outcome = Outcome(kind.name, told)
    commands = list(kind.commands)
    if kind.sometimes and source.randrange(EVERY) == 0:
        commands += kind.sometimes
    try:
        for command in commands:
            judge(command, sandbox, path, outcome)
    finally:
        if path.is_file() and not path.is_symlink() and outcome.change != "oddly_named":
            path.write_bytes(content)
        else:
            sandbox.restore()
    outcome.megabytes = max(0, peak() - _baseline) / 1e6
    return outcome


def judge(command: Command, sandbox: Sandbox, path: Path, outcome: Outcome) -> None:
    """Runs one command and adds what must not happen to the outcome."""
    line = " ".join(command)
    before = time.process_time()
    try:
        status, told = run_command(command, sandbox, path)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        outcome.findings.append(f"{line}: traceback: {type(error).__name__} at {where}: {str(error)[:200]}")
        status, told = -1, ""
    seconds = time.process_time() - before
    outcome.commands += 1
    outcome.refused += status not in (0, _usual.get(command))
    outcome.seconds = max(outcome.seconds, seconds)
    if seconds > SECONDS:
        outcome.findings.append(f"{line}: took {seconds:.1f} s")
    if "Traceback (most recent" in told:
        outcome.findings.append(f"{line}: prints a traceback: {told[-200:]!r}")
    longest = max(map(len, told.splitlines()), default=0)
    if longest > LONGEST_LINE and "show" not in command:  # which prints what the file holds, however long
        outcome.findings.append(f"{line}: prints a line of {longest} characters")


def run_command(command: Command, sandbox: Sandbox, path: Path) -> tuple[int, str]:
    """Exit status and output of a command in this process."""
    arguments = sandbox.arguments(command, path)
    if command[0] == "cli":
        from flashinfer_trace.cli import main

        result = CliRunner().invoke(main, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output
    content = io.BytesIO()
    # As Python opens them in a UTF-8 locale: bytes that are not text cannot be printed, but can be part of an error.
    told = io.TextIOWrapper(content, encoding="utf-8", write_through=True)
    errors = io.TextIOWrapper(content, encoding="utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(errors):
        status = tool(command[0], arguments)
    return status, content.getvalue().decode("utf-8")


def tool(name: str, arguments: Sequence[str]) -> int:
    """Exit status of a tool."""
    from flashinfer_trace.judging.bench import results
    from tools import traffic_statistics
    from tools.extract.__main__ import main as extract
    from tools.trace.__main__ import main as trace

    def times(given: list[str]) -> int:
        return _read(lambda: list(results.read(Path(given[0]))), results.ResultsError)

    mains: dict[str, Callable[[list[str]], int]] = {
        "extract": extract,
        "statistics": traffic_statistics.main,
        "times": times,
        "trace": trace,
    }
    return mains[name](list(arguments))


def _read(reader: Callable[[], object], error: type[Exception]) -> int:
    """Exit status of a command whose reader alone is called: all else of it needs sources, or a GPU."""
    try:
        reader()
    except error as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0
