"""Small functions; what is longer has a reason."""

from __future__ import annotations

import ast

from flashinfer_trace import find_root

ROOT = find_root()
DIRECTORIES = ("benchmarks", "flashinfer_trace", "reference", "tests", "tools")
FUNCTION_LINES = 60
#: Longer functions, and why they are.
LONGER = {
    "flashinfer_trace/cli/judgment.py: bench": "every option of the command is a parameter",
    "flashinfer_trace/cli/judgment.py: check": "every option of the command is a parameter",
    "flashinfer_trace/cli/verification.py: verify": "every option of the command is a parameter",
    "flashinfer_trace/families/attention/oracle.py: attention": "one computation, whose parts share a dozen tensors",
}


def sources() -> dict[str, str]:
    """The text of every Python file of the project, by its path."""
    paths = [path for directory in DIRECTORIES for path in (ROOT / directory).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_functions_are_small_or_have_a_reason():
    texts = sources()
    assert len(texts) > 400
    longer = {
        f"{name}: {node.name}"
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    }
    assert longer == set(LONGER)
