"""Digests of the code that judges a run, taken from the live objects: evidence is bound to these.

A digest covers the syntax trees of some functions and values, and of everything that they use inside of this package,
without docstrings, comments, annotations and the texts of errors. A method counts if its class is used and code that is
used names it. Code that moves to another module keeps its digest. Refactoring elsewhere does not change it either.

Plans are bound by content: the digest of the code that draws them only tells when none has to be drawn again.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from flashinfer_trace.dataset import digests
from flashinfer_trace.format import definition as definitions
from flashinfer_trace.harness import case, cases, job
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import PlanRequest
from flashinfer_trace.harness.report import PlansRun

PACKAGE = "flashinfer_trace"
#: Code that decides no verdict on a GPU: isolation, refused inputs, faults and mutants, reading files, reports, and
#: code that only collects. Tests guard it. The parts of it that other code uses count by their names.
OUTSIDE = tuple(
    f"{PACKAGE}.{name}."
    for name in (
        *("format.allow_list", "format.files", "format.json_source", "harness.faults", "harness.refusals"),
        *("harness.report", "kernels", "sandbox", "verdict.wrong_outputs"),
    )
)
#: The module next to isolation that does decide: whether outputs share memory with inputs.
DECIDES = f"{PACKAGE}.sandbox.ownership"
#: The fields that draw plans. Plans are bound by content.
_DRAWN_BY = {Family: ("plan",), Kernel: ("limits", "plan_options", "common")}
#: Facts of records that decide no verdict: texts, plans, and where a kernel can run.
_FACTS = {
    Family: ("twin", "kernels", "faults", "unseen", "unverified", "checks", *_DRAWN_BY[Family]),
    Kernel: ("library", "min_capability", "max_capability", "modules", "optional", "facts", *_DRAWN_BY[Kernel]),
}
#: Functions that only write a line of a report.
_REPORTS = frozenset({"line", "__str__", "__repr__"})
#: Where texts with values are messages only: that there is one decides, not what it says.
_MESSAGES = (f"{PACKAGE}.format.", f"{PACKAGE}.harness.", f"{PACKAGE}.verdict.")


def judging_code(family: Family, kernel: Kernel) -> dict[str, str]:
    """Digests of the code that judges a kernel of a family, by the names that evidence has for them.

    ``harness`` is the code that decides for all: comparison, outputs, vacuity, binding and running a reference.
    ``family`` is how inputs are made, the oracle, the bounds and the relations, and the adapter of this kernel alone.
    ``plans`` is the code that draws its plans: where it is equal, so are they.
    """
    return {"harness": _verdict().sha256, **_of_kernel(_Same(family), _Same(kernel))}


def same_plans(definition: definitions.Definition, family: Family, kernel: Kernel, seed: int, ran: PlansRun) -> bool:
    """Whether a verification on a GPU would run the cases that it ran before, whatever code draws them.

    Hypothesis draws other cases in some of its versions: they are the same with the one that is recorded.
    """
    drawn = cases.drawn_again(job.Job(definition, family, kernel, "cuda"), seed, ran)
    return digests.short(drawn.sha256) == digests.short(ran.sha256)


class _Same:
    """A record as a key: equal to itself alone. Its dictionaries have no hash."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def __hash__(self) -> int:
        return id(self.record)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.record is other.record


#: Objects that the code of families receives; it names only their methods.
_GIVEN = (Draws, definitions.Definition)


@functools.cache
def _verdict() -> Closure:
    """The code that decides for all families."""
    return Closure(
        case.shared_case, case.SharedCase.result, Kernel.ignores_seed, case.SharedCase, Family, Kernel, *_GIVEN
    )


@functools.cache
def _drawing() -> Closure:
    """The code that draws plans for all families."""
    return Closure(cases.cases, cases.drawn_again, job.Job, PlanRequest, *_GIVEN)


@functools.lru_cache(maxsize=256)
def _of_family(family: _Same) -> tuple[Closure, Closure]:
    """The code that decides for one family, whatever the kernel, and the code that draws its plans."""
    judging = Closure(family.record, *_GIVEN, methods=_verdict().attributes)
    return judging, Closure(family.record.plan, *_GIVEN, methods=_drawing().attributes)


@functools.lru_cache(maxsize=1024)
def _of_kernel(family: _Same, kernel: _Same) -> dict[str, str]:
    shared, plan = _of_family(family)
    adapter = Closure(kernel.record, methods=shared.attributes).without(shared, _verdict())
    takes = Closure([getattr(kernel.record, name) for name in _DRAWN_BY[Kernel]], methods=plan.attributes)
    return {
        "family": _sha256([shared.without(_verdict()), adapter]),
        "plans": _sha256([_drawing().sha256, plan.without(_drawing()), takes.without(plan, _drawing())]),
    }


