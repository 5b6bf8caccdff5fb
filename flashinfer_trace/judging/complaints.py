"""How an error of a submission is told: in one line, with the place. Runs in the submission's process."""

from __future__ import annotations

import importlib
import os
import re
import traceback
from pathlib import Path

import torch

from flashinfer_trace.isolation import protocol
from flashinfer_trace.judging.afterwards import Replaced
from flashinfer_trace.judging.loading import LoadError, ReturnError

__all__ = ["complaint"]

#: Where frames lie that say nothing of a submission: those of this package, and of the import system.
_OURS = (os.path.dirname(__file__), os.path.dirname(importlib.__file__), "<frozen importlib")

#: Where modules are called, and functions that torch's decorators made: no place of a submission.
_TORCH = os.path.dirname(torch.__file__) + os.sep

#: Longest name of a file that is told, in characters.
MAX_FILE = 200


def complaint(error: BaseException, root: str | None = None) -> str:
    """Type and message of an error, and the first line of the submission on its way.

    Args:
        error: what it raised.
        root: of a Solution, the directory that its package lies in.
    """
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    if root is not None and frames and isinstance(error, ModuleNotFoundError):
        hint = _own_import(str(error.name), frames[-1], Path(root))
        if hint:  # as an ImportError, because no package is missing
            return f"ImportError: {hint}"[: protocol.MAX_MESSAGE] + _place(frames[-1])
    kind = "" if isinstance(error, (LoadError, Replaced, ReturnError)) else f"{type(error).__name__}: "
    frames = [one for one in frames if not one.filename.startswith(_TORCH)] or frames
    return f"{kind}{_message(error)}"[: protocol.MAX_MESSAGE] + (_place(frames[0]) if frames else "")


def _message(error: BaseException) -> str:
    """What an error says. The code that says it may be the submission's."""
    try:
        return str(error)
    except BaseException as another:
        return f"its message cannot be read: __str__ raises {type(another).__name__}"


def _place(frame: traceback.FrameSummary) -> str:
    return f" ({os.path.basename(frame.filename)[-MAX_FILE:]}:{frame.lineno})"


def _own_import(name: str, frame: traceback.FrameSummary, root: Path) -> str:
    """What to write instead, if a source of a Solution was imported as a module of its own; empty if none was.

    Sources are modules of one package: from beside the file that imports, or from the package's own directory.
    """
    file, module = Path(frame.filename), name.partition(".")[0]
    if not module.isidentifier() or root not in file.parents:
        return ""
    package = root / file.relative_to(root).parts[0]
    for dots, directory in enumerate([file.parent, *file.parent.parents], start=1):
        source = next((one for one in (directory / f"{module}.py", directory / module) if one.exists()), None)
        if source is not None:
            instead = _relative(frame.line or "", module, "." * dots)
            return f"{source.name} is a source of the Solution, whose sources are one package: use `{instead}`"
        if directory == package:
            break
    return ""


def _relative(line: str, module: str, dots: str) -> str:
    """An import statement, made relative; a pattern of one if the line has another form."""
    if re.fullmatch(rf"from {module}[\w.]* import [\w, ]+", line):
        return f"from {dots}{line.removeprefix('from ')}"
    if re.fullmatch(rf"import {module}( as \w+)?", line):
        return f"from {dots} {line}"
    return f"from {dots}{module} import ..."
