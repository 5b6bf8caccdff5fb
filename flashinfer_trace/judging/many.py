"""Judges many submissions, one JSON line each: what is asked for, what was found before, and what all of it says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset import store
from flashinfer_trace.format.json_values import finite
from flashinfer_trace.judging.submission import (
    RunLimits,
    Submission,
    SubmissionError,
    from_path,
    from_solution,
    from_source,
)

#: Fields that a line of the submissions may have; and the kernel fields: it needs exactly one of these.
FIELDS = ("id", "definition", "function", "file", "source", "solution")
KERNELS = ("file", "source", "solution")
#: Of pass@k, and of fast_p: the least ratio of the fastest real kernel's time to that of a submission.
PASS_AT, FAST = (1, 2, 5, 10, 20, 50, 100), (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
#: Longest text of a submission, in characters.
LONGEST = 4 << 20


class ManyError(ValueError):
    """A file of submissions or of verdicts that cannot be used. The message names the file, the line and the fix."""


@dataclass(frozen=True)
class Task:
    """One submission.

    Attributes:
        line: in the file of submissions, from 1.
        name: its ``id``, or its file; for people.
        definition: name; empty if only the Solution says it.
        sha256: of its code and the name of its function.
        file, source, solution, function: where its code is: one of the first three. Sources travel to other machines.
    """

    line: int
    name: str
    definition: str
    sha256: str
    file: str = ""
    source: str = ""
    solution: str = ""
    function: str | None = None

    @property
    def key(self) -> tuple[int, str, str]:
        """Tells tasks apart. It contains the line, because samples of a model may be equal."""
        return self.line, self.sha256, self.definition

    def submission(self) -> Submission:
        """The submission to judge.

        Raises:
            SubmissionError: it is nothing that can be.
        """
        if self.file:
            return from_path(f"{self.file}:{self.function}" if self.function else self.file)
        if self.solution:
            return from_solution(json.loads(self.solution), self.name)
        return from_source(self.source, self.function, self.name)

    def shipped(self) -> Task:
        """The task for another machine: with the text of its file in it."""
        if not self.file:
            return self
        text = Path(self.file).read_text(encoding="utf-8")
        if self.file.endswith(".json"):
            return replace(self, file="", solution=text)
        return replace(self, file="", source=text)


@dataclass(frozen=True)
class Settings:
    """How all are judged: `seed` is that of the first line; without it, each has its own of the system's entropy."""

    device: str = "cpu"
    examples: int = 20
    limits: RunLimits = field(default_factory=RunLimits)
    seed: int | None = None
    timed: bool = False
    version: str = ""


def numbers(text: str) -> list[int]:
    """The numbers that a range such as ``0-3,6`` stands for.

    Raises:
        ManyError: it is not of that form.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ManyError(f"{part!r} is neither a GPU nor a range of GPUs; write 0-7 or 0,2")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(found))


def read_tasks(path: Path) -> list[Task]:
    """The submissions of a file; paths in it are relative to its directory.

    Raises:
        ManyError: a line is not of the form that docs/judge.md shows. Nothing is judged then.
    """
    tasks = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ManyError(f"{path}: cannot be read: {error}; give a file of JSON lines in UTF-8") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(number, json.loads(line), path.parent))
            except (ValueError, RecursionError, store.DatasetError) as error:
                raise ManyError(f"{path}:{number}: {error}") from error
    if not tasks:
        raise ManyError(f"{path}: has no submission; each line is such as {_EXAMPLE}")
    return tasks


_EXAMPLE = '{"definition": "rmsnorm_h512", "file": "my_norm.py"}'


def _task(number: int, data: Any, directory: Path) -> Task:
    if not isinstance(data, dict):
        raise ValueError(f"is not a JSON object; write one such as {_EXAMPLE}")
    unknown, given = sorted(data.keys() - set(FIELDS)), [name for name in KERNELS if name in data]
    if unknown:
        raise ValueError(f"has unknown fields {unknown}; it may have {', '.join(FIELDS)}")
    if len(given) != 1:
        raise ValueError(f"needs one of {', '.join(KERNELS)}, and has {', '.join(given) or 'none'}")
    for name in FIELDS:
        kind = dict if name == "solution" else str
        if name in data and not (isinstance(data[name], kind) and data[name]):
            raise ValueError(f"{name} must be {'an object' if kind is dict else 'text'}, and not empty")
    if "solution" in data and "function" in data:
        raise ValueError("a Solution names its function in its entry_point; leave out function")
    function = data.get("function")
    solution = json.dumps(data["solution"], sort_keys=True) if "solution" in data else ""
    definition = data.get("definition") or (data.get("solution") or {}).get("definition") or ""
    file, code = "", (data.get("source") or solution).encode("utf-8", "surrogatepass")
    if "file" in data:
        file, code, named = _read(data["file"], directory)
        function = function or named
        definition = definition or _named_by(file, code)
    if len(code) > LONGEST:
        raise ValueError(f"a submission has at most {LONGEST} bytes, and this one {len(code)}")
    if not isinstance(definition, str) or not definition:
        raise ValueError(f"names no Definition; write such as {_EXAMPLE}")
    store.load(definition)
    sha256 = hashlib.sha256(code + f"\0{function or ''}".encode()).hexdigest()
    name = data.get("id") or data.get("file") or f"line {number}"
    return Task(number, name, definition, sha256, file, data.get("source", ""), solution, function)


def _read(text: str, directory: Path) -> tuple[str, bytes, str | None]:
    """The absolute path of ``FILE.py[:FUNCTION]`` or of a Solution, what is in it, and the function."""
    file, _, function = text.rpartition(":") if re.search(r"\.py:\w+$", text) else (text, "", "")
    path = (directory / file).absolute()
    try:
        return str(path), path.read_bytes(), function or None
    except (OSError, ValueError) as error:
        raise ValueError(f"file {file} cannot be read: {error}; its path is relative to {directory}") from error


def _named_by(file: str, code: bytes) -> str:
    """The Definition that the file of a Solution names; empty if it is none."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return str(json.loads(code).get("definition") or "") if file.endswith(".json") else ""
    return ""