def _sha256(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


class Closure:
    """Some objects and all that they use inside of the package.

    Attributes:
        attributes: every name that the code has after a dot.
        parts: the text of each function, class and constant, by its name and its module.
    """

    def __init__(self, *roots: object, methods: Iterable[str] = ()) -> None:
        self.attributes: set[str] = set(methods)
        self.parts: dict[str, str] = {}
        self._classes: dict[str, type] = {}
        self._roots = [self._value(root) for root in roots]
        while self._add_methods():
            pass

    @functools.cached_property
    def sha256(self) -> str:
        return _sha256(self.without())

    def without(self, *others: Closure) -> tuple[list[str], list[tuple[str, str]]]:
        """The roots, and the parts that are in none of the others, by their names alone: any module may have them."""
        own = [part for part in self.parts.items() if not any(part[0] in other.parts for other in others)]
        return self._roots, sorted((name.partition(":")[2], text) for name, text in own)

    def _add_methods(self) -> bool:
        """Adds the methods that are named by now; whether there were any."""
        before = len(self.parts)
        for cls in list(self._classes.values()):
            for name, member in list(vars(cls).items()):
                special = name.startswith("__") and name.endswith("__")
                function = _function_of(member)
                if (special or name in self.attributes) and name not in _REPORTS and function is not None:
                    self._function(function)
        return len(self.parts) > before

    def _value(self, value: Any) -> str:
        """The text of a value: a constant, or the name of something in `parts`."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype)):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({', '.join(map(self._value, value))})"
        if isinstance(value, (set, frozenset)):
            return f"set({', '.join(sorted(map(self._value, value)))})"
        if isinstance(value, Mapping):
            return f"mapping({', '.join(f'{self._value(k)}: {self._value(v)}' for k, v in value.items())})"
        if isinstance(value, functools.partial):
            return f"partial({self._value(value.func)}, {self._value(value.args)}, {self._value(value.keywords)})"
        if isinstance(value, re.Pattern):
            return f"pattern({value.pattern!r}, {value.flags})"
        if isinstance(value, torch.Tensor):
            return f"tensor({value.dtype}, {value.tolist()})"
        if isinstance(value, type):
            return self._class(value)
        function = _function_of(value)
        if function is not None:
            return self._function(function) + (self._value(value.__self__) if inspect.ismethod(value) else "")
        return self._instance(value)

    def _instance(self, value: Any) -> str:
        cls = type(value)
        if not _inside(cls):
            return f"{cls.__module__}.{cls.__qualname__} {getattr(value, '__qualname__', '')}"
        if dataclasses.is_dataclass(cls):
            left_out = _FACTS.get(cls, ())
            names = [field.name for field in dataclasses.fields(cls) if field.init and field.name not in left_out]
            fields = {name: getattr(value, name) for name in names if name != "reason"}
        else:
            fields = vars(value) if hasattr(value, "__dict__") else {}
        return f"{self._class(cls)}({', '.join(f'{name}={self._value(one)}' for name, one in fields.items())})"

    def _class(self, cls: type) -> str:
        if not _inside(cls):
            return f"{cls.__module__}.{cls.__qualname__}"
        name, key = cls.__qualname__, f"{cls.__module__}:{cls.__qualname__}"
        node = None if key in self._classes else _classes(cls.__module__).get(cls.__name__)
        self._classes[key] = cls
        if node is None:
            return name
        kept = [one for one in node.body if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        header = ast.ClassDef(node.name, node.bases, node.keywords, kept, node.decorator_list)
        self.parts[key] = _text(header, True)
        self._follow([header], vars(sys.modules[cls.__module__]))
        for base in cls.__mro__[1:]:
            self._class(base)
        return name

    def _function(self, function: types.FunctionType) -> str:
        name = function.__qualname__
        if not _inside(function) or function.__name__ in _REPORTS:
            return name if function.__module__.startswith(PACKAGE) else f"{function.__module__}.{name}"
        plain = "<lambda>" not in name and not function.__closure__
        if plain and f"{function.__module__}:{name}" in self.parts:
            return name
        nodes = _nodes_of(function)
        if not nodes:  # made by a decorator, such as that of dataclasses
            return name
        messages = function.__module__.startswith(_MESSAGES)
        texts = list(dict.fromkeys(_text(node, not messages) for node in nodes))  # equal lambdas in one line are one
        name += f":{_sha256(texts)[:16]}" if "<lambda>" in name else ""
        values = [self._closed_over(cell) for cell in function.__closure__ or ()]
        name += f"[{', '.join(values)}]" if values else ""
        key = f"{function.__module__}:{name}"
        if key in self.parts:
            return name
        self.parts[key] = ""  # it may use itself
        texts += [self._value(function.__defaults__), self._value(function.__kwdefaults__)]
        self.parts[key] = "; ".join(texts)
        self._follow(nodes, function.__globals__)
        return name

    def _closed_over(self, cell: Any) -> str:
        try:
            return self._value(cell.cell_contents)
        except ValueError:  # not yet bound
            return "unbound"

    def _follow(self, nodes: list[ast.AST], names: Mapping[str, Any]) -> None:
        """Adds what code uses by name, and what the modules of the package that it names have by an attribute."""
        for used in map(_uses, nodes):
            self.attributes |= used.attributes
            for name in used.names:
                if name in names:
                    self._global(name, names)
            for name, attribute in used.members:
                base = names.get(name)
                if isinstance(base, types.ModuleType) and _inside(base) and hasattr(base, attribute):
                    self._global(attribute, vars(base))
            for path, name in used.imports:
                self._global(name, vars(importlib.import_module(path)))

    def _global(self, name: str, names: Mapping[str, Any]) -> None:
        value = names.get(name)
        module = names.get("__name__", "")
        if isinstance(value, types.ModuleType) or value is None:
            return
        if isinstance(value, type) or _function_of(value) is not None:
            self._value(value)
            return
        key = f"{module}:{name}"
        if key not in self.parts and not isinstance(value, Family):
            self.parts[key] = ""
            self.parts[key] = self._value(value)


def _function_of(value: Any) -> types.FunctionType | None:
    """The function behind a function, a method, a property, or a cache."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        if not isinstance(value, (types.FunctionType, functools.partial, type)):
            inner = getattr(value, name, None)
            value = inner if callable(inner) else value
    if isinstance(value, types.FunctionType):
        return inspect.unwrap(value) if hasattr(value, "__wrapped__") else value
    return None


def _inside(value: Any) -> bool:
    """Whether something is of this package, or of one that adds families to it, and decides."""
    module = str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
    if module == f"{PACKAGE}.families":  # it only collects
        return False
    if module == DECIDES:
        return True
    return module.startswith(f"{PACKAGE}.") and not f"{module}.".startswith(OUTSIDE)


def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


@functools.cache
def _by_line(module: str) -> dict[int, list[ast.AST]]:
    """The functions of a module by the line that their code begins in."""
    found: dict[int, list[ast.AST]] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            found.setdefault(min([node.lineno, *(one.lineno for one in decorators)]), []).append(node)
    return found


def _nodes_of(function: types.FunctionType) -> list[Any]:
    """Its syntax tree; of lambdas in one line that name the same, all of them."""
    if function.__module__ not in sys.modules:
        return []
    nodes = _by_line(function.__module__).get(function.__code__.co_firstlineno, [])
    wanted = ast.Lambda if function.__name__ == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in nodes if isinstance(node, wanted)]
    if len(found) < 2:
        return found
    lambdas = [node for node in found if isinstance(node, ast.Lambda)]
    return [node for node in lambdas if _names(_code_of(node)) == _names(function.__code__)] or found


