"""The mutants of one reference: every operator at every place, each with an id that its content decides."""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family
from tools.mutate.operators import EXPRESSIONS, Operator, Place
from tools.mutate.statements import STATEMENTS
from tools.mutate.torch_operators import CALLS
from tools.mutate.value_operators import VALUES

OPERATORS: dict[str, Operator] = {**EXPRESSIONS, **CALLS, **STATEMENTS, **VALUES}

#: Parts of a node that hold no computation.
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "msg", "type_comment")


@dataclass(frozen=True)
class Mutant:
    """One way in which a reference could be wrong.

    Attributes:
        family: whose reference it is.
        line: of the embedded reference.
        operator: the name in `OPERATORS`.
        number: counts what the operator yields on this line, from 1.
        function: the function that it changes, ``<module>`` outside one.
        before, after: the changed statement (of a compound one, its head), as `ast.unparse` writes it.
        source: the whole changed module, with the Definition's own constants.
        content: hash of function, before and after: the same mutant of shared code has it in every family.
    """

    family: str
    line: int
    operator: str
    number: int
    function: str
    before: str
    after: str
    source: str
    content: str

    @property
    def id(self) -> str:
        return f"{self.family}:{self.line}:{self.operator}:{self.number}"


@dataclass(frozen=True)
class Location:
    """A node and where it hangs in the tree: `parent.field`, or `parent.field[position]`.

    It lies within `body[top]` of the module, and if that is a function, within `body[inner]` of it.
    """

    node: ast.AST
    parent: ast.AST
    field: str
    position: int | None
    statement: ast.stmt
    function: ast.FunctionDef | None
    top: int
    inner: int

    def put(self, node: ast.AST) -> None:
        if self.position is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.position] = node


def size_between(definition: Definition, family: Family) -> int:
    """Half the largest const axis, if that is more than any size of the small twin; otherwise 0."""
    half = max(definition.const_axes.values(), default=0) // 2
    return half if half > 2 * max(family.twin.values(), default=0) else 0


def mutants(definition: Definition, family: Family) -> list[Mutant]:
    """All mutants of the embedded reference, in order of line and operator; no two have the same source.

    Constants named after axes are left alone: a Definition's axes decide them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(definition.reference)
    remove_docstrings(tree)
    axes = {axis.upper() for axis in definition.const_axes}
    size = size_between(definition, family)
    module = Text(tree)
    seen = {module.joined()}
    numbers: Counter[tuple[int, str]] = Counter()
    found = []
    for location in list(locations(tree, axes)):
        place = Place(location.parent, location.field, location.function, size)
        for name, operator in OPERATORS.items():
            for replacement in operator(location.node, place):
                mutant = build(module, location, replacement, name, family.name, numbers, seen)
                if mutant is not None:
                    found.append(mutant)
    return sorted(found, key=lambda mutant: (mutant.line, mutant.operator, mutant.number))


class Text:
    """A module as `ast.unparse` writes it, statement by statement: only the one that changes is written again.

    Functions are taken apart into their head and the statements of their body.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._texts = [self._parts(statement) for statement in tree.body]
        self._heads: dict[ast.AST, str] = {}

    def head(self, statement: ast.AST) -> str:
        """The head of a statement as it was at first."""
        if statement not in self._heads:
            self._heads[statement] = head(statement)
        return self._heads[statement]

    def joined(self, location: Location | None = None) -> str:
        """The whole module, with what now stands at `location`: a blank line precedes functions."""
        texts = list(self._texts)
        if location is not None:
            texts[location.top] = self._changed(location)
        pairs = zip(self._tree.body, texts, strict=True)
        lines = (("\n\n" if isinstance(node, ast.FunctionDef) else "\n") + "\n".join(text) for node, text in pairs)
        return "".join(lines).lstrip()

    def _changed(self, location: Location) -> list[str]:
        top = self._tree.body[location.top]
        if not isinstance(top, ast.FunctionDef):
            return [ast.unparse(top)]
        texts = list(self._texts[location.top])
        texts[location.inner + 1] = indented(top.body[location.inner])
        return texts

    @staticmethod
    def _parts(statement: ast.stmt) -> list[str]:
        if not isinstance(statement, ast.FunctionDef):
            return [ast.unparse(statement)]
        body, statement.body = statement.body, []
        try:
            return [ast.unparse(statement), *map(indented, body)]
        finally:
            statement.body = body


def indented(statement: ast.stmt) -> str:
    """A statement of a function's body. `ast.unparse` writes strings on one line, so no line starts inside one."""
    return textwrap.indent(ast.unparse(statement), "    ")


def build(
    module: Text,
    location: Location,
    replacement: ast.AST,
    operator: str,
    family: str,
    numbers: Counter[tuple[int, str]],
    seen: set[str],
) -> Mutant | None:
    """The mutant with `replacement` at `location`, or None if another has the same source."""
    before = module.head(location.statement)
    location.put(ast.fix_missing_locations(replacement))
    try:
        source = module.joined(location)
        after = head(replacement if location.node is location.statement else location.statement)
    finally:
        location.put(location.node)
    if source in seen:
        return None
    seen.add(source)
    line = getattr(location.node, "lineno", location.statement.lineno)
    numbers[line, operator] += 1
    function = location.function.name if location.function else "<module>"
    content = hashlib.sha256("\0".join((function, before, after)).encode()).hexdigest()[:12]
    return Mutant(family, line, operator, numbers[line, operator], function, before, after, source, content)


def head(statement: ast.AST) -> str:
    """A statement as text; of a compound one the first line, and where its body ends counts for deletions only."""
    return ast.unparse(statement).split("\n", 1)[0]


def remove_docstrings(tree: ast.Module) -> None:
    """Takes docstrings away: they compute nothing, and parsing each mutant is faster without them."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]


def locations(tree: ast.Module, axes: set[str]) -> Iterator[Location]:
    """Every node that operators may change, statements included, in order of the source."""
    for position, statement in enumerate(tree.body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)) or is_axis(statement, axes):
            continue
        if isinstance(statement, ast.FunctionDef):
            for own, inner in enumerate(statement.body):
                yield Location(inner, statement, "body", own, inner, statement, position, own)
                yield from children(inner, inner, statement, position, own)
        else:
            yield Location(statement, tree, "body", position, statement, None, position, 0)
            yield from children(statement, statement, None, position, 0)


def is_axis(statement: ast.stmt, axes: set[str]) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(t, ast.Name) and t.id in axes for t in statement.targets
    )


def children(
    node: ast.AST, statement: ast.stmt, function: ast.FunctionDef | None, top: int, inner: int
) -> Iterator[Location]:
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS or (isinstance(node, ast.keyword) and node.arg == "device"):
            continue
        items = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for position, child in items:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.operator, ast.cmpop, ast.expr_context)):
                continue
            own = child if isinstance(child, ast.stmt) else statement
            yield Location(child, node, field, position, own, function, top, inner)
            yield from children(child, own, function, top, inner)


def sample(found: Iterable[Mutant], share: int) -> list[Mutant]:
    """About one mutant in `share`, small enough for CI, by content hash: the same ones until their code changes."""
    return [mutant for mutant in found if int(mutant.content, 16) % share == 0]
