"""Why a configuration has no result: SGLang does not serve the model so, or the evaluator itself fails."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.sources import SourceTree

_RAISED = re.compile(r"(?P<file>\S+):(?P<line>\d+): raises (?P<kind>\w+) (?P<arguments>.*)", re.S)


def refusal(problems: Iterable[str], sources: SourceTree) -> str:
    """The first error with which a server ends because of its arguments: `ValueError: what SGLang says (file:line)`.

    Args:
        problems: those of a step, in the order in which they were met.

    Returns: "" if SGLang serves the model so.
    """
    for problem in problems:
        raised = _RAISED.fullmatch(problem)
        if raised is not None and raised["file"].startswith(serving_steps.STARTING):
            said = _said(raised["arguments"]) or _written(raised["file"], int(raised["line"]), sources)
            return f"{raised['kind']}: {said or 'no message'} ({raised['file']}:{raised['line']})"
    return ""


def failure(configuration: str, error: Exception) -> str:
    """An error of the evaluator as one line, with its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:200]
    return (
        f"{configuration}: the evaluator fails with {type(error).__name__}: {said} ({Path(last.filename).name}:"
        f"{last.lineno}); correct the setting that causes it, or report this defect of the tracer"
    )


def _said(arguments: str) -> str:
    """The message of an exception, from its arguments; "" if they are not all known."""
    try:
        values = ast.literal_eval(arguments)
    except (SyntaxError, ValueError):
        return ""
    return " ".join(str(values[0]).split()) if isinstance(values, tuple) and values else ""


def _written(file: str, line: int, sources: SourceTree) -> str:
    """The message as the raise statement writes it, with expressions in braces; "" if that line raises nothing."""
    module = next((name for name, known in sources.files.items() if known == file), None)
    if module is None:
        return ""
    for node in ast.walk(sources.tree(module)):
        if isinstance(node, ast.Raise) and node.lineno == line and isinstance(node.exc, ast.Call) and node.exc.args:
            return " ".join(_text(node.exc.args[0]).split())
    return ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return str(node.value) if isinstance(node, ast.Constant) else f"{{{ast.unparse(node)}}}"
