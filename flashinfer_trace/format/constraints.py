"""The constraint language of Definitions: parsed and evaluated safely, never with ``eval``.

A constraint is one Python-like comparison. All constraints of a Definition must hold::

    len_indptr == batch_size + 1
    num_kv_indices == kv_indptr[-1].item()
    top_k <= num_experts

The language has integers, names of axes and inputs, ``+ - * // %``, one comparison (``== != < <= > >=``), integer
literals as subscripts of 1-D integer inputs, ``min(a, b)`` of two numbers, and ``.item()``. The last has no effect; it
is accepted because other tools evaluate constraints as Python. There are no other functions, attributes, powers or true
division, so a constraint that parses can neither reach outside the language nor run for long.

Importing this module does not import torch; tensors are recognized by their ``shape`` and ``item``.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

#: Largest magnitude of any literal or intermediate result. Axes are below 2**31, so the product of two still fits.
MAX_MAGNITUDE = 2**64

Number = int | float

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class ConstraintError(ValueError):
    """Base class of the errors about constraints."""


class ConstraintValueError(ConstraintError):
    """A well-formed constraint cannot be computed: a name is missing, an index is out of range, a division by zero."""


def evaluate(node: ast.Compare, env: Mapping[str, Any], seen: dict[str, Number]) -> bool:
    """Whether a checked comparison holds. `seen` collects each value that was read, keyed by the text that reads it."""
    left, right = (number(side, env, seen) for side in (node.left, node.comparators[0]))
    return COMPARISONS[type(node.ops[0])](left, right)


def number(node: ast.expr, env: Mapping[str, Any], seen: dict[str, Number]) -> Number:
    """Value of one side of a checked comparison."""
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, number(node.left, env, seen), number(node.right, env, seen))
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]  # the checker accepts only integers
    if isinstance(node, ast.Name):
        return seen.setdefault(node.id, _scalar(node.id, _look_up(node.id, env)))
    if isinstance(node, ast.Subscript):
        assert isinstance(node.value, ast.Name)
        name, index = node.value.id, literal_index(node)
        return seen.setdefault(f"{name}[{index}]", _element(name, _look_up(name, env), index or 0))
    assert isinstance(node, ast.Call)
    if is_minimum(node):
        return min(*(number(operand, env, seen) for operand in node.args))
    assert isinstance(node.func, ast.Attribute)
    return number(node.func.value, env, seen)


def _arithmetic(node: ast.BinOp, left: Number, right: Number) -> Number:
    try:
        result: Number = ARITHMETIC[type(node.op)](left, right)
    except ZeroDivisionError:
        raise ConstraintValueError(f"{ast.unparse(node)} divides by zero") from None
    # Every operand is bounded, so one operation on two of them stays small; its result must be bounded as well.
    if abs(result) > MAX_MAGNITUDE:
        raise ConstraintValueError(f"{ast.unparse(node)} is larger than 2**64")
    return result


def _look_up(name: str, env: Mapping[str, Any]) -> Any:
    if name not in env:
        raise ConstraintValueError(f"{name} has no value")
    return env[name]


def _scalar(name: str, value: Any) -> Number:
    if not isinstance(value, (int, float)):
        shape = getattr(value, "shape", None)
        if not hasattr(value, "item") or (shape is not None and tuple(shape) not in ((), (1,))):
            raise ConstraintValueError(f"{name} is not one number but {_kind(value)}")
        value = value.item()
    if not isinstance(value, (int, float)):
        raise ConstraintValueError(f"{name} is not a number but {_kind(value)}")
    if math.isfinite(value) and abs(value) > MAX_MAGNITUDE:
        raise ConstraintValueError(f"{name} is larger than 2**64")
    return value


def _length(name: str, value: Any) -> int:
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) == 0:
            raise ConstraintValueError(f"{name} is a scalar and has no length")
        return int(shape[0])
    if not isinstance(value, (list, tuple)):
        raise ConstraintValueError(f"{name} is {_kind(value)} and has no length")
    return len(value)


def _element(name: str, value: Any, index: int) -> Number:
    length = _length(name, value)
    if not -length <= index < length:
        raise ConstraintValueError(f"{name}[{index}] is out of range; {name} has {length} elements")
    return _scalar(f"{name}[{index}]", value[index])


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")


def is_minimum(node: ast.Call) -> bool:
    """Whether a call is one of ``min``, the only function of the language."""
    return isinstance(node.func, ast.Name) and node.func.id == "min"


def literal_index(node: ast.Subscript) -> int | None:
    index = node.slice
    sign = 1
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        sign, index = -1, index.operand
    if isinstance(index, ast.Constant) and type(index.value) is int and index.value <= MAX_MAGNITUDE:
        return sign * index.value
    return None


#: Longest constraint, in characters. The longest useful ones are below 100.
MAX_LENGTH = 300
#: Deepest nesting of operations and parentheses.
MAX_DEPTH = 24

_REFUSED_OPERATORS: dict[type[ast.operator], str] = {ast.Pow: "**", ast.Div: "/", ast.MatMult: "@"}


class ConstraintSyntaxError(ConstraintError):
    """The text is not a constraint.

    Attributes:
        column: where the error is, counted from 1.
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
        names: every axis and input that it reads.
        subscripted: names that it subscripts, which must be 1-D integer inputs.
        scalars: names that it uses as single numbers (axes and scalar inputs).
    """

    expression: str
    names: frozenset[str]
    subscripted: frozenset[str]
    scalars: frozenset[str]
    _tree: ast.Compare = field(repr=False, compare=False)

    def evaluate(self, env: Mapping[str, Any]) -> bool:
        """Whether the constraint holds.

        Args:
            env: values by name: ints, floats, 0-d and 1-D tensors (or sequences of numbers). Reading an element of a
                tensor on a GPU waits for the GPU.

        Raises:
            ConstraintValueError: it cannot be computed from these values.
        """
        return evaluate(self._tree, env, {})

    def explain(self, env: Mapping[str, Any]) -> str:
        """One line with the constraint, whether it holds, and every value that it read.

        Does not raise for missing or unsuitable values; the line then explains what cannot be computed.
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

        Such a constraint has the form ``axis == expression`` or ``expression == axis``, and the expression does not
        read the axis.
        """
        return tuple((name, _names(expression)) for name, expression in self._equations())

    def solve(self, known: Mapping[str, Any]) -> dict[str, int]:
        """The value of an unknown axis that the constraint determines, by name; {} if it determines none.

        Args:
            known: values by name: axes, and inputs if the expression reads them.

        Raises:
            ConstraintValueError: the expression cannot be computed from `known` (a division by zero, an index out
                of range), or its value is not an integer.
        """
        for name, expression in self._equations():
            if name not in known and all(needed in known for needed in _names(expression)):
                value = number(expression, known, {})
                if not isinstance(value, int):
                    raise ConstraintValueError(f"{self.expression}: {name} would be {value}, which is not an integer")
                return {name: int(value)}
        return {}

    def _equations(self) -> list[tuple[str, ast.expr]]:
        tree = self._tree
        if not isinstance(tree.ops[0], ast.Eq):
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

    Raises:
        ConstraintSyntaxError: it is not in the language; the error has a column and a hint.
    """
    tree = _python_expression(expression)
    checker = _Checker()
    comparison = checker.comparison(tree)
    return Constraint(
        expression=expression,
        names=frozenset(checker.subscripted | checker.scalars),
        subscripted=frozenset(checker.subscripted),
        scalars=frozenset(checker.scalars),
        _tree=comparison,
    )


