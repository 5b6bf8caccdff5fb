"""A submission to judge: a file, a Solution of flashinfer-bench, a callable, or a known kernel. Imports no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.judging.compiled import BINDINGS, COMPILED, SUFFIXES
from flashinfer_trace.sandbox.limits import printable

#: Languages of flashinfer-bench's Solutions: Python files, and what is compiled.
LANGUAGES = ("python", "triton", *COMPILED)

#: Least and most seconds of `flashinfer-trace check --timeout`.
TIMEOUTS = (0.1, 86400.0)

#: Least and most GiB of its --memory; torch and Python need some.
MEMORY, GIBIBYTE = (0.1, 65536.0), 1 << 30

#: Longest path of a source, and the path of one that was given as text.
MAX_PATH, SOURCE = 200, "kernel.py"


#: Seconds that loading a submission has at least, whatever its calls may take.
LEAST_LOAD = 30.0


class SubmissionError(ValueError):
    """Something that cannot be judged. The message says what is wrong with it, and what can be."""


@dataclass(frozen=True)
class RunLimits:
    """The limits of a submission.

    Attributes:
        load, first_call, call: seconds to be loaded, for its first call, which compiles, and for others.
        memory_bytes: of memory beyond what its process has before it is loaded, inputs and outputs included:
            address space on a CPU, and what torch allocates on a GPU. None for no limit.
    """

    load: float = 120.0
    first_call: float = 300.0
    call: float = 60.0
    memory_bytes: int | None = None

    @classmethod
    def of(cls, seconds: float | None = None, gibibytes: float | None = None) -> RunLimits:
        """The limits set by `flashinfer-trace check --timeout --memory`. Libraries for CUDA take seconds to import,
        however fast calls are."""
        memory = None if gibibytes is None else int(gibibytes * GIBIBYTE)
        if seconds is None:
            return cls(memory_bytes=memory)
        return cls(max(seconds, LEAST_LOAD), seconds, seconds, memory)

    @property
    def given(self) -> dict[str, float] | None:
        """The arguments of `of` that give these limits, by name; None if there are none, or beyond the command's."""
        seconds = None if self == RunLimits(memory_bytes=self.memory_bytes) else self.call
        gibibytes = None if self.memory_bytes is None else self.memory_bytes / GIBIBYTE
        found = {"timeout": (seconds, TIMEOUTS), "memory": (gibibytes, MEMORY)}
        given = {name: value for name, (value, _) in found.items() if value is not None}
        if RunLimits.of(seconds, gibibytes) != self:
            return None
        return given if all(found[name][1][0] <= one <= found[name][1][1] for name, one in given.items()) else None


@dataclass(frozen=True)
class Submission:
    """One kernel to be judged.

    Attributes:
        request: what its process is told: the kind (``file``, ``package``, ``known`` or ``forked``), and where it lies.
        kernel: a callable of this process, of the kind ``forked``.
        sources: files of a Solution by path, which are written before its process starts.
        file: the file that a user named; empty if there is none.
        definition: the name of the Definition that it says it computes; empty if it does not say so.
    """

    label: str
    request: Mapping[str, Any]
    kernel: Callable[..., Any] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    definition: str = ""
    file: str = ""

    @contextmanager
    def on_disk(self) -> Iterator[dict[str, Any]]:
        """The request while the files that it names exist.

        Raises:
            SubmissionError: they cannot be written.
        """
        if not self.sources:
            yield dict(self.request)
            return
        with tempfile.TemporaryDirectory() as directory:
            for path, text in self.sources.items():
                file = Path(directory) / "submission" / path
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(text.encode("utf-8", "surrogatepass"))
                except OSError as error:  # one source is the directory of another
                    raise SubmissionError(f"{self.label}: the source {path!r} cannot be written: {error}") from error
            yield {
                **self.request,
                "root": directory,
                "path": str(Path(directory) / "submission" / self.request["path"]),
            }


def from_path(text: str) -> Submission:
    """A submission that a user names: ``FILE.py``, ``FILE.py:FUNCTION`` or ``SOLUTION.json``.

    Raises:
        SubmissionError: the file does not exist, or is not a Solution in Python.
    """
    name: str | None
    file, separator, name = text.rpartition(":")
    if not separator or not file.endswith(".py"):
        file, name = text, None
    path = Path(file)
    if wrong := _not_a_file(path):
        shown = printable(file) if len(file) <= MAX_PATH else f"{printable(file[:MAX_PATH])}..."
        raise SubmissionError(
            f"{shown}: {wrong}; give the path of FILE.py, FILE.py:FUNCTION or a Solution of flashinfer-bench (.json)"
        )
    if name == "":
        raise SubmissionError(f"{text!r} names no function after the colon; give FILE.py or FILE.py:FUNCTION")
    if path.suffix == ".json":
        return _solution(path)
    if path.suffix != ".py":
        raise SubmissionError(f"{printable(file)}: not a Python file, nor a Solution of flashinfer-bench (.json)")
    label = printable(f"{path.name}:{name}" if name else path.name)
    return Submission(label, {"kind": "file", "path": str(path.absolute()), "name": name}, file=str(path.absolute()))


