"""The constraint language of Definitions: parsed and evaluated safely, never with ``eval``.

A constraint is one Python-like expression that is true or false::

    len_indptr == batch_size + 1
    num_kv_indices == kv_indptr[-1].item()
    1 <= top_k <= vocab_size and num_heads % tp_size == 0
    len(kv_indices) == 0 or max(kv_indices) < num_pages

It has integers, floats, names of axes and inputs, ``+ - * // %``, comparisons, ``and or not``, an integer literal as
subscript of a 1-D integer input, ``.item()`` (accepted and redundant: other tools evaluate constraints with Python),
and the functions ``min max abs len``. There is no attribute access, no call to anything else, no power and no
division: whatever parses here can neither reach outside nor run for long.

Importing this module imports no torch; tensors are recognised by their ``shape`` and ``item``.
"""

from __future__ import annotations

import ast
import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashinfer_trace.constraint_values import (
    ARITHMETIC,
    COMPARISONS,
    MAX_MAGNITUDE,
    ConstraintError,
    ConstraintValueError,
    Number,
    evaluate,
    literal_index,
)

__all__ = ["Constraint", "ConstraintError", "ConstraintSyntaxError", "ConstraintValueError", "parse"]

#: Longest constraint, in characters. The longest useful ones are below 100.
MAX_LENGTH = 300
#: Deepest nesting of operations and parentheses.
MAX_DEPTH = 24
FUNCTIONS = ("abs", "len", "max", "min")

_REFUSED_OPERATORS: dict[type[ast.operator], str] = {ast.Pow: "**", ast.Div: "/", ast.MatMult: "@"}


class ConstraintSyntaxError(ConstraintError):
    """The text is not a constraint.

    Attributes:
        column: where, counted from 1.
        hint: what to write instead; may be empty.
    """

    def __init__(self, message: str, column: int, hint: str = "") -> None:
        super().__init__(f"column {column}: {message}{f' ({hint})' if hint else ''}")
        self.message = message
        self.column = column
        self.hint = hint


@dataclass(frozen=True)
class Constraint:
    """One parsed constraint.

    Attributes:
        expression: the text as written.
        names: every axis and input it reads.
        subscripted: names it subscripts (must be 1-D integer inputs).
        measured: names whose length it takes (must be inputs that are tensors).
        reduced: names that stand alone in ``min(x)`` or ``max(x)`` (must be 1-D integer inputs).
        scalars: names it uses as one number (axes and scalar inputs).
    """

    expression: str
    names: frozenset[str]
    subscripted: frozenset[str]
    measured: frozenset[str]
    reduced: frozenset[str]
    scalars: frozenset[str]
    _tree: ast.expr = field(repr=False, compare=False)

    def evaluate(self, env: Mapping[str, Any]) -> bool:
        """Whether the constraint holds.

        Args:
            env: values by name: ints, floats, 0-d and 1-D tensors (or sequences of numbers). Reading an element of a
                tensor on a GPU waits for the GPU.

        Raises:
            ConstraintValueError: it cannot be computed from these values.
        """
        return bool(evaluate(self._tree, env, {}))

    def explain(self, env: Mapping[str, Any]) -> str:
        """One line that names the constraint, whether it holds, and every value it read.

        Never raises for missing or unfit values: the line then says what cannot be computed.
        """
        seen: dict[str, Number] = {}
        try:
            verdict = f"is {'true' if evaluate(self._tree, env, seen) else 'false'}"
        except ConstraintValueError as error:
            verdict = f"cannot be computed, {error}"
        values = ", ".join(f"{name} = {value}" for name, value in seen.items())
        return f"{self.expression} {verdict}{': ' if values else ''}{values}"

    @property
    def solutions(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """(name, names needed) for each name that this constraint determines.

        That is the form ``axis == expression`` or ``expression == axis``, where the expression does not read the axis.
        """
        return tuple((name, _names(expression)) for name, expression in self._equations())

    def solve(self, known: Mapping[str, Any]) -> dict[str, int]:
        """Values of unknown axes that the constraint determines, {} if it determines none.

        Args:
            known: values by name: axes, and inputs if the expression reads them.

        Raises:
            ConstraintValueError: the expression cannot be computed from `known` (a division by zero, an index out
                of range), or its value is not an integer.
        """
        for name, expression in self._equations():
            if name not in known and all(needed in known for needed in _names(expression)):
                value = evaluate(expression, known, {})
                if not isinstance(value, int):
                    raise ConstraintValueError(f"{self.expression}: {name} would be {value}, which is not an integer")
                return {name: int(value)}
        return {}

    def _equations(self) -> list[tuple[str, ast.expr]]:
        tree = self._tree
        if not (isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Eq)):
            return []
        left, right = tree.left, tree.comparators[0]
        return [
            (side.id, other)
            for side, other in ((left, right), (right, left))
            if isinstance(side, ast.Name) and side.id not in _names(other)
        ]


