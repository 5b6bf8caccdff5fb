"""What a model runs and no recipe gives a Definition for: ops, and kernels of other ops, each with the reason."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.coverage import definitions_by_kernel
from flashinfer_trace.dataset.store import definition_paths
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.kernels import family_kernels
from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.model_code import call_of
from tools.extract_definitions.needs import Request, kernel_name
from tools.extract_definitions.recipes import RECIPES
from tools.extract_definitions.traces import TORCH, Op

#: An op that a family covers, but not by all kernels that can run it; ops outside the forward pass; and ops that no
#: family covers.
PARTLY, OUTSIDE, UNSUPPORTED = "partly", "outside", "unsupported"
#: Kernels of functions that no family covers and that an op runs beside that of its family: recipes report these ops.
WITHOUT_FAMILY = frozenset({"triton:fused_softcap_kernel"})


def not_traced(request: Request) -> dict[str, str]:
    """The ops that the configuration needs and the trace lacks, with the reason."""
    reasons = {**_norms_of_pytorch(request), **request.uncovered}
    return {op: reason for op, reason in reasons.items() if request.usage.op(op) is None}


def _norms_of_pytorch(request: Request) -> dict[str, str]:
    """The norms that the code builds as PyTorch's own modules: traces see those of SGLang."""
    built = {
        op: {ast.unparse(call_of(text).func) for text in calls} for op, calls in request.usage.code.modules.items()
    }
    return {
        op: f"PyTorch's own kernels compute it ({min(names)})"
        for op, names in built.items()
        if any(name.endswith("Norm") and "nn" in name.split(".")[:-1] for name in names)
    }


def gaps(root: Path, request: Request, met: set[str]) -> Iterator[tuple[str, str, str]]:
    """State, op and reason: ops that have no Definition, and the kernels of other ops that no recipe covers."""
    covered = {kernel for recipe in RECIPES for kernel in recipe.kernels}
    for name, reason in not_traced(request).items():
        yield UNSUPPORTED, name, reason
    for op in request.usage.ops:
        kernels = _kernels(request, op)
        own = op.group in ("", "sampling")
        if (op.kernels and not kernels) or (own and op.name in request.unused and op.name not in met):
            continue
        if own and op.name in met:
            reported = WITHOUT_FAMILY if op.name in request.uncovered else frozenset()
            others = [kernel for kernel in kernels if kernel_name(kernel) not in covered | reported]
            if op.name in request.uncovered:
                yield UNSUPPORTED, op.name, request.uncovered[op.name]
            if others:
                yield PARTLY, op.name, _others(root, others)
        elif own:
            yield UNSUPPORTED, op.name, reason_of(root, request, op)
        else:
            yield OUTSIDE, f"{op.name} ({op.group})", reason_of(root, request, op)


def _others(root: Path, kernels: Iterable[str]) -> str:
    """The kernels of an op that no recipe names: those without a Definition, then those that some Definition has."""
    lists: dict[str, list[str]] = {"without a Definition": [], "in no recipe, with Definitions": []}
    for kernel in kernels:
        lists[list(lists)[kernel_name(kernel) in _with_definitions(root)]].append(kernel)
    return "; ".join(f"{text}: {', '.join(found)}" for text, found in lists.items() if found)


def reason_of(root: Path, request: Request, op: Op) -> str:
    """Why an op has no Definition that follows from the model, with its kernels."""
    known, kernels = request.uncovered if op.group in ("", "sampling") else {}, _kernels(request, op)
    some = any(kernel_name(kernel) in _with_definitions(root) for kernel in kernels)
    which = "some of its kernels" if some else "other kernels of its function"
    have = some or op.name in _functions_with_definitions(root)
    reason = f"no recipe; {which} have Definitions" if have else "no family covers it"
    return f"{known.get(op.name, reason)}: {', '.join(kernels) or 'torch'}"


@functools.cache
def _with_definitions(root: Path) -> frozenset[str]:
    """The kernels that have Definitions, whichever model these are for."""
    return frozenset(definitions_by_kernel(root, _readable(definition_paths(root))))


@functools.cache
def _functions_with_definitions(root: Path) -> frozenset[str]:
    """The functions of PyTorch that have Definitions. An op that calls one is named after it."""
    naming = load_naming(root)
    known = {family_name(one, naming) for one in _readable(definition_paths(root))}
    kernels = (one for name in known if name is not None for one in family_kernels(name).values())
    return frozenset(kernel.path.rpartition(".")[2] for kernel in kernels if kernel.libraries == ("torch",))


def _readable(paths: Iterable[Path]) -> Iterator[Definition]:
    """The Definitions in these files, but for broken ones: planning reports those that are in its way."""
    for path in paths:
        with contextlib.suppress(ExtractionError):
            yield Definition.from_dict(read_definition(path), path)


def _kernels(request: Request, op: Op) -> list[str]:
    """The kernels of an op in the chosen stages."""
    chosen = set(request.options.stages)
    return sorted(kernel for kernel, stages in op.kernels.items() if chosen & set(stages) and kernel != TORCH)


def read_definition(path: Path) -> dict[str, Any]:
    """The JSON of a Definition.

    Raises:
        ExtractionError: the file cannot be read, or is none.
    """
    try:
        data = load_object(path)
        Definition.from_dict(data, path)
    except ValueError as error:
        raise ExtractionError(
            f"{path}: not a Definition: {error}; run `flashinfer-trace validate {path}` for details"
        ) from error
    return data
