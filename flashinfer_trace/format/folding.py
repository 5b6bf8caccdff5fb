"""Folds a reference that several families share into the text of one of them.

A shared source has *switches*: module constants that are ``None``, ``True`` or ``False``. Folding decides by them and
leaves no trace of what is off::

    SINKS = None
    WINDOW_SIZE = None

    def run(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        '''Attention[[SINKS: with sinks]] of q [queries, dim].'''
        if sinks is not None:
            ...

- An ``if`` statement, conditional expression, ``and`` or ``or`` that they decide becomes what it decides for. Decided
are a switch, ``X is None`` of a constant or an optional parameter, ``X == literal`` of a constant, ``not``.
- A parameter annotated ``T | None`` is optional. The switch of its name in upper case says whether it is there. Where
  it is not, it goes from the signature, and from the calls of the function; where it is, its annotation is ``T``.
- In a docstring, ``[[CONDITION: text]]`` is its text where the condition holds; its paragraph is filled again.
- Then the switches are dropped, and the functions, constants and imports that only what is off used.

The text is edited at the places that the syntax tree names, so comments and layout stay.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import accumulate

WIDTH = 120
INDENT = "    "
CONDITIONAL_TEXT = re.compile(r"\s*\[\[(?P<condition>[^:\]]+):(?P<text>.*?)\]\]", re.DOTALL)

_Edit = tuple[int, int, str]


class FoldingError(ValueError):
    """A shared source cannot be folded. The message names the line of what was folded so far, and the fix."""


def literals(module: ast.Module) -> dict[str, object]:
    """The module constants (upper case) that a literal sets, by name."""
    found: dict[str, object] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found.update((t.id, node.value.value) for t in node.targets if isinstance(t, ast.Name) and t.id.isupper())
    return found


def is_switch(value: object) -> bool:
    """Whether a module constant with this value is decided when a reference is folded."""
    return value is None or isinstance(value, bool)


def fold(source: str) -> str:
    """`source` as its own switches decide it; as it is, if it has none and no conditional text.

    Raises:
        FoldingError: something that is off is still read, or a call passes something else for an absent parameter.
    """
    module = ast.parse(source)
    values = literals(module)
    switches = {name for name, value in values.items() if is_switch(value)}
    if not switches and "[[" not in source:
        return source
    optional = [one.arg for one in ast.walk(module) if isinstance(one, ast.arg) and _required_type(one) is not None]
    values |= {name: values[name.upper()] for name in optional if name.upper() in values}
    before = _Folding(source, values).used()
    for edits in (_Folding.of_docstrings, _Folding.of_parameters):
        source = _edited(source, edits(_Folding(source, values)))
    while edits_now := _Folding(source, values).of_branches():
        source = _edited(source, edits_now)
    while edits_now := _Folding(source, values).of_unused(before, switches):
        source = _edited(source, edits_now)
    return source


def _edited(source: str, edits: list[_Edit]) -> str:
    data = source.encode()
    for start, end, text in sorted(edits, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data.decode()


class _Folding:
    """One pass over a source. Positions are in bytes, as those of syntax trees are."""

    def __init__(self, source: str, values: Mapping[str, object]) -> None:
        self.lines = source.encode().splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, self.lines))]
        self.module = ast.parse(source)
        self.functions = {node.name: node for node in self.module.body if isinstance(node, ast.FunctionDef)}
        self.values = values

    def span(self, node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[end_line - 1] + end_column

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return b"".join(self.lines)[start:end].decode()

    def whole_lines(self, first: int, last: int) -> str:
        """The lines `first` to `last`, from 1."""
        return b"".join(self.lines[first - 1 : last]).decode()

    def truth(self, test: ast.expr) -> bool | None:
        """The value that the constants give `test` to be; None if they do not."""
        match test:
            case ast.Name(id=name) if name in self.values:
                return self.values[name] is not None and self.values[name] is not False
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=operands):
                decisive = isinstance(op, ast.Or)
                truths = [self.truth(operand) for operand in operands]
                return decisive if decisive in truths else None if None in truths else not decisive
            case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[ast.Constant(value=other)]):
                if name in self.values and (other is None or isinstance(op, ast.Eq | ast.NotEq)):
                    return (self.values[name] == other) is isinstance(op, ast.Is | ast.Eq)
        return None

    def of_docstrings(self) -> list[_Edit]:
        edits = []
        bodies = [self.module.body, *(function.body for function in self.functions.values())]
        for first, *_ in bodies:
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and "[[" in self.text(first):
                indent = " " * first.col_offset
                paragraphs = [self.paragraph(one, indent) for one in re.split(r"\n[ \t]*\n", self.text(first))]
                paragraphs = [one for one in paragraphs if one]
                if paragraphs[-1].strip() == '"""':
                    closing = paragraphs.pop()
                    paragraphs[-1] += closing if len(paragraphs) > 1 else closing.strip()
                edits.append((*self.span(first), "\n\n".join(paragraphs).lstrip()))
        return edits

    def paragraph(self, text: str, indent: str) -> str:
        if "[[" not in text:
            return text
        text = CONDITIONAL_TEXT.sub(self.conditional, text)
        closing = '\n"""' if re.search(r'\n\s*"""$', text) else ""
        filled = textwrap.fill(
            " ".join(text.removesuffix('"""' if closing else "").split()),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return filled + closing.replace("\n", f"\n{indent}")

    def conditional(self, match: re.Match[str]) -> str:
        test = ast.parse(str(match["condition"]).strip()).body[0]
        holds = self.truth(test.value) if isinstance(test, ast.Expr) else None
        if holds is None:
            raise FoldingError(f"the constants do not decide the condition of {match[0]!r} in a docstring")
        text = match["text"].strip() if holds else ""
        return text if text.startswith((",", ".")) else f" {text}" if text else ""

    def of_parameters(self) -> list[_Edit]:
        """Optional parameters that are off, and what calls pass for them, are removed; others become required."""
        edits: list[_Edit] = []
        absent: dict[str, list[tuple[int, str]]] = {}
        for function in self.functions.values():
            arguments = function.args.args
            for i, argument in enumerate(arguments):
                if (required := _required_type(argument)) is None or argument.annotation is None:
                    continue
                name = argument.arg
                if i == 0 or self.values.get(name, "") not in (None, True):
                    told = f"needs a constant {name.upper()} that is None or True, and a parameter before it"
                    raise FoldingError(f"line {argument.lineno}: the optional parameter {name} {told}")
                if self.values[name]:
                    edits.append((*self.span(argument.annotation), self.text(required)))
                else:
                    absent.setdefault(function.name, []).append((i, name))
                    edits.append((self.span(arguments[i - 1])[1], self.span(argument)[1], ""))
        for node in ast.walk(self.module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                for i, name in absent.get(node.func.id, ()):
                    if i >= len(node.args) or self.text(node.args[i]) not in (name, "None"):
                        told = f"pass {name} or None, by position, for {name} of {node.func.id}"
                        raise FoldingError(f"line {node.lineno}: {told}")
                    edits.append((self.span(node.args[i - 1])[1], self.span(node.args[i])[1], ""))
        return edits

    def of_branches(self) -> list[_Edit]:
        """Decided branches; what is inside one of them waits for the next pass, which has other positions."""
        edits: list[_Edit] = []
        for node in ast.walk(self.module):  # outer ones first
            edit = self.of_branch(node)
            if edit is not None and not any(start < edit[1] and edit[0] < end for start, end, _ in edits):
                edits.append(edit)
        return edits

    def of_branch(self, node: ast.AST) -> _Edit | None:
        if isinstance(node, ast.If) and (holds := self.truth(node.test)) is not None:
            return self.of_if(node, holds)
        if isinstance(node, ast.IfExp) and (holds := self.truth(node.test)) is not None:
            return (*self.span(node), self.text(node.body if holds else node.orelse))
        if isinstance(node, ast.BoolOp) and self.truth(node) is None:
            rest = [operand for operand in node.values if self.truth(operand) is None]
            if len(rest) < len(node.values):
                word = " or " if isinstance(node.op, ast.Or) else " and "
                return (*self.span(node), word.join(map(self.text, rest)))
        return None

    def of_if(self, node: ast.If, holds: bool) -> _Edit:
        """The statement's lines become those of the branch that is taken, with their comments."""
        last = node.end_lineno or node.lineno
        if not self.lines[node.lineno - 1].partition(b"#")[0].rstrip().endswith(b":"):
            raise FoldingError(f"line {node.lineno}: write the condition on one line and the branch below it")
        is_elif = self.lines[node.lineno - 1].lstrip().startswith(b"elif")
        body_end = node.body[-1].end_lineno or node.lineno
        indent = " " * node.col_offset
        if holds:
            taken = self.whole_lines(node.lineno + 1, body_end)
            taken = f"{indent}else:\n{taken}" if is_elif else _dedented(taken)
        elif not node.orelse:
            taken = ""
        elif self.is_elif(node.orelse[0]):
            taken = self.whole_lines(node.orelse[0].lineno, last)
            taken = taken if is_elif else taken.replace("elif", "if", 1)
        else:
            after = range(body_end + 1, node.orelse[0].lineno)
            at = next(line for line in after if self.whole_lines(line, line).strip().startswith("else:"))
            taken = self.whole_lines(at, last) if is_elif else _dedented(self.whole_lines(at + 1, last))
        return self.starts[node.lineno - 1], self.starts[last], taken

    def is_elif(self, node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and self.lines[node.lineno - 1].lstrip().startswith(b"elif")

    def used(self) -> set[str]:
        """The functions that run reaches, and all names that something reads."""
        reached, queue = set[str](), ["run"]
        while queue:
            name = queue.pop()
            if name in self.functions and name not in reached:
                reached.add(name)
                queue += _names_in(self.functions[name])
        return reached | (set(_names_in(self.module)) - self.functions.keys())

    def of_unused(self, before: set[str], switches: set[str]) -> list[_Edit]:
        """Switches, and what was used `before` and is used no more; functions first, as they use others."""
        used = self.used()
        gone = (before | switches) - used
        if functions := [self.statement(node) for name, node in self.functions.items() if name in gone]:
            return functions
        for node in ast.walk(self.module):
            if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
                continue
            if node.id in switches or self.values.get(node.id, "") is None:
                raise FoldingError(f"line {node.lineno}: {node.id} is read where the switches do not decide")
        edits = []
        for node in self.module.body:
            match node:
                case ast.Import(names=[ast.alias(name=name)]) | ast.Assign(targets=[ast.Name(id=name)]) if name in gone:
                    edits.append(self.statement(node))
        return edits

    def statement(self, node: ast.stmt) -> _Edit:
        """Removes a statement of the module with the comments right above it, and the blank lines of a function."""
        first, last = node.lineno, node.end_lineno or node.lineno
        while first > 1 and self.lines[first - 2].startswith(b"#"):
            first -= 1
        while last < len(self.lines) and not self.lines[last].strip() and self.blank_above(first):
            last += 1
        return self.starts[first - 1], self.starts[last], ""

    def blank_above(self, line: int) -> bool:
        return line < 2 or not self.lines[line - 2].strip()


def _required_type(argument: ast.arg) -> ast.expr | None:
    """T of a parameter annotated ``T | None``; None for any other."""
    match argument.annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return left
    return None


def _names_in(node: ast.AST) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load))


def _dedented(lines: str) -> str:
    return "".join(line.removeprefix(INDENT) for line in lines.splitlines(keepends=True))
