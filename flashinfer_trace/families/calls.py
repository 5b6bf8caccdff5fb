"""Adapters of functions that take inputs, outputs and constant axes of a Definition as they are."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs


def function_at(path: str) -> Callable[..., Any]:
    """The object that a dotted path names; for an op of torch, its default overload."""
    module, _, name = path.rpartition(".")
    if not module.startswith("torch.ops."):
        return cast(Callable[..., Any], getattr(importlib.import_module(module), name))
    library = module.rpartition(".")[2]
    importlib.import_module(library)
    return cast(Callable[..., Any], getattr(getattr(torch.ops, library), name).default)


def called(
    function: str | Callable[..., Any],
    text: str,
    definition: Definition,
    known: dict[str, Any],
    eager: bool = False,
    grid: tuple[int, ...] | None = None,
) -> Any:
    """The result of a function, or of the one at a dotted path.

    Args:
        text: its arguments, apart by spaces: names that are known, constant axes, and literals without spaces, by
            position or as ``keyword=value``, where the value may be left out if it is the keyword. A name may have
            attributes, and methods without arguments, as ``B.T``. A literal after ``|`` counts where nothing has the
            name.
        known: inputs and outputs by name.
        eager: without the function's decorator torch.compile.
        grid: of a Triton kernel that is launched.
    """
    chosen: Any = function_at(function) if isinstance(function, str) else function
    known = {**definition.const_axes, **known}
    positional, by_name = [], {}
    for keyword, name, attributes, literal in words_of(text):
        if name in known:
            value = known[name]
            for attribute in attributes:
                value = getattr(value, attribute)
                value = value() if callable(value) else value
        else:
            try:
                value = copy.copy(value_of(literal))
            except (ValueError, SyntaxError):
                known_names = sorted(known)
                raise NameError(f"{text!r} of {function}: {literal} is not a literal; known: {known_names}") from None
        if keyword:
            by_name[keyword] = value
        else:
            positional.append(value)
    with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
        return (chosen if grid is None else chosen[grid])(*positional, **by_name)


value_of = functools.cache(ast.literal_eval)


@functools.cache
def words_of(text: str) -> list[tuple[str, str, list[str], str]]:
    """Of each word, the keyword, the name, its attributes, and the literal that counts if nothing has the name."""
    found = []
    for word in text.split():
        keyword, _, value = word.rpartition("=")
        name, _, default = value.partition("|")
        name, *attributes = (name or keyword).split(".")
        found.append((keyword, name, attributes, default or value))
    return found


def call(path: str, text: str, eager: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As `called`: outputs are those that it is given, inputs that it overwrites (``q`` for ``q_out``), or returned."""
    found = called(path, text, definition, {**inputs, **outputs}, eager)
    given = {name for _, name, attributes, _ in words_of(text) if not attributes}
    written = {name: outputs[name] for name in definition.outputs if name in given}
    overwritten = {f"{name}_out": value for name, value in inputs.items() if name in given}
    known = {**overwritten, **written}
    missing = [name for name in definition.outputs if name not in known]
    returned = dict(zip(missing, [found] if len(missing) == 1 else found, strict=True)) if missing else {}
    return {name: {**returned, **known}[name] for name in definition.outputs}


def calling(path: str, text: str, variant: str = "", *, eager: bool = False, **how: Any) -> Kernel:
    """The kernel at a path with its adapter; `how` are other attributes of `Kernel`."""
    return Kernel(path, functools.partial(call, path, text, eager), variant, **how)
