"""Substitutes kernels in FlashInfer through its trace_apply, and only in the calls that they are for.

``enable()`` is called once, before a model runs. trace_apply finds a kernel by the name of a Definition, which does not
tell dtypes, an epsilon or what else ``guards.json`` has: here each call is compared with these first, and one that
differs goes to FlashInfer's own kernel. The solutions next to this file have names that no call has, so trace_apply
alone (``FLASHINFER_TRACE_APPLY_PATH``) never takes them.

Written by `flashinfer-trace export apply` for FlashInfer 0.7.2.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def enable(directory: Path | str | None = None) -> int:
    """Registers the solutions of a directory (this file's own by default); returns in how many places guards stand."""
    from flashinfer import trace_apply
    from flashinfer.api_logging import _TRACE_REGISTRY, _trace_fi_api_for
    from flashinfer.trace.solution import Solution
    from flashinfer.trace_apply.apply import _resolve_target

    root = Path(directory) if directory is not None else Path(__file__).parent
    guards = json.loads((root / "guards.json").read_text(encoding="utf-8"))
    solutions = {}
    for guard in guards:
        written = json.loads((root / guard["solution"]).read_text(encoding="utf-8"))
        solutions[guard["key"]] = Solution.from_dict({**written, "definition": guard["key"]})
    trace_apply.enable_apply(solutions)
    guarded = 0
    for api in dict.fromkeys(guard["api"] for guard in guards):
        target = _resolve_target(api)
        if target is None:
            raise RuntimeError(f"this FlashInfer has no {api}; export again from dumps of this release")
        applied = getattr(*target)
        own = [guard for guard in guards if guard["api"] == api]
        known = [(one, template) for one, template, _ in _TRACE_REGISTRY if _trace_fi_api_for(one) == api]
        by_name = {template.name_prefix or template.op_type: (one, template) for one, template in known}
        guarded += _guard(applied, *by_name[own[0]["template"]], own)
    return guarded


def _guard(applied: Callable[..., Any], function: Callable[..., Any], template: Any, guards: Sequence[Any]) -> int:
    """Puts a guard before a substituted function wherever FlashInfer's modules name it."""
    from flashinfer.trace_apply.adapt import build_candidate_kwargs

    signature, original = inspect.signature(function), applied.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(applied)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = build_candidate_kwargs(template, bound.arguments)
        chosen = applied if any(fits(guard, tensors, bound.arguments) for guard in guards) else original
        return chosen(*args, **kwargs)

    places = [
        (module, name)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("flashinfer")
        for name, value in list(vars(module).items())
        if value is applied
    ]
    for module, name in places:
        setattr(module, name, guarded)
    return len(places)


def fits(guard: Mapping[str, Any], tensors: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a call is one that a solution is for, by the guard, the call's inputs by the names of the Definition, and
    all of its arguments."""
    for name, (dtype, shape) in guard["tensors"].items():
        tensor = tensors.get(name)
        if tensor is None or str(getattr(tensor, "dtype", None)).removeprefix("torch.") != dtype:
            return False
        if len(tensor.shape) != len(shape):
            return False
        if any(size is not None and size != actual for size, actual in zip(shape, tensor.shape, strict=True)):
            return False
    return all(arguments.get(name) == value for name, value in guard["arguments"].items())