@functools.lru_cache(maxsize=4096)
def parse(expression: str) -> Constraint:
    """Parses one constraint (cached).

    Args:
        expression: the text, as in the ``constraints`` of a Definition.

    Raises:
        ConstraintSyntaxError: it is not in the language; with column and hint.
    """
    tree = _python_expression(expression)
    uses: dict[str, set[str]] = {"subscript": set(), "len": set(), "reduce": set(), "scalar": set()}
    checker = _Checker(uses)
    checker.boolean(tree, 0)
    return Constraint(
        expression=expression,
        names=frozenset().union(*uses.values()),
        subscripted=frozenset(uses["subscript"]),
        measured=frozenset(uses["len"]),
        reduced=frozenset(uses["reduce"]),
        scalars=frozenset(uses["scalar"]),
        _tree=tree,
    )


def _python_expression(expression: str) -> ast.expr:
    if not expression.strip():
        raise ConstraintSyntaxError("the constraint is empty", 1, "delete it or write a comparison")
    if len(expression) > MAX_LENGTH:
        raise ConstraintSyntaxError(
            f"the constraint has {len(expression)} characters, more than {MAX_LENGTH}",
            MAX_LENGTH,
            "split it: every constraint of the list must hold",
        )
    if expression != expression.strip() or "\n" in expression or "\r" in expression:
        raise ConstraintSyntaxError("blanks around the constraint or a line break in it", 1, "write it on one line")
    depth = 0
    for column, character in enumerate(expression, 1):
        depth += (character in "([") - (character in ")]")
        # Checked before Python's own parser sees the text: that one answers deep nesting with a MemoryError.
        if depth > MAX_DEPTH:
            raise ConstraintSyntaxError(f"more than {MAX_DEPTH} nested brackets", column, "simplify it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a SyntaxWarning of a refused text helps nobody
            return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        hint = "write == to compare" if "=" in expression and "==" not in expression else ""
        raise ConstraintSyntaxError(error.msg or "invalid syntax", max(error.offset or 1, 1), hint) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConstraintSyntaxError(f"not an expression: {error}", 1) from None


class _Checker:
    """Accepts the language's trees and records how each name is used; everything else is a ConstraintSyntaxError."""

    def __init__(self, uses: dict[str, set[str]]) -> None:
        self.uses = uses

    def boolean(self, node: ast.expr, depth: int) -> None:
        """Checks a node that must be true or false."""
        self._check_depth(node, depth)
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self.boolean(value, depth + 1)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.boolean(node.operand, depth + 1)
        elif isinstance(node, ast.Compare):
            for comparison in node.ops:
                if type(comparison) not in COMPARISONS:
                    _refuse(node, "`in`, `not in`, `is` are not in the language", "use == != < <= > >=")
            for operand in (node.left, *node.comparators):
                self.number(operand, depth + 1)
        else:
            _refuse(node, "a number where true or false is needed", "compare it, for example `... == 1`")

    def number(self, node: ast.expr, depth: int) -> None:
        """Checks a node that must be one number."""
        self._check_depth(node, depth)
        if isinstance(node, ast.Constant):
            _check_literal(node)
        elif isinstance(node, ast.Name):
            if node.id in FUNCTIONS:
                _refuse(node, f"`{node.id}` is a function", f"call it: {node.id}(...)")
            self.uses["scalar"].add(node.id)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            self.number(node.operand, depth + 1)
        elif isinstance(node, ast.BinOp):
            if type(node.op) not in ARITHMETIC:
                symbol = _REFUSED_OPERATORS.get(type(node.op), type(node.op).__name__)
                _refuse(node, f"the operator {symbol} is not in the language", "use + - * // %")
            self.number(node.left, depth + 1)
            self.number(node.right, depth + 1)
        elif isinstance(node, ast.Subscript):
            self._subscript(node)
        elif isinstance(node, ast.Call):
            self._call(node, depth)
        elif isinstance(node, ast.Attribute):
            _refuse(node, f"attribute access `.{node.attr}`", "only the call `.item()` may follow a name")
        elif isinstance(node, (ast.BoolOp, ast.Compare)):
            _refuse(node, "true or false where a number is needed", "combine comparisons with and, or, not")
        else:
            _refuse(node, f"{type(node).__name__} is not in the language", "use names, numbers and + - * // %")

    def _subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.value, ast.Name):
            _refuse(node, "only a name can be subscripted", "for example kv_indptr[-1]")
        elif literal_index(node) is None:
            _refuse(node, "the subscript is not an integer literal", "for example kv_indptr[-1]")
        else:
            self.uses["subscript"].add(node.value.id)

    def _call(self, node: ast.Call, depth: int) -> None:
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            _refuse(node, "keyword and starred arguments are not in the language", "write plain arguments")
        if isinstance(node.func, ast.Attribute):
            if node.func.attr != "item" or node.args:
                _refuse(node, f"the method `.{node.func.attr}(...)`", "the only method is `.item()`, without arguments")
            if not isinstance(node.func.value, (ast.Name, ast.Subscript)):
                _refuse(node, "`.item()` after an expression", "write it after a name or a subscript, or drop it")
            self.number(node.func.value, depth + 1)
            return
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            _refuse(node, "a call of something else than a function of the language", "there are min, max, abs, len")
            return
        name, arguments = node.func.id, node.args
        first = arguments[0] if arguments else None
        if name == "len":
            if len(arguments) != 1 or not isinstance(first, ast.Name):
                _refuse(node, "`len` takes one name", "for example len(kv_indices)")
            else:
                self.uses["len"].add(first.id)
        elif name == "abs" and len(arguments) != 1:
            _refuse(node, "`abs` takes one argument", "for example abs(a - b)")
        elif name in ("min", "max") and len(arguments) == 1 and isinstance(first, ast.Name):
            self.uses["reduce"].add(first.id)
        elif name in ("min", "max") and len(arguments) < 2:
            _refuse(node, f"`{name}` takes one name or several numbers", f"for example {name}(a, b) or {name}(indices)")
        else:
            for argument in arguments:
                self.number(argument, depth + 1)

    def _check_depth(self, node: ast.expr, depth: int) -> None:
        if depth > MAX_DEPTH:
            _refuse(node, f"more than {MAX_DEPTH} nested operations", "split it in several constraints")


def _refuse(node: ast.expr, message: str, hint: str) -> None:
    raise ConstraintSyntaxError(message, node.col_offset + 1, hint)


def _check_literal(node: ast.Constant) -> None:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(node, f"the literal {str(value)[:20]!r} is not a number", "write 1 or 0 for a flag")
    elif not math.isfinite(value) or abs(value) > MAX_MAGNITUDE:
        _refuse(node, "the number is larger than 2**64", "axes are below 2**31")


def _names(node: ast.expr) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id not in FUNCTIONS)
