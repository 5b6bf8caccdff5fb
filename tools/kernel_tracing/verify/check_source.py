"""What the checker reads from a source file: call sites, scopes, and which expressions may supply a name.

This is deliberately independent of the tracer's index and resolver, so that a mistake there cannot hide itself here.
"""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

_LEAVES = frozenset((ast.Name, ast.Constant, ast.Load, ast.Store, ast.Del, ast.Pass, ast.alias, ast.Global))
# Methods that put their arguments into a container or a registry.
_FILLS = frozenset(("append", "add", "insert", "extend", "setdefault", "update", "register"))
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Binding(NamedTuple):
    """One thing that a name may refer to.

    Attributes:
        file, scope: where the binding is; scope is the qualified name of the function, "" for a module.
        node: a definition, an import, or the expression that is assigned.
        parameter: the parameter's name, if `node` is the function that has it.
        calls: how often the value is called before it is used: 1 for make in `x = make()`.
    """

    file: str
    scope: str
    node: ast.AST
    parameter: str = ""
    calls: int = 0


class Site(NamedTuple):
    """A call, or something else that can enter a function: a decorator, an attribute that may be a property.

    Attributes:
        node: the expression.
        functions: the names that a frame may give for the enclosing function (lambdas may be omitted).
        scope: the innermost of them.
    """

    node: ast.expr
    functions: frozenset[str]
    scope: str


@dataclass
class SourceFile:
    """One parsed file."""

    name: str
    tree: ast.Module
    definitions: dict[str, FunctionNode | ast.ClassDef] = field(default_factory=dict)
    lambdas: set[str] = field(default_factory=set)
    # (scope, name) -> what it may refer to; name -> what an attribute or a keyword of that name may be given.
    names: dict[tuple[str, str], list[Binding]] = field(default_factory=lambda: defaultdict(list))
    attributes: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    # Name of a container -> what is put into it.
    contents: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    # Last name of a decorator -> what it is applied to.
    decorated: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    # By bare names: class -> its bases, base -> the classes derived from it.
    bases: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    derived: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, list[tuple[str, ast.Call]]] = field(default_factory=lambda: defaultdict(list))
    stars: list[ast.ImportFrom] = field(default_factory=list)

    def is_class(self, qualified: str) -> bool:
        return isinstance(self.definitions.get(qualified), ast.ClassDef)


def last_name(node: ast.AST) -> str:
    """The last name of a callee: `self.layers[i]` -> layers, `make()(x)` -> make; "" if it has none."""
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""


