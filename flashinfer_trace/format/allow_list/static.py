"""Checks a reference's source against the allow-list (`allowed`): nothing is run or imported, and torch is not needed.

The validator reports what is found here for every Definition, and `compile_reference` refuses to compile a reference
with any of it, so a Definition that was never validated is held to the same list.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashinfer_trace.format.allow_list import allowed

_BUILTINS = frozenset(dir(builtins))

_PROPOSE = "flashinfer_trace/format/allow_list/allowed.py lists what is allowed, and says how to propose an addition"


@dataclass(frozen=True)
class Violation:
    """One construct that a reference may not use.

    Attributes:
        rule: id of the validator's rule, for example ``reference-torch``.
        line: line in the reference, counted from 1.
        message: names the construct.
        hint: how to fix it, or how to propose an addition to the list.
    """

    rule: str
    line: int
    message: str
    hint: str


def check(
    module: ast.Module, table: symtable.SymbolTable, op_type: str | None, nodes: list[ast.AST] | None = None
) -> list[Violation]:
    """Finds what a parsed reference must not use, rule by rule."""
    found: list[Violation] = []

    def add(rule: str, node: ast.AST, message: str, hint: str) -> None:
        found.append(Violation(rule, getattr(node, "lineno", 1), message, hint))

    nodes = list(ast.walk(module)) if nodes is None else nodes
    _check_statements(module, add)
    _check_state(nodes, add)
    _check_syntax(nodes, add)
    bound = _check_imports(module, nodes, add)
    _check_names(nodes, bound, op_type in allowed.DRAWING_OP_TYPES, add)
    _check_types(nodes, bound, add)
    _check_ties(nodes, bound, add)
    _check_contexts(nodes, add)
    check_text(nodes, add)
    if op_type in allowed.DRAWING_OP_TYPES:
        check_memory(nodes, bound, add)
    _check_globals(nodes, table, add)
    return found


def is_literal(node: ast.expr) -> bool:
    """Numbers, strings, booleans, None, and tuples of them; a minus sign is allowed."""
    if isinstance(node, ast.Tuple):
        return all(is_literal(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant)


def _check_statements(module: ast.Module, add: Add) -> None:
    """A module holds a docstring, imports, constants that are literals, and functions."""
    for index, statement in enumerate(module.body):
        targets: list[ast.expr] = []
        value = None
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
            continue
        if index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            value = statement.value
        if value is not None and is_literal(value) and all(isinstance(target, ast.Name) for target in targets):
            continue
        if isinstance(statement, (ast.ClassDef, ast.AsyncFunctionDef)):
            continue  # _check_state reports them
        hint = "only a docstring, imports, constants that are literals, and functions; move it into run()"
        kind = "an assignment that is not a literal" if targets else f"the statement {type(statement).__name__}"
        add("reference-statement", statement, f"{kind} at module level", hint)


#: Nodes that keep state, which have a rule of their own.
_STATE = (ast.Global, ast.Nonlocal, ast.ClassDef, ast.AsyncFunctionDef, ast.Yield, ast.YieldFrom, ast.Await)
_MAY_KEEP_STATE = (*_STATE, ast.Attribute, ast.arguments)
#: Nodes that spell a name.
_NAMING = (
    ast.Name,
    ast.Attribute,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.arg,
    ast.keyword,
    ast.alias,
)


def _check_state(nodes: list[ast.AST], add: Add) -> None:
    hint = "a reference is a pure function of its inputs"
    for node in [one for one in nodes if isinstance(one, _MAY_KEEP_STATE)]:
        if isinstance(node, _STATE):
            add("reference-state", node, f"{type(node).__name__} keeps state", hint)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            add("reference-state", node, f"the attribute .{node.attr[:80]} is assigned", hint)
        elif isinstance(node, ast.arguments):
            for default in (*node.defaults, *(default for default in node.kw_defaults if default)):
                if not is_literal(default) and not isinstance(default, (ast.Name, ast.Attribute)):
                    add("reference-state", default, "a default that is not a literal is kept between calls", hint)


def _check_contexts(nodes: list[ast.AST], add: Add) -> None:
    """A decorator and a context are torch.no_grad: others could bind what is kept, or change what torch does."""
    found = [("decorator", one) for node in nodes if isinstance(node, ast.FunctionDef) for one in node.decorator_list]
    found += [("context", item.context_expr) for node in nodes if isinstance(node, ast.With) for item in node.items]
    for kind, node in found:
        if ast.unparse(node.func if isinstance(node, ast.Call) else node) != "torch.no_grad":
            hint = f"a reference is a pure function of its inputs; torch.no_grad() is the only {kind} that it needs"
            add("reference-state", node, f"a {kind} can change what stays between calls, or what torch does", hint)


def _check_syntax(nodes: list[ast.AST], add: Add) -> None:
    for node in nodes:
        name = type(node).__name__
        if name not in allowed.NODES and not isinstance(node, _STATE):
            add("reference-construct", node, f"the construct {name} is not allowed", _PROPOSE)


def _check_imports(module: ast.Module, nodes: list[ast.AST], add: Add) -> dict[str, str]:
    """Checks import statements; returns local name -> dotted path of the module or member it stands for."""
    bound: dict[str, str] = {}
    top_level = {id(statement) for statement in module.body}
    hint = f"a reference imports {' '.join(sorted(allowed.MODULES))} only"
    for node in [one for one in nodes if isinstance(one, (ast.Import, ast.ImportFrom))]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in allowed.MODULES:
                    add("reference-import", node, f"imports {alias.name[:80]}", hint)
                # `import a.b` binds a; `import a.b as c` binds c to a.b.
                package = alias.name.split(".")[0]
                bound[alias.asname or package] = alias.name if alias.asname else package
        else:
            source = "." * node.level + (node.module or "")
            for alias in node.names:
                if source not in allowed.MODULES or alias.name == "*":
                    add("reference-import", node, f"imports {alias.name[:80]} from {source[:80]}", hint)
                bound[alias.asname or alias.name] = f"{source}.{alias.name}"
        if id(node) not in top_level:
            add("reference-import", node, "an import inside a function", "import at the top of the module")
    return bound


def _check_names(nodes: list[ast.AST], bound: dict[str, str], draws: bool, add: Add) -> None:
    """Dunder names anywhere, paths that begin at a module, and attributes of everything else."""
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    paths = allowed.PATHS | (allowed.DRAWING_PATHS if draws else frozenset())
    for node in [one for one in nodes if isinstance(one, (*_NAMING, ast.ImportFrom))]:
        dunder = next((name for name in _spelled(node) if name.startswith("__") or name.endswith("__")), None)
        if dunder is not None:
            add("reference-attribute", node, f"the dunder name {dunder[:80]}", "a reference needs none")
        elif isinstance(node, ast.ImportFrom) and node.module in allowed.MODULES:
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if path not in paths | allowed.MODULES and alias.name != "*" and not _is_dunder(alias.name):
                    _refuse_path(path, path, node, add)
        elif isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            _check_chain(node, bound, paths, draws, add)


def _check_chain(
    node: ast.Attribute | ast.Name, bound: dict[str, str], paths: frozenset[str], draws: bool, add: Add
) -> None:
    """A whole chain of attributes: a path from a module as far as it goes, then attributes of what it stands for."""
    parts: list[str] = []
    start: ast.expr = node
    while isinstance(start, ast.Attribute):
        parts.insert(0, start.attr)
        start = start.value
    if isinstance(start, ast.Name) and start.id in bound:
        path = bound[start.id]
        while path in allowed.MODULES and parts:
            path = f"{path}.{parts.pop(0)}"
        if path in allowed.MODULES:
            add("reference-torch", node, f"the module {path} as a value", "write the whole path of what is called")
            return
        # The import of another module is reported already.
        if path.split(".")[0] in ("torch", "math") and path not in paths and not _is_dunder(path.rsplit(".", 1)[-1]):
            _refuse_path(".".join([path, *parts]), path, node, add)
            return
    attributes = allowed.ATTRIBUTES | (allowed.DRAWING_ATTRIBUTES if draws else frozenset())
    for name in parts:
        if name not in attributes and not _is_dunder(name):
            add("reference-attribute", node, f"the attribute .{name[:80]} is not allowed", _attribute_hint(name, draws))


def _refuse_path(shown: str, path: str, node: ast.AST, add: Add) -> None:
    hint = _PROPOSE
    if path in allowed.DRAWING_PATHS:
        hint = f"only the op_types {' '.join(sorted(allowed.DRAWING_OP_TYPES))} draw, or use memory that a draw fills"
    add("reference-torch", node, f"{shown[:80]} is not allowed", hint)


def _attribute_hint(name: str, draws: bool) -> str:
    if name.startswith("format"):
        return "use an f-string"
    if name in allowed.DRAWING_ATTRIBUTES and not draws:
        return f"only the op_types {' '.join(sorted(allowed.DRAWING_OP_TYPES))} draw"
    return _PROPOSE


def _is_dunder(name: str) -> bool:
    return name.startswith("__") or name.endswith("__")


def _spelled(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
        yield node.arg
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
        if node.asname:
            yield node.asname


#: Nodes that may say what type a value is.
_TYPED = frozenset({ast.arg, ast.AnnAssign, ast.FunctionDef, ast.Call})
_NAMES = frozenset({ast.Attribute, ast.Name})


def _check_types(nodes: list[ast.AST], bound: dict[str, str], add: Add) -> None:
    """torch.Tensor says what a value is, in annotations and in isinstance(); called, it gives undefined memory."""
    types: list[ast.expr | None] = []
    checked: list[ast.expr] = []
    for node in [one for one in nodes if one.__class__ in _TYPED]:
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            types += [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            types += [node.returns]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            checked += node.args[1:2]
    if checked and not _binds("isinstance", nodes):
        types += checked
    named: set[ast.AST | None] = set()
    while types:  # a type is a name, or is made of others: `A | B`, `(A, B)`, `tuple[A, B]`
        part = types.pop()
        if part.__class__ in _NAMES:
            named |= {part}
        elif isinstance(part, ast.Tuple):
            types += part.elts
        elif isinstance(part, ast.BinOp):
            types += [part.left, part.right]
        elif isinstance(part, ast.Subscript):
            types += [part.value, part.slice]
    aliases = {alias for alias, path in bound.items() if path == "torch.Tensor"}
    for node in [one for one in nodes if one.__class__ in _NAMES]:
        is_type = isinstance(node, ast.Name) and node.id in aliases
        if (is_type or (isinstance(node, ast.Attribute) and node.attr == "Tensor")) and node not in named:
            hint = "name it in annotations and in isinstance() only; torch.tensor and torch.zeros make tensors"
            add("reference-torch", node, "torch.Tensor as a value can be called, and gives undefined memory", hint)


def _binds(name: str, nodes: list[ast.AST]) -> bool:
    """Whether anything but a use of it spells a name."""
    return any(
        name in _spelled(node) for node in nodes if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    )


#: Functions and methods that put values in order.
_ORDERS = ("argsort", "sort", "topk")


def _check_ties(nodes: list[ast.AST], bound: dict[str, str], add: Add) -> None:
    """Orders whose indices are used say which of equal values comes first: they are stable sorts.

    The values alone are the same however ties fall: ``.values`` of a sort or a topk needs nothing. A function that is
    passed on or bound to a name is refused, because its calls cannot be recognized.
    """
    values_only = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "values"}
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in [one for one in nodes if isinstance(one, (ast.Attribute, ast.Name))]:
        name = _order(node, bound)
        if name is None:
            continue
        call = calls.get(id(node))
        if call is None:
            hint = f"call {name}() where its result is used"
            add("reference-ties", node, f"{name} as a value does not show how it is called", hint)
            continue
        if id(call) in values_only:
            continue
        stable = any(
            keyword.arg == "stable" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in call.keywords
        )
        if name == "topk":
            hint = "take the first of a stable argsort, or .values if only they are used"
            add("reference-ties", call, "topk() does not say which of equal values it takes", hint)
        elif not stable:
            hint = "write stable=True, or take .values if only they are used"
            add("reference-ties", call, f"{name}() does not say which of equal values comes first", hint)


def _order(node: ast.Attribute | ast.Name, bound: dict[str, str]) -> str | None:
    """Which of `_ORDERS` a name or an attribute stands for, if any; an imported name for what was imported."""
    if isinstance(node, ast.Attribute):
        return node.attr if node.attr in _ORDERS else None
    module, _, name = bound.get(node.id, "").rpartition(".")
    return name if module == "torch" and name in _ORDERS and isinstance(node.ctx, ast.Load) else None


def _check_globals(nodes: list[ast.AST], table: symtable.SymbolTable, add: Add) -> None:
    """Names that are looked up in the module: they are defined there, or harmless builtins."""
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    missing: set[str] = set()
    queue = [table]
    while queue:
        scope = queue.pop()
        queue += scope.get_children()
        missing |= {
            s.get_name()
            for s in scope.get_symbols()
            if s.is_referenced() and s.is_global() and s.get_name() not in defined
        }
        if scope is table:  # in the module itself a name that is only read is not "global" in every Python
            missing |= {s.get_name() for s in scope.get_symbols() if s.is_referenced()} - defined
    missing -= allowed.BUILTINS
    reported: set[str] = set()
    for node in nodes:
        # _check_names reports dunder names.
        if isinstance(node, ast.Name) and node.id in missing - reported and not node.id.startswith("__"):
            reported.add(node.id)
            if node.id in _BUILTINS:
                hint = f"harmless builtins only: {' '.join(sorted(allowed.BUILTINS))}"
                add("reference-builtin", node, f"the builtin {node.id}", hint)
            else:
                add("reference-undefined", node, f"the name {node.id[:80]} is not defined", "define or import it")


#: Adds one violation: rule, node, message, hint.
Add = Callable[[str, ast.AST, str, str], None]

RULE = "reference-undetermined"
_TEXT_HINT = "make text of values in messages of errors only"
#: Functions of torch that give memory as it was, and methods that write to all of it.
_MEMORY = frozenset({"empty", "empty_like"})
_FILL = frozenset({"exponential_", "uniform_"})


def check_text(nodes: list[ast.AST], add: Add) -> None:
    """Refuses f-strings, and text that `%` can put values into, but in docstrings and messages of errors."""
    said = {id(part) for node in nodes for place in _places(node) for part in ast.walk(place)}
    for node in nodes:
        if id(node) in said:
            continue
        if isinstance(node, ast.JoinedStr):
            said |= {id(part) for part in ast.walk(node)}
            add(RULE, node, "an f-string can show a function's address in memory", _TEXT_HINT)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and "%" in repr(node.value):
            add(RULE, node, "values can be put into a text with %", _TEXT_HINT)


def _places(node: ast.AST) -> Iterator[ast.AST]:
    """Parts of a node in which any text may stand."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    elif isinstance(node, ast.Assert) and node.msg is not None:
        yield node.msg
    elif isinstance(node, ast.Raise) and node.exc is not None:
        yield node.exc


def check_memory(nodes: list[ast.AST], bound: Mapping[str, str], add: Add) -> None:
    """Refuses memory that is not filled at once."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    filled = {id(c.func.value) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in _FILL}
    called = {id(call.func) for call in calls if id(call) in filled}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Name) and node.id in bound:
            name = bound[node.id].rpartition(".")[2]
        else:
            continue
        if name in _MEMORY and id(node) not in called:
            hint = f"write {name}(...).exponential_() or .uniform_()"
            add(RULE, node, f"the memory of {name}() is used before it is filled", hint)
