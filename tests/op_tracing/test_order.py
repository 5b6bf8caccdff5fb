"""Execution order within one function."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tools.kernel_tracing.source.declarations import FunctionInfo
from tools.op_tracing.order import execution_order


def calls(text: str) -> list[tuple[str, str]]:
    """Names of the calls in a function's body in execution order, each with the loop around it."""
    node = ast.parse(f"def f():\n{dedent(text)}".replace("\n", "\n    ")).body[0]
    assert isinstance(node, ast.FunctionDef)
    order = execution_order(FunctionInfo(None, "f", node))  # type: ignore[arg-type]
    found = [inner for inner in order if isinstance(inner, ast.Call)]
    assert [order[inner][0] for inner in found] == sorted(order[inner][0] for inner in found)
    return [(ast.unparse(inner.func), order[inner][1]) for inner in found]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a(b(), c(d()))", "b d c a"),
        ("x = a()\nb()", "a b"),
        ("x[a()] = b()", "b a"),
        ("x = a() if b() else c()", "b a c"),
        ("a().b(c())", "a c a().b"),
        ("if a():\n    b()\nelse:\n    c()\nd()", "a b c d"),
        ("with a() as b:\n    c()", "a c"),
        ("def g():\n    a()\nb(g)", "b"),
        ("f = lambda: a()\nb()", "b"),
        ("return a(), b()", "a b"),
    ],
)
def test_order(text: str, names: str) -> None:
    assert " ".join(name for name, _ in calls(text)) == names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for i in range(n):\n    a(i)\nb()", [("range", ""), ("a", "for i in range(n)"), ("b", "")]),
        ("while a():\n    b()", [("a", ""), ("b", "while a()")]),
        ("x = [a(i) for i in b()]", [("b", ""), ("a", "for i in b()")]),
        ("x = {a(): b() for k in c}", [("a", "for k in c"), ("b", "for k in c")]),
        ("for i in a:\n    for j in b:\n        c()\n    d()", [("c", "for j in b"), ("d", "for i in a")]),
    ],
)
def test_loops(text: str, expected: list[tuple[str, str]]) -> None:
    assert calls(text) == expected