def _not_a_file(path: Path) -> str:
    """The error in a path, which may be the text of a program instead; empty if it is right."""
    try:
        if path.is_file():
            return ""
        return "not a regular file" if path.exists() else "no such file"
    except (OSError, ValueError):  # too long, or with a character of value 0
        return "not a path"


def from_callable(kernel: Callable[..., Any]) -> Submission:
    label = getattr(kernel, "__qualname__", type(kernel).__qualname__)
    return Submission(label, {"kind": "forked"}, kernel)


def known(definition: Definition, label: str) -> Submission:
    request = {"kind": "known", "kernel": label, "definition": definition.to_dict(), "root": str(definition.root)}
    return Submission(label, request)


def from_source(text: str, function: str | None, label: str) -> Submission:
    """One Python file, given as its text; without the name of a function, it is looked for as in a file."""
    request = {"kind": "package", "path": SOURCE, "name": function, "destination": None}
    return Submission(printable(label), request, None, {SOURCE: text})


def _solution(path: Path) -> Submission:
    shown = printable(str(path))
    try:
        data = load_object(path)
    except JsonSourceError as error:
        raise SubmissionError(f"{shown}: cannot be read: {error}") from error
    return from_solution(data, shown, str(path.absolute()))


def _compiled(spec: Mapping[str, Any], shown: str, submission: Submission) -> Submission:
    """A Solution in C++ or CUDA, with what its process needs to compile it."""
    language, (file, _, function) = spec["language"], spec["entry_point"].partition("::")
    binding, endings = spec.get("binding") or BINDINGS[0], SUFFIXES[language]
    if binding not in BINDINGS:
        raise SubmissionError(
            f"{shown}: the binding {printable(str(binding))}; {' and '.join(BINDINGS)} can be compiled"
        )
    if not file.endswith(endings):
        raise SubmissionError(f"{shown}: the entry point {spec['entry_point']!r} is in no {' or '.join(endings)} file")
    if not function.isidentifier():
        raise SubmissionError(f"{shown}: {function!r} is not the name of a function")
    destination = spec.get("destination_passing_style", True)
    request = {"kind": "package", "path": file, "name": function, "destination": destination}
    return replace(submission, request={**request, "language": language, "binding": binding})


def from_solution(data: Mapping[str, Any], shown: str, place: str = "") -> Submission:
    """A Solution of flashinfer-bench (its JSON), which errors name as `shown`, from the file `place`, if any.

    Raises:
        SubmissionError: it is none that can be judged.
    """
    try:
        spec, files = data["spec"], {one["path"]: one["content"] for one in data["sources"]}
        if len(files) < len(data["sources"]):
            raise TypeError("two sources have the same path")
        language, entry = spec["language"], spec["entry_point"]
        name, definition = data["name"], data["definition"]
        destination = spec.get("destination_passing_style", True)
        given = (language, entry, name, definition, *files, *files.values())
        if not all(isinstance(one, str) for one in given):
            raise TypeError("names, paths and contents are strings")
        if not isinstance(destination, bool):
            raise TypeError("destination_passing_style is true or false")
    except KeyError as error:
        raise SubmissionError(f"{shown}: not a Solution of flashinfer-bench: it has no entry {error}") from error
    except (TypeError, AttributeError) as error:
        raise SubmissionError(f"{shown}: not a Solution of flashinfer-bench: {error!r}") from error
    if language not in LANGUAGES:
        raise SubmissionError(f"{shown}: a Solution in {language}; those in {', '.join(LANGUAGES)} can be judged")
    file, _, function = entry.partition("::")
    if not function or file not in files:
        raise SubmissionError(f"{shown}: the entry point {entry!r} must be FILE::FUNCTION, with one of {sorted(files)}")
    for one in files:
        if PurePosixPath(one).is_absolute() or ".." in PurePosixPath(one).parts:
            raise SubmissionError(f"{shown}: the source {one!r} lies outside of the Solution")
        if not PurePosixPath(one).name or not one.isprintable() or len(one) > MAX_PATH:
            raise SubmissionError(f"{shown}: {one[:MAX_PATH]!r} is not the path of a source")
    if language in COMPILED:
        return _compiled(spec, shown, Submission(printable(name), {}, None, files, definition, place))
    names = PurePosixPath(file).with_suffix("").parts
    if not file.endswith(".py") or any("." in one for one in names):
        raise SubmissionError(f"{shown}: the entry point {entry!r} is in no Python file that can be imported (NAME.py)")
    request = {"kind": "package", "path": file, "name": function, "destination": destination}
    return Submission(printable(name), request, None, files, definition, place)