def _python_expression(expression: str) -> ast.expr:
    if not expression.strip():
        raise ConstraintSyntaxError("the constraint is empty", 1, "delete it or write a comparison")
    if len(expression) > MAX_LENGTH:
        raise ConstraintSyntaxError(
            f"the constraint has {len(expression)} characters, more than {MAX_LENGTH}",
            MAX_LENGTH,
            "split it into several constraints: all must hold",
        )
    if expression != expression.strip() or "\n" in expression or "\r" in expression:
        raise ConstraintSyntaxError("the constraint has a line break or blanks around it", 1, "write it on one line")
    depth = 0
    for column, character in enumerate(expression, 1):
        depth += (character in "([") - (character in ")]")
        # Checked before Python's own parser reads the text, because that raises a MemoryError for deep nesting.
        if depth > MAX_DEPTH:
            raise ConstraintSyntaxError(f"more than {MAX_DEPTH} nested brackets", column, "simplify it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a SyntaxWarning about a rejected text helps nobody
            return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        hint = "write == to compare" if "=" in expression and "==" not in expression else ""
        raise ConstraintSyntaxError(error.msg or "invalid syntax", max(error.offset or 1, 1), hint) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConstraintSyntaxError(f"not an expression: {error}", 1) from None


class _Checker:
    """Accepts the language's syntax trees and records how each name is used; any other raises ConstraintSyntaxError."""

    def __init__(self) -> None:
        self.subscripted: set[str] = set()
        self.scalars: set[str] = set()

    def comparison(self, node: ast.expr) -> ast.Compare:
        """Checks a whole constraint."""
        if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            _refuse(node, "`and`, `or`, `not` are not in the language", "write two constraints: all must hold")
        if not isinstance(node, ast.Compare):
            _refuse(node, "a number where true or false is needed", "compare it, for example `... == 1`")
        if type(node.ops[0]) not in COMPARISONS:
            _refuse(node, "`in`, `not in`, `is` are not in the language", "use == != < <= > >=")
        if len(node.ops) > 1:
            _refuse(node, "a chain of comparisons", "write two constraints: all must hold")
        for operand in (node.left, *node.comparators):
            self._number(operand, 1)
        return node

    def _number(self, node: ast.expr, depth: int) -> None:
        """Checks a node that must be one number."""
        if depth > MAX_DEPTH:
            _refuse(node, f"more than {MAX_DEPTH} nested operations", "split it into several constraints")
        if isinstance(node, ast.Constant):
            _check_literal(node)
        elif isinstance(node, ast.Name):
            self.scalars.add(node.id)
        elif isinstance(node, ast.BinOp):
            if type(node.op) not in ARITHMETIC:
                symbol = _REFUSED_OPERATORS.get(type(node.op), type(node.op).__name__)
                _refuse(node, f"the operator {symbol} is not in the language", "use + - * // %")
            self._number(node.left, depth + 1)
            self._number(node.right, depth + 1)
        elif isinstance(node, ast.Subscript):
            self._subscript(node)
        elif isinstance(node, ast.Call):
            self._call(node, depth)
        elif isinstance(node, ast.Attribute):
            _refuse(node, f"attribute access `.{node.attr}`", "only the call `.item()` may follow a name")
        elif isinstance(node, (ast.BoolOp, ast.Compare)):
            _refuse(node, "true or false where a number is needed", "write two constraints: all must hold")
        elif isinstance(node, ast.UnaryOp):
            _refuse(node, "a sign or `not` before a number", "move the term to the other side")
        else:
            _refuse(node, f"{type(node).__name__} is not in the language", "use names, integers and + - * // %")

    def _subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.value, ast.Name):
            _refuse(node, "only a name can be subscripted", "for example kv_indptr[-1]")
        elif literal_index(node) is None:
            _refuse(node, "the subscript is not an integer literal", "for example kv_indptr[-1]")
        else:
            self.subscripted.add(node.value.id)

    def _call(self, node: ast.Call, depth: int) -> None:
        if is_minimum(node):
            if len(node.args) != 2 or node.keywords:
                _refuse(node, "`min` of anything but two numbers", "nest it: min(a, min(b, c))")
            for operand in node.args:
                self._number(operand, depth + 1)
            return
        if not isinstance(node.func, ast.Attribute):
            hint = "the only function is `min(a, b)`; only `.item()` may follow a name or a subscript"
            _refuse(node, "a function call", hint)
        if node.func.attr != "item" or node.args or node.keywords:
            _refuse(node, f"the method `.{node.func.attr}(...)`", "the only method is `.item()`, without arguments")
        if not isinstance(node.func.value, (ast.Name, ast.Subscript)):
            _refuse(node, "`.item()` after an expression", "write it after a name or a subscript, or drop it")
        self._number(node.func.value, depth + 1)


def _refuse(node: ast.expr, message: str, hint: str) -> NoReturn:
    raise ConstraintSyntaxError(message, node.col_offset + 1, hint)


def _check_literal(node: ast.Constant) -> None:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int):
        hint = "write 1 or 0 for a flag" if isinstance(value, bool) else "use integers"
        _refuse(node, f"the literal {str(value)[:20]!r} is not an integer", hint)
    if value > MAX_MAGNITUDE:
        _refuse(node, "the number is larger than 2**64", "axes are below 2**31")


def _names(node: ast.expr) -> frozenset[str]:
    """Axes and inputs that an expression reads; `min` is none where it is called."""
    called = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in called)
