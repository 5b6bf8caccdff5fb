"""The Python frames of a call, as places in the sources of SGLang and of the kernel libraries."""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

#: Packages whose frames are kept; everything between them (torch, Triton, this tool) is left out.
PACKAGES = ("sglang", "sgl_kernel", "flashinfer", "deep_gemm", "triton_kernels")

#: Names of comprehensions, which have frames of their own before Python 3.12.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Frame(NamedTuple):
    """One place of a stack.

    Attributes:
        file: relative to the directory that holds the package, such as ``sglang/srt/models/llama.py``.
        line: 1-based line on which the call begins.
        function: the enclosing function: ``Class.method``, ``outer.inner``.
        called: the last name of what the call names: ``q_proj`` of ``self.q_proj(x)``; "" if it is not known.
    """

    file: str
    line: int
    function: str
    called: str = ""


class RawFrame(NamedTuple):
    """The cheapest record of a running frame: its code, the offset of the instruction, and its line."""

    code: CodeType
    offset: int
    line: int


@functools.cache
def package_path(filename: str) -> str | None:
    """The path from the package on, or None for a file that no stack shows."""
    found = max((filename.rfind(f"/{package}/") for package in PACKAGES), default=-1)
    return filename[found + 1 :] if found >= 0 else None


def stack() -> tuple[RawFrame, ...]:
    """The frames of the running thread that belong to `PACKAGES`, the innermost first."""
    frames: list[RawFrame] = []
    inside = False  # of a comprehension, whose frame stands for that of its function
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if package_path(code.co_filename) is not None:
            if not inside:
                frames.append(RawFrame(code, frame.f_lasti, frame.f_lineno))
            inside = code.co_name in COMPREHENSIONS
        frame = frame.f_back
    return tuple(frames)


def located(frame: RawFrame) -> Frame:
    """The frame as a place. The interpreter reports the line of a method's name; the line of the call is wanted."""
    code = frame.code
    line, called = _calls(code.co_filename).get(_end(frame), (frame.line, ""))
    function = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
    for name in COMPREHENSIONS:
        function = function.removesuffix(f".{name}")
    return Frame(package_path(code.co_filename) or code.co_filename, line, function, called)


def _end(frame: RawFrame) -> tuple[int, int]:
    """Line and column at which the running expression ends; (0, 0) before Python 3.11, which does not know it."""
    positions = getattr(frame.code, "co_positions", None)
    if positions is None or frame.offset < 0:
        return 0, 0
    found = next(itertools.islice(positions(), frame.offset // 2, None), (None,) * 4)
    return found[1] or 0, found[3] or 0


@functools.cache
def _calls(filename: str) -> dict[tuple[int, int], tuple[int, str]]:
    """The end of each call in a file -> the line on which it begins, and the last name of what it calls.

    A file that cannot be read has none.
    """
    try:
        tree = ast.parse(Path(filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {(node.end_lineno or 0, node.end_col_offset or 0): (node.lineno, called_name(node)) for node in calls}


def called_name(call: ast.Call) -> str:
    """The last name of what is called: `self.layers[i].mlp(x)` -> `mlp`, `experts[0](x)` -> `experts`."""
    target: ast.AST = call.func
    while not isinstance(target, (ast.Attribute, ast.Name)):
        inner = getattr(target, "value", None) or getattr(target, "func", None)
        if not isinstance(inner, ast.AST):
            return ""
        target = inner
    return target.attr if isinstance(target, ast.Attribute) else target.id