class Results:
    """The file of verdicts: a line is written at once, and whole or not at all to whoever reads it later.

    A context manager, which keeps a second run from the same file, and cuts off a last line that a killed run left.
    """

    def __init__(self, path: Path, tasks: Sequence[Task]) -> None:
        self.path, self.lines = path, list[dict[str, Any]]()
        self._tasks = {task.key: task for task in tasks}
        self._descriptor = -1

    def __enter__(self) -> Results:
        import fcntl

        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ManyError(f"{self.path}: cannot be written: {error.strerror}; give another --out") from error
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ManyError(
                    f"{self.path}: another run writes into it; wait for it, or give another --out"
                ) from error
            self._resume()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def _resume(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            where = f"{self.path}:{number}"
            try:
                found = json.loads(line)
                key = found["line"], found["submission_sha256"], found["definition"]
            except (ValueError, TypeError, KeyError) as error:
                raise ManyError(f"{where}: is not a verdict of check-many; give another --out") from error
            if self._tasks.pop(key, None) is None:
                raise ManyError(
                    f"{where}: is about line {key[0]} of the submissions as it was before, or is doubled: lines may "
                    f"only be added at the end; give another --out, or remove this line to judge it again"
                )
            self.lines.append(found)
        if len(whole) < len(data):
            os.ftruncate(self._descriptor, len(whole))

    @property
    def missing(self) -> list[Task]:
        return list(self._tasks.values())

    def add(self, line: dict[str, Any]) -> None:
        del self._tasks[line["line"], line["submission_sha256"], line["definition"]]
        data = (json.dumps(finite(line), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")
        while data:
            data = data[os.write(self._descriptor, data) :]
        self.lines.append(line)


def judged(task: Task, settings: Settings) -> dict[str, Any]:
    """The line of one submission. Whatever it does is in it; errors of the judge are raised."""
    from flashinfer_trace.judging.bench.environment import environment

    seed = secrets.randbits(31) if settings.seed is None else settings.seed + task.line - 1
    line = _line(task, settings.device, seed, settings.version)
    line["gpu"] = environment(settings.device).gpu if settings.device.startswith("cuda") else "cpu"
    try:
        if not task.file or _unchanged(task):
            return {**line, **_found(task.submission(), task.definition, seed, settings)}
        return {**line, "code": "changed", "message": "its file changed after the run began"}
    except SubmissionError as error:
        return {**line, "code": "no-submission", "message": str(error)}


def _unchanged(task: Task) -> bool:
    with contextlib.suppress(OSError):
        code = Path(task.file).read_bytes() + f"\0{task.function or ''}".encode()
        return hashlib.sha256(code).hexdigest() == task.sha256
    return False


def _line(task: Task, device: str, seed: int, code: str) -> dict[str, Any]:
    return {
        **{"line": task.line, "id": task.name, "submission_sha256": task.sha256, "definition": task.definition},
        **{"device": device, "gpu": "", "grade": "not judged", "passed": False, "code": "", "message": ""},
        **{"ratio": None, "fastest": None, "times": [], "seed": seed, "commit": code, "verdict": None},
    }


def lost(task: Task, settings: Settings, message: str) -> dict[str, Any]:
    """The line of a submission of whose judge nothing was heard."""
    return {
        **_line(task, settings.device, settings.seed or 0, settings.version),
        "code": "judge-died",
        "message": message,
    }


def _found(submission: Submission, definition: str, seed: int, settings: Settings) -> dict[str, Any]:
    from flashinfer_trace.judging.judge import judge

    options: dict[str, Any] = {"device": settings.device, "examples": settings.examples, "seed": seed}
    if not settings.timed:
        verdict, times = judge(submission, definition, limits=settings.limits, **options), {}
    else:
        from flashinfer_trace.judging.bench import Policy, bench
        from flashinfer_trace.judging.traffic import workloads

        every = workloads(definition)
        quick = [one for one in every if one.quick] or list(every[:2])
        report = bench([submission], definition, quick, policy=Policy(seconds=QUICK), limits=settings.limits, **options)
        verdict, times = report.verdicts[0], _times(report.timetables)
        if verdict.passed and not report.passed:
            times |= {"passed": False, "grade": "wrong", "code": "timed-call"}
    message = verdict.failure.message if verdict.failure else ""
    found = {"grade": verdict.grade, "passed": verdict.passed, "code": verdict.code, "message": message}
    return {**found, **times, "verdict": verdict.to_dict()}


#: Seconds of timing for each workload.
QUICK = 6.0


def _times(timetables: Sequence[Any]) -> dict[str, Any]:
    """Seconds of a submission and of the fastest real kernel by workload, and the geometric mean of their ratio."""
    times = []
    for each in timetables:
        own = next((one for one in each.kernels if not one.library), None)
        best = each.best
        if own is not None:
            times.append(
                {
                    "workload": each.workload,
                    "seconds": own.summary.served if own.summary else None,
                    "fastest": best.kernel if best else None,
                    "fastest_seconds": best.summary.served if best else None,
                    "failure": own.failure.message if own.failure else "",
                }
            )
    ratios = [one["fastest_seconds"] / one["seconds"] for one in times if one["seconds"] and one["fastest_seconds"]]
    fastest = sorted({one["fastest"] for one in times if one["fastest"]})
    ratio = statistics.geometric_mean(ratios) if ratios else None
    return {"ratio": ratio, "fastest": ", ".join(fastest) or None, "times": times}


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by Definition and in all, pass@k and fast_p.

    pass@k is the probability that one of k submissions for a Definition is right, k drawn without replacement from
    those that are there, on average over the Definitions that have so many (Chen et al., arXiv:2107.03374). fast_p is
    the share of all submissions that are right and more than p times as fast as the fastest real kernel (KernelBench,
    arXiv:2502.10517, whose baseline is PyTorch); for p > 0 only if there are times.
    """
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["definition"]].append(line)
    passed = {name: sum(bool(one["passed"]) for one in group) for name, group in groups.items()}
    pass_at = {}
    for k in PASS_AT:
        enough = [name for name, group in groups.items() if len(group) >= k]
        if enough:
            pass_at[str(k)] = statistics.fmean(_pass_at(len(groups[name]), passed[name], k) for name in enough)
    timed = [line for line in lines if line["ratio"] is not None]
    fast = {}
    for p in FAST:
        right = sum(passed.values()) if p == 0 else sum(bool(one["passed"]) and one["ratio"] > p for one in timed)
        fast[f"{p:g}"] = right / len(lines) if lines and (p == 0 or timed) else None
    return {
        "submissions": len(lines),
        "passed": sum(passed.values()),
        "timed": len(timed),
        "grades": _counted(lines, "grade"),
        "codes": _counted(lines, "code"),
        "pass_at": pass_at,
        "fast": fast,
        "definitions": {name: _counted(group, "grade") for name, group in sorted(groups.items())},
    }


def _counted(lines: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    values = [line[name] for line in lines if line[name]]
    return {value: values.count(value) for value in sorted(set(values))}


def _pass_at(every: int, right: int, k: int) -> float:
    return 1.0 - math.comb(every - right, k) / math.comb(every, k)


def version() -> str:
    """The commit of the code that judges, with ``+`` if it was changed; of an installed package its version."""
    import flashinfer_trace

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(store.PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if Path(git("rev-parse", "--show-toplevel")).resolve() == store.PACKAGE.parent.resolve():
            return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    return flashinfer_trace.__version__
