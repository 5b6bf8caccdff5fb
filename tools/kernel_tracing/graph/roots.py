"""Roots: the model's entry classes, found by file name, and the natural roots in the runtime around it."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence

from tools.kernel_tracing.engine import attributes, calls
from tools.kernel_tracing.engine.frame import Arguments, Frame
from tools.kernel_tracing.engine.solver import Context, Solver
from tools.kernel_tracing.engine.values import Instance
from tools.kernel_tracing.rules import runtime_roots
from tools.kernel_tracing.rules.model_configs import ModelConfigs
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo
from tools.kernel_tracing.source.index import Index

MODELS = "sglang.srt.models"
# Files of one model: its versions, and its draft models for speculative decoding.
_VERSION = r"(_v\d+)?"
_DRAFT = r"(_nextn|_mtp|_eagle\d*)"
_VARIANTS = rf"{_VERSION}{_DRAFT}?"


class RootsError(Exception):
    """The model or an entry does not exist; the message lists those that do."""


def find_entries(index: Index, model: str, entries: Sequence[str] = ()) -> list[ClassInfo]:
    """Entry classes of a model, or those given as MODULE:CLASS.

    Raises RootsError for an unknown model (with the closest name), module or class.
    """
    if entries:
        return [_entry(index, entry) for entry in entries]
    names = sorted(name.removeprefix(f"{MODELS}.") for name in index.sources.modules if name.startswith(f"{MODELS}."))
    available = [name for name in names if "." not in name]
    pattern = re.compile(re.escape(model) + _VARIANTS)
    chosen = [name for name in available if pattern.fullmatch(name)]
    if not chosen:
        close = difflib.get_close_matches(model, available, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RootsError(f"no model named {model!r}; {hint}available: {', '.join(available)}")
    found = []
    for name in chosen:
        module = index.module(f"{MODELS}.{name}")
        if module is not None:
            found += _entry_classes(index, module.name)
    if not found:
        files = ", ".join(index.sources.files[f"{MODELS}.{name}"] for name in chosen)
        raise RootsError(f"{files}: no EntryClass found; name one with --entry MODULE:CLASS")
    return list(dict.fromkeys(found))


def _entry_classes(index: Index, module_name: str) -> list[ClassInfo]:
    """Classes named by a module's `EntryClass = ...`."""
    module = index.module(module_name)
    found: list[ClassInfo] = []
    for node in module.bindings.get("EntryClass", []) if module else []:
        if module is not None and isinstance(node, ast.Assign):
            value = node.value
            for expression in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
                found += [symbol for symbol in index.resolve(module, expression) if isinstance(symbol, ClassInfo)]
    return found


def _entry(index: Index, entry: str) -> ClassInfo:
    module_name, separator, class_name = entry.partition(":")
    module = index.module(module_name)
    if not separator or module is None:
        raise RootsError(f"--entry {entry}: no module {module_name!r} in the sources; write MODULE:CLASS")
    if class_name not in module.classes:
        raise RootsError(f"--entry {entry}: {module.file} has classes {', '.join(module.classes) or 'none'}")
    return module.classes[class_name]


def start(solver: Solver, entries: Sequence[ClassInfo]) -> tuple[list[Context], list[Context]]:
    """Enter all roots.

    Returns the contexts where chains end (the forward of the models, and what the runtime calls by itself), and those
    where chains end only if they reach none of the former (loading, initialisation, what other roots also call).
    """
    solver.model_configs = ModelConfigs(solver.index, entries)
    ends: list[Context] = []
    fallbacks: list[Context] = []
    frame = Frame(solver, solver.context(FunctionInfo(entries[0].module, "<roots>", ast.Module([], []))))
    for info in entries:
        for name in _methods(solver, info):
            if name != "__init__" and not re.fullmatch(runtime_roots.MODEL_METHODS, name):
                continue
            contexts = _enter(frame, info, name)
            (ends if name == "forward" else fallbacks).extend(contexts)
    for module_name in sorted(solver.index.sources.modules):
        rules = runtime_roots.matching(module_name)
        module = solver.index.module(module_name) if rules else None
        for rule in rules if module is not None else ():
            for info in module.classes.values() if module is not None else ():
                if re.fullmatch(rule.classes, info.name) and not attributes.is_foreign(frame, info):
                    for name in _methods(solver, info):
                        chosen = re.fullmatch(rule.methods, name) is not None
                        if chosen or name == "__init__":
                            ending = chosen and rule.ends_chains
                            (ends if ending else fallbacks).extend(_enter(frame, info, name))
    return ends, fallbacks


def _methods(solver: Solver, info: ClassInfo) -> list[str]:
    """Names of a class's methods, including inherited ones, the initialiser first."""
    names = [name for cls in reversed(solver.index.mro(info)) for name in cls.methods]
    ordered = dict.fromkeys(name for name in ["__init__", *names] if name == "__init__" or not name.startswith("__"))
    return [name for name in ordered if attributes.find_method_in(solver.index, info, name) is not None]


def _enter(frame: Frame, info: ClassInfo, name: str) -> list[Context]:
    """Enter a method as the runtime does: on an instance, with arguments known only by their annotations."""
    method = attributes.find_method_in(frame.solver.index, info, name)
    if method is None or method.decorators & {"staticmethod", "classmethod", "property", "abstractmethod", "setter"}:
        return []
    receiver = frame.universe.make(Instance, info)
    frame.solver.start_module(info.module)
    calls.enter(frame, method, receiver, None, Arguments(star=frame.universe.any), None)
    return [
        context
        for context in frame.solver.contexts.values()
        if context.function is method and context.receiver is receiver
    ]


def is_draft(context: Context) -> bool:
    """Whether a context belongs to a draft model of speculative decoding."""
    return re.search(rf"{_DRAFT}$", context.function.module.name) is not None or (
        isinstance(context.receiver, Instance)
        and re.search(rf"{_DRAFT}$", context.receiver.info.module.name) is not None
    )


def model_files(index: Index) -> set[str]:
    """The files of all models."""
    return {file for name, file in index.sources.files.items() if name.startswith(f"{MODELS}.")}
