"""What a model's code passes: how it builds the modules that run its ops, how it calls them, which fields it reads.

The traces say which kernels can run; this says with which settings. It is the second witness beside the configuration:
a recipe claims an op only where the code passes what the Definition says. All of it is read from the syntax trees of
the classes that the architecture's class reaches, so that it takes milliseconds and needs no tracing.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashinfer_trace.format.files import Lines, laid_out
from tools.extract_definitions.errors import ExtractionError
from tools.kernel_tracing.source.sources import SourceTree

MODELS = "sglang.srt.models"
#: Functions that build a module, beside classes.
FACTORIES = frozenset({"get_rope", "get_rope_wrapper", "get_moe_impl_class", "experts_type"})
#: Methods of a module that compute the same function by other means.
FORWARDS = frozenset({"forward", "forward_native", "forward_cuda", "forward_with_allreduce_fusion"})

_ATTRIBUTE = re.compile(r"\bself\.(\w+)\b(?![.(])")
Modules = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class ModelCode:
    """The code of one architecture, as texts that `ast.parse` reads.

    Attributes:
        architecture: the class.
        sources: version and digest of the sources, as in a digest of traces.
        modules: attribute -> each expression that builds it, such as `RMSNorm(config.hidden_size)`.
        calls: attribute -> each way in which it is called.
        reads: field of the configuration -> the defaults that the code gives it; none if it needs the field.
        products: function of PyTorch that multiplies by a weight, outside of a module for it -> each call.
    """

    architecture: str
    sources: Mapping[str, Any]
    modules: Modules = field(default_factory=dict)
    calls: Modules = field(default_factory=dict)
    reads: Modules = field(default_factory=dict)
    products: Modules = field(default_factory=dict)


SECTIONS = ("modules", "calls", "reads", "products")


def read_code(architecture: str, module: str, tree: SourceTree) -> ModelCode:
    """Reads the code of an architecture that `module` defines."""
    found: dict[str, dict[str, dict[str, None]]] = {name: defaultdict(dict) for name in SECTIONS}
    for node in _reached(module, architecture, tree):
        values = _values(node)
        for part in ast.walk(node):
            for section, name, text in _facts(part):
                texts = found[section][name]
                if text:
                    texts[_resolved(text, values)] = None
    sections = {
        section: {name: tuple(sorted(texts)) for name, texts in sorted(entries.items())}
        for section, entries in found.items()
    }
    modules = {name: texts for name, texts in sections["modules"].items() if not name.startswith("_")}
    calls = {name: texts for name, texts in sections["calls"].items() if name in modules}
    others = (sections["reads"], sections["products"])
    return ModelCode(architecture, {"sglang": tree.describe()["sglang"]}, modules, calls, *others)


def _resolved(text: str, values: Mapping[str, str]) -> str:
    """A text with the fields of the configuration that its attributes hold."""
    return _ATTRIBUTE.sub(lambda match: values.get(match[1], match[0]), text)


def _values(node: ast.AST) -> dict[str, str]:
    """Attributes of a class that are plain fields of the configuration: `embed_dim` -> `config.hidden_size`."""
    found: dict[str, set[str]] = defaultdict(set)
    for part in ast.walk(node):
        match part:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                found[name].add(ast.unparse(value))
    plain = re.compile(r"config\.\w+")
    return {name: text for name, texts in found.items() for text in texts if len(texts) == 1 and plain.fullmatch(text)}


def _facts(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Section, name and text of what one node of a syntax tree shows."""
    match node:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
            yield from (("modules", name, ast.unparse(call)) for call in _built(value))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            yield "calls", name, ast.unparse(node)
        case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr=method)):
            if method in FORWARDS:
                yield "calls", name, ast.unparse(node)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="F"), attr="linear")):
            yield "products", "linear", ast.unparse(node)
    match node:
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" as how), args=[of, ast.Constant(value=str(name)), *rest]):
            if _is_config(of):
                yield "reads", name, ast.unparse(rest[0]) if rest else ("hasattr" if how == "hasattr" else "")
        case ast.Attribute(value=of, attr=name, ctx=ast.Load()) if _is_config(of):
            yield "reads", name, ""


