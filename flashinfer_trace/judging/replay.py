"""What repeats a verdict: a command, or a call where no command says the same."""

from __future__ import annotations

import os
import shlex

from flashinfer_trace.definition import Definition
from flashinfer_trace.judging.process import Limits
from flashinfer_trace.judging.sizes import small_by_default
from flashinfer_trace.judging.submission import TIMEOUTS, Submission
from flashinfer_trace.judging.verdict import Verdict

__all__ = ["replay"]


def replay(submission: Submission, verdict: Verdict, definition: Definition, examples: int, limits: Limits) -> str:
    """What repeats a verdict on a submission: a command if it is a file and the command has options for its limits.

    Args:
        submission, verdict, definition: what was judged, how it did, and against what.
        examples, limits: as `judge` took them.
    """
    timed = limits == Limits.of(limits.call) and TIMEOUTS[0] <= limits.call <= TIMEOUTS[1]
    if not submission.file or not (timed or limits == Limits()):
        return _call(submission, verdict, examples, limits)
    function = None if submission.sources else submission.request.get("name")
    file = os.path.relpath(submission.file) + (f":{function}" if function else "")
    file = f"./{file}" if file.startswith("-") else file
    options = f"-d {verdict.definition} --device {verdict.device}"
    if verdict.sizes == "twin":
        options += "" if verdict.by_default else " --twin"
    elif small_by_default(definition, verdict.device):
        options += " --full"
    options += f" --examples {examples} --seed {verdict.seed}"
    if limits != Limits():
        options += f" --timeout {limits.call!r}"
    return f"flashinfer-trace check {_quoted(file)} {options}"


def _quoted(file: str) -> str:
    """A path for a shell: for bash, where it has characters that no terminal shows, or bytes that are none."""
    if file.isprintable():
        return shlex.quote(file)
    plain = frozenset(range(32, 127)) - frozenset(b"\\'")
    return "$'" + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(file)) + "'"


def _call(submission: Submission, verdict: Verdict, examples: int, limits: Limits) -> str:
    """A call of `judge`; only the one of this package takes limits, and has to be imported."""
    name = submission.request.get("name")
    kernel = repr(submission.file + (f":{name}" if name and not submission.sources else ""))
    arguments = (
        f"{kernel if submission.file else 'kernel'}, {verdict.definition!r}, device={verdict.device!r}, "
        f"examples={examples}, seed={verdict.seed}, twin={None if verdict.by_default else verdict.sizes == 'twin'}"
    )
    if limits == Limits():
        return f"flashinfer_trace.judge({arguments})"
    imports = "from flashinfer_trace.judging.judge import judge; from flashinfer_trace.judging.process import Limits"
    return f"{imports}; judge({arguments}, limits={limits!r})"