class _Reader(ast.NodeVisitor):
    """Fills a SourceFile. `path` holds the open classes and functions."""

    _visitors: ClassVar[dict[type[ast.AST], Callable[[_Reader, Any], None] | None]] = {}

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.path: list[tuple[str, str]] = []  # (kind: class, function or lambda; name)
        self.scope = ""

    def visit(self, node: ast.AST) -> None:
        """Like NodeVisitor's, but several times faster, because it skips nodes without calls and bindings."""
        kind = type(node)
        if kind in _LEAVES:
            return
        if kind not in self._visitors:
            self._visitors[kind] = getattr(type(self), f"visit_{kind.__name__}", None)
        visitor = self._visitors[kind]
        if visitor is None:
            self.generic_visit(node)
        else:
            visitor(self, node)

    def generic_visit(self, node: ast.AST) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                for element in value:
                    if isinstance(element, ast.AST):
                        self.visit(element)
            elif isinstance(value, ast.AST):
                self.visit(value)

    def _enter(self, kind: str, name: str) -> None:
        self.path.append((kind, name))
        self._moved()

    def _leave(self) -> None:
        self.path.pop()
        self._moved()

    def _moved(self) -> None:
        self.scope = ".".join(name for _, name in self.path)

    def _bind(self, name: str, node: ast.AST, parameter: str = "") -> None:
        self.source.names[self.scope, name].append(Binding(self.source.name, self.scope, node, parameter))
        if self.path and self.path[-1][0] == "class":
            self._supply(name, node)

    def _supply(self, name: str, node: ast.AST) -> None:
        self.source.attributes[name].append(Binding(self.source.name, self.scope, node))

    def _site(self, node: ast.expr) -> None:
        """A call or a decorator, which only `Sites` notes."""

    def _definition(self, node: FunctionNode | ast.ClassDef, kind: str) -> None:
        self._bind(node.name, node)
        for decorator in node.decorator_list:
            self.source.decorated[last_name(decorator)].append(Binding(self.source.name, self.scope, node))
            if not isinstance(decorator, ast.Call):
                self._site(decorator)
            self.visit(decorator)
        self._enter(kind, node.name)
        self.source.definitions.setdefault(self.scope, node)

    def visit_FunctionDef(self, node: FunctionNode) -> None:
        self._definition(node, "function")
        self._parameters(node.args, node)
        for statement in node.body:
            self.visit(statement)
        self._leave()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._definition(node, "class")
        if self.source.definitions[self.scope] is node:
            bases = [last_name(base) for base in node.bases]
            self.source.bases[node.name] += bases
            for base in bases:
                self.source.derived[base].append(node.name)
        for part in (*node.bases, *node.keywords, *node.body):
            self.visit(part)
        self._leave()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter("lambda", "<lambda>")
        self.source.lambdas.add(self.scope)
        self._parameters(node.args, node)
        self.visit(node.body)
        self._leave()

    def _parameters(self, arguments: ast.arguments, node: ast.AST) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        for parameter in (*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if parameter is not None:
                self._bind(parameter.arg, node, parameter.arg)
                if parameter.annotation is not None:
                    self._bind(parameter.arg, parameter.annotation)
        defaults = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
        for parameter, default in (*defaults, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
            if default is not None:
                self._bind(parameter.arg, default)
                self.visit(default)

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, ast.Attribute):
            self._supply(target.attr, value)
        elif isinstance(target, ast.Subscript):
            self._fill(target.value, value)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            pairs = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            for number, element in enumerate(target.elts):
                self._assign(
                    element, value.elts[number] if pairs and isinstance(value, (ast.Tuple, ast.List)) else value
                )

    def _fill(self, container: ast.AST, value: ast.AST) -> None:
        """registry[key] = value, often inside the function that registers."""
        if isinstance(container, ast.Name):
            self.source.contents[container.id].append(Binding(self.source.name, self.scope, value))
        elif isinstance(container, ast.Attribute):
            self._supply(container.attr, value)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assign(node.target, node.annotation)
        if node.value is not None:
            self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._assign(node.target, node.iter)
        self.generic_visit(node)

    visit_AsyncFor = visit_For

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._assign(node.target, node.iter)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._assign(node.optional_vars, node.context_expr)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._bind(alias.asname or alias.name.partition(".")[0], node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.source.stars.append(node)
            else:
                self._bind(alias.asname or alias.name, node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._supply(key.value, value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._site(node)
        called = last_name(node.func)
        self.source.calls[called].append((self.scope, node))
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._supply(keyword.arg, keyword.value)
        arguments = node.args
        if called == "setattr" and len(arguments) == 3 and isinstance(arguments[1], ast.Constant):
            self._supply(str(arguments[1].value), arguments[2])
        if called == "type" and len(arguments) == 3:
            # type("Name", (Base, Mixin), {}) also makes a class.
            for base in {last_name(part) for part in ast.walk(arguments[1])}:
                self.source.derived[base].append(f"type() in {self.source.name}:{self.scope}:{node.lineno}")
        if called in _FILLS and isinstance(node.func, ast.Attribute):
            # The elements of a container may be whatever it is given.
            for argument in arguments:
                self._fill(node.func.value, argument)
        self.generic_visit(node)


class Sites(_Reader):
    """The sites of a file, by line: calls and decorators, and attributes that are read, which may be properties."""

    _visitors: ClassVar[dict[type[ast.AST], Callable[[_Reader, Any], None] | None]] = {}

    def __init__(self, source: SourceFile, text: str) -> None:
        super().__init__(SourceFile(source.name, source.tree))
        self.calls: dict[int, list[Site]] = defaultdict(list)
        self.attributes: dict[int, list[Site]] = defaultdict(list)
        # Not splitlines(): Python's lines end at \n only, never at a form feed.
        self._lines = text.split("\n")
        self._functions = self._named()
        self.visit(source.tree)

    def text_of(self, node: ast.expr) -> str:
        """An expression's source on one line, with white space collapsed."""
        # ast.get_source_segment splits the whole file for each call; columns are in UTF-8 bytes.
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        lines = [line.encode() for line in self._lines[first : last + 1]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b" ".join(lines).decode(errors="replace").split())

    def _moved(self) -> None:
        super()._moved()
        self._functions = self._named()

    def _named(self) -> frozenset[str]:
        names = [name for _, name in self.path]
        without = [name for kind, name in self.path if kind != "lambda"]
        known = {".".join(names), ".".join(without)} - {""}
        if not any(kind == "function" for kind, _ in self.path):
            known.add("<module>")
        return frozenset(known)

    def _site(self, node: ast.expr) -> None:
        self.calls[node.lineno].append(Site(node, self._functions, self.scope))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.attributes[node.lineno].append(Site(node, self._functions, self.scope))
        self.generic_visit(node)


def read(name: str, text: str) -> SourceFile:
    """Parses one file. Raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in strings concern the sources' authors
        source = SourceFile(name, ast.parse(text))
    _Reader(source).visit(source.tree)
    return source