def _code_of(node: ast.Lambda) -> types.CodeType:
    compiled = compile(ast.Expression(node), "<lambda>", "eval")
    return next(one for one in compiled.co_consts if isinstance(one, types.CodeType))


def _names(code: types.CodeType) -> tuple[object, ...]:
    """The parts that tell one lambda from another: arguments, names and constants."""
    constants = [repr(one) for one in code.co_consts if not isinstance(one, types.CodeType) and one is not None]
    return code.co_varnames, sorted({*code.co_names, *code.co_freevars}), constants


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name; of several, the first one that a walk meets."""
    nodes = [node for node in ast.walk(_tree(module)) if isinstance(node, ast.ClassDef)]
    return {node.name: node for node in reversed(nodes)}


def _children(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """The fields of a node that decide: no annotation, no docstring, no text of an error."""
    left_out = {"ctx", "kind", "type_comment", "type_params", "returns", "annotation", "type_ignores"}
    if isinstance(node, ast.Assert):
        left_out.add("msg")
    for name, value in ast.iter_fields(node):
        if name in left_out or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list):
            yield name, [one for one in value if not _is_text(one)]
        elif name == "exc" and isinstance(node, ast.Raise) and isinstance(value, ast.Call):
            yield name, value.func
        else:
            yield name, value


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for _, value in _children(node):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield from _walk(one)


@dataclasses.dataclass(frozen=True)
class _Used:
    """The names that code uses: names, (name, attribute) of names, every attribute, and (module, name) imported from
    the package.

    Each is there once, in the order of the code.
    """

    names: Iterable[str]
    members: Iterable[tuple[str, str]]
    attributes: set[str]
    imports: Iterable[tuple[str, str]]


@functools.lru_cache(maxsize=8192)
def _uses(node: ast.AST) -> _Used:
    every = list(_walk(node))
    attributes = [one for one in every if isinstance(one, ast.Attribute)]
    imports = [one for one in every if isinstance(one, ast.ImportFrom) and (one.module or "").startswith(PACKAGE)]
    return _Used(
        dict.fromkeys(one.id for one in every if isinstance(one, ast.Name)),
        dict.fromkeys((one.value.id, one.attr) for one in attributes if isinstance(one.value, ast.Name)),
        {one.attr for one in attributes},
        dict.fromkeys((one.module or "", alias.name) for one in imports for alias in one.names),
    )


@functools.lru_cache(maxsize=8192)
def _text(node: ast.AST, texts: bool) -> str:
    """A tree as text, the same for all versions of Python; with `texts`, also what texts with values say."""
    return _written(node, texts)


def _written(node: Any, texts: bool) -> str:
    if isinstance(node, list):
        return f"[{', '.join(_written(one, texts) for one in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr) and not texts:
        return "text"
    fields = (f"{name}={_written(value, texts)}" for name, value in _children(node))
    return f"{type(node).__name__}({', '.join(fields)})"
