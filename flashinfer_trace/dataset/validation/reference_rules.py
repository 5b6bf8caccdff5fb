"""Rules on the embedded reference, from its source alone: nothing is run or imported."""

from __future__ import annotations

import ast
import re
import symtable
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from functools import cached_property
from pathlib import Path

from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings, quote
from flashinfer_trace.format.allow_list import static
from flashinfer_trace.format.naming import NamePattern

#: Most problems of one rule in one reference: the first ones tell what is wrong.
MAX_OF_ONE_RULE = 20

#: Deepest syntax tree. Plain code has about 20 levels; each `elif` and each operand of a long sum adds one.
MAX_DEPTH = 100

POINTER = "/reference"


class Reference:
    """A parsed reference."""

    def __init__(self, source: str, module: ast.Module, table: symtable.SymbolTable) -> None:
        self.source = source
        self.module = module
        self.table = table

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, outer ones first."""
        return list(ast.walk(self.module))

    @cached_property
    def constants(self) -> list[tuple[str, object, int]]:
        """(name, value, line) of each module-level assignment of a literal."""
        found = []
        for statement in self.module.body:
            targets, value = _assignment(statement)
            if value is not None and static.is_literal(value):
                found += [(t.id, _literal(value), statement.lineno) for t in targets if isinstance(t, ast.Name)]
        return found

    @cached_property
    def runs(self) -> list[ast.FunctionDef]:
        """Top-level functions called run."""
        return [node for node in self.module.body if isinstance(node, ast.FunctionDef) and node.name == "run"]


def parse_reference(candidate: Candidate, report: Findings) -> Reference | None:
    """Parses the reference (rule reference-syntax); None if there is none or it is not Python."""
    source = candidate.reference
    if source is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in somebody's string is ruff's matter
            module = ast.parse(source)
            if _depth(module) > MAX_DEPTH:  # Pythons differ in what they take; the rule does not
                raise RecursionError
            compile(module, "reference", "exec", dont_inherit=True)  # some errors are the compiler's: a stray break
            return Reference(source, module, symtable.symtable(source, "reference", "exec"))
    except SyntaxError as error:
        report.add(
            "reference-syntax",
            f"reference line {error.lineno or 1}: {error.msg}",
            "fix the source under reference/",
            POINTER,
        )
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "nested too deeply" if not isinstance(error, ValueError) else str(error)
        report.add("reference-syntax", f"reference line 1: {reason}", "simplify it", POINTER)
    return None


def _depth(module: ast.Module) -> int:
    """Levels of a tree, at most one more than `MAX_DEPTH`; iterative, so no tree overflows the stack."""
    depth = 0
    nodes: list[ast.AST] = list(module.body)
    while nodes and depth <= MAX_DEPTH:
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


class _Notes:
    """Adds problems with the line in the reference, and stops after some of each rule."""

    def __init__(self, report: Findings) -> None:
        self.report = report
        self.counts: Counter[str] = Counter()

    def add(self, rule: str, node: ast.AST | int, message: str, hint: str = "") -> None:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        self.counts[rule] += 1
        if self.counts[rule] <= MAX_OF_ONE_RULE:
            self.report.add(rule, f"reference line {line}: {message}", hint, POINTER)


def check_reference(reference: Reference, candidate: Candidate, report: Findings) -> None:
    """Checks everything that the source shows."""
    notes = _Notes(report)
    for violation in static.check(reference.module, reference.table, candidate.op_type, reference.nodes):
        notes.add(violation.rule, violation.line, violation.message, violation.hint)
    check_constant_values(reference, candidate, report)
    _check_bindings(reference, notes)
    if len(reference.runs) != 1:
        found = f"there are {len(reference.runs)} top-level run()" if reference.runs else "there is no top-level run()"
        line = reference.runs[1].lineno if reference.runs else 1
        notes.add("reference-run", line, found, "exactly one `def run(<inputs in declared order>):`")
        return
    run = reference.runs[0]
    if isinstance(candidate.data.get("inputs"), dict):
        _check_parameters(run, list(candidate.data["inputs"]), notes)
    if isinstance(candidate.data.get("outputs"), dict):
        _check_returns(run, len(candidate.data["outputs"]), notes)
    _check_asserts(run, candidate, notes)


def check_constant_values(reference: Reference, candidate: Candidate, report: Findings) -> None:
    """Checks that constants named after const axes have their values."""
    notes = _Notes(report)
    axes = {axis.upper(): axis for axis in candidate.const_axes}
    for name, value, line in reference.constants:
        if (axis := axes.get(name)) is not None and value != candidate.const_axes[axis]:
            message = f"{name} is {quote(value)}, but the axis {axis} is {candidate.const_axes[axis]}"
            notes.add("reference-constant", line, message, "run `flashinfer-trace sync`")


def _check_bindings(reference: Reference, notes: _Notes) -> None:
    """Module-level names are bound once; a function that hides a constant would assert its own value."""
    bound: set[str] = set()
    functions: set[str] = set()
    modules: set[str] = set()
    for statement in reference.module.body:
        names = [target.id for target in _assignment(statement)[0] if isinstance(target, ast.Name)]
        if isinstance(statement, ast.FunctionDef):
            # Two functions run() are the matter of reference-run.
            names = [] if statement.name == "run" and "run" in functions else [statement.name]
            functions.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            # `import torch` and `import torch.nn.functional` both bind torch, and may.
            names = [alias.asname or alias.name.split(".")[0] for alias in statement.names]
            names = [name for name in names if name not in modules]
            modules.update(names)
        for name in names:
            if name in bound:
                message = f"{name[:80]} is bound twice"
                notes.add("reference-constant", statement, message, "give one of them another name")
            bound.add(name)
    protected = (bound - functions) | {"torch", "math"}
    queue = list(reference.table.get_children())
    while queue:
        scope = queue.pop()
        queue += scope.get_children()
        for symbol in scope.get_symbols():
            # An import inside a function, and an input called torch, are the matter of other rules.
            reported = symbol.is_imported() or (symbol.is_parameter() and symbol.get_name() in ("torch", "math"))
            if symbol.get_name() in protected and symbol.is_local() and not reported:
                message = f"{symbol.get_name()} is hidden by a local name in {scope.get_name()}"
                notes.add("reference-constant", scope.get_lineno(), message, "give the local another name")


def _check_parameters(run: ast.FunctionDef, inputs: list[str], notes: _Notes) -> None:
    arguments = run.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults or arguments.kw_defaults:
        hint = "plain parameters only: no *args, **kwargs, keyword-only parameters or defaults"
        notes.add("reference-parameters", run, "run() has parameters that are not plain ones", hint)
    parameters = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if parameters != inputs:
        message = f"the parameters of run() are ({', '.join(parameters)[:200]})"
        notes.add("reference-parameters", run, message, f"the inputs, in order: ({', '.join(inputs)[:200]})")


def _check_returns(run: ast.FunctionDef, outputs: int, notes: _Notes) -> None:
    returns = [node for node in _own_nodes(run) if isinstance(node, ast.Return)]
    if not returns:
        notes.add("reference-return", run, "run() returns nothing", "return the outputs, in declared order")
    hint = "return one value for each output, in declared order: a tensor, or a tuple if there are several"
    for node in returns:
        value = node.value
        if value is None or isinstance(value, (ast.Constant, ast.Dict, ast.List, ast.Set)):
            shown = "nothing" if value is None else f"a {type(value).__name__.lower()}"
            notes.add("reference-return", node, f"run() returns {shown}, for {outputs} outputs", hint)
        elif isinstance(value, ast.Tuple):
            starred = any(isinstance(item, ast.Starred) for item in value.elts)
            if not starred and len(value.elts) != outputs:
                message = f"run() returns {len(value.elts)} values, for {outputs} outputs"
                notes.add("reference-return", node, message, hint)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            queue += ast.iter_child_nodes(node)


def _check_asserts(run: ast.FunctionDef, candidate: Candidate, notes: _Notes) -> None:
    asserts = [node.test for node in _own_nodes(run) if isinstance(node, ast.Assert)]
    asserted = {name.id for test in asserts for name in ast.walk(test) if isinstance(name, ast.Name)}
    for axis in candidate.const_axes:
        where = [name for name, tensor in candidate.inputs.items() if axis in (tensor.shape or ())]
        if where and axis.upper() not in asserted:
            dimension = (candidate.inputs[where[0]].shape or ()).index(axis)
            message = f"run() does not assert the const axis {axis}, which {where[0]} shows"
            hint = f"add `assert {where[0]}.shape[{dimension}] == {axis.upper()}`"
            notes.add("reference-assert", run, message, hint)


def check_rendering(reference: str, candidate: Candidate, family: NamePattern, root: Path, report: Findings) -> None:
    """Compares the embedded reference with what ``reference/`` renders (reference-source, reference-stale)."""
    from flashinfer_trace.format.reference import ReferenceSourceError, render

    try:
        rendered = render(root, family.op_type, family.name, candidate.const_axes)
    except (ReferenceSourceError, OSError, ValueError) as error:
        message = f"reference/{family.op_type}/{family.name}.py cannot be rendered: {error}".replace(f"{root}/", "")
        report.add("reference-source", message, "write the source there, then run `flashinfer-trace sync`", POINTER)
        return
    if rendered == reference:
        return
    embedded_lines, rendered_lines = reference.splitlines(), rendered.splitlines()
    pairs = zip(embedded_lines, rendered_lines, strict=False)
    shorter = min(len(embedded_lines), len(rendered_lines))
    line = 1 + next((i for i, (left, right) in enumerate(pairs) if left != right), shorter)
    message = f"reference line {line}: differs from what reference/{family.op_type}/{family.name}.py renders"
    report.add("reference-stale", message, "edit the source, then run `flashinfer-trace sync`", POINTER)


def _assignment(statement: ast.stmt) -> tuple[list[ast.expr], ast.expr | None]:
    if isinstance(statement, ast.Assign):
        return statement.targets, statement.value
    if isinstance(statement, ast.AnnAssign):
        return [statement.target], statement.value
    return [], None


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:  # minus a string
        return None


#: A module constant that is an integer, alone on its line, as rendering leaves it; no more digits than an axis has.
_CONSTANT = re.compile(r"^([A-Z][A-Z0-9_]*) = (0|[1-9][0-9]{0,17})$", re.MULTILINE)

#: Where Python's line numbers grow.
_LINE_BREAK = re.compile(r"\r\n|\r|\n")


class ReferenceMemo:
    """Parses and checks references; one whose like was found clean is not walked again.

    Nothing that the rules look at depends on such an integer but `check_constant_values`, which always runs. A
    reference with a problem is never remembered, so every file with it is reported in full.
    """

    def __init__(self) -> None:
        self._clean: dict[Hashable, Reference] = {}

    def parse(self, candidate: Candidate, report: Findings) -> Reference | None:
        """As `parse_reference`."""
        like = self._clean.get(_likeness(candidate))
        if like is None or candidate.reference is None:
            return parse_reference(candidate, report)
        return _with_integers(like, candidate.reference)

    def check(self, reference: Reference, candidate: Candidate, report: Findings) -> None:
        """As `check_reference`."""
        likeness = _likeness(candidate)
        if likeness in self._clean:
            check_constant_values(reference, candidate, report)
            return
        before = len(report.problems)
        check_reference(reference, candidate, report)
        if len(report.problems) == before:
            self._clean[likeness] = reference


def _likeness(candidate: Candidate) -> Hashable:
    """The parts that the rules on a reference look at, without the integers of its constants."""
    shapes = tuple((name, tensor.shape) for name, tensor in candidate.inputs.items())
    declared = tuple(
        tuple(section) if isinstance(section, dict) else None
        for section in (candidate.data.get("inputs"), candidate.data.get("outputs"))
    )
    source = _CONSTANT.sub(r"\1 = 0", candidate.reference or "")
    return (source, candidate.op_type, shapes, declared, tuple(candidate.const_axes))


def _with_integers(like: Reference, source: str) -> Reference:
    """A reference like another one, with the integers of its own source."""
    lines = _LINE_BREAK.split(source)
    reference = Reference(source, like.module, like.table)
    reference.constants = [
        (name, int(match[2]) if (match := _CONSTANT.fullmatch(lines[line - 1])) else value, line)
        for name, value, line in like.constants
    ]
    return reference