def _built(value: ast.expr) -> Iterator[ast.Call]:
    """The calls that build a module, on both sides of a choice."""
    if isinstance(value, ast.IfExp):
        yield from _built(value.body)
        yield from _built(value.orelse)
    elif isinstance(value, ast.Call):
        last = built_by(value)
        if last in FACTORIES or last[:1].isupper():
            yield value


def call_of(text: str) -> ast.Call:
    """A call that was kept as its text."""
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call), text
    return node


def built_by(call: ast.Call) -> str:
    """The class or function that a call names: `get_moe_impl_class` in `get_moe_impl_class(quant_config)(...)`."""
    function: ast.expr = call
    while isinstance(function, ast.Call):
        function = function.func
    return ast.unparse(function).rpartition(".")[2]


def _is_config(node: ast.expr) -> bool:
    return ast.unparse(node) in ("config", "self.config", "cfg", "self.cfg")


def _reached(module: str, name: str, tree: SourceTree) -> Iterator[ast.AST]:
    """The classes of model files that a class reaches, and the functions and constants of these files that it names."""
    pending, seen = [(module, name)], set[tuple[str, str]]()
    known: dict[str, tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]] = {}
    while pending:
        if (place := pending.pop()) in seen:
            continue
        seen.add(place)
        if place[0] not in known:
            known[place[0]] = _names(tree, place[0])
        defined, imported = known[place[0]]
        if place[1] in imported:
            pending.append(imported[place[1]])
        elif (node := defined.get(place[1])) is not None:
            yield node
            used = {part.id for part in _bodies(node) if isinstance(part, ast.Name)}
            pending += [(place[0], one) for one in sorted(used) if one in defined or one in imported]


def _bodies(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a definition, without annotations, which name classes that need not be built."""
    for child_field, value in ast.iter_fields(node):
        if child_field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _bodies(child)


def _names(tree: SourceTree, module: str) -> tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]:
    """The classes, functions and constants that a module defines, and those that it imports from other model files."""
    try:
        body = ast.parse(tree.text(module)).body
    except (SyntaxError, KeyError) as error:
        raise ExtractionError(f"{module}: cannot be read: {error}") from error
    kinds = (ast.ClassDef, ast.FunctionDef)
    defined: dict[str, ast.AST] = {node.name: node for node in body if isinstance(node, kinds)}
    for node in body:  # a dictionary of classes, for example
        if isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    imported = {
        name.asname or name.name: (source, name.name)
        for node in body
        if isinstance(node, ast.ImportFrom) and (source := _source(node, module, tree)).startswith(f"{MODELS}.")
        for name in node.names
    }
    return defined, imported


def _source(node: ast.ImportFrom, module: str, tree: SourceTree) -> str:
    """The module that an import reads, "" if it is not in the sources."""
    parents = module.split(".")[: -node.level + tree.is_package(module) or None] if node.level else []
    found = ".".join([*parents, *([node.module] if node.module else [])])
    return found if found in tree.modules else ""


def code_from(data: Mapping[str, Any]) -> ModelCode:
    """The code as its committed file has it."""
    sections = ({name: tuple(texts) for name, texts in data[section].items()} for section in SECTIONS)
    return ModelCode(data["architecture"], data["sources"], *sections)


def dumps(code: ModelCode) -> str:
    """The file, one line per attribute or field."""
    data = {
        "architecture": code.architecture,
        "sources": code.sources,
        **{name: {key: list(texts) for key, texts in getattr(code, name).items()} for name in SECTIONS},
    }
    return laid_out(data, _lines)


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    match path:
        case ():
            return Lines(1, closing=0)
        case ("modules",) | ("calls",) | ("reads",) | ("products",):
            return Lines(2)
    return None
