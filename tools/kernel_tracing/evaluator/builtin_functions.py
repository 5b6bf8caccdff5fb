"""Python's builtins and the parts of its standard library that decide what a model does."""

from __future__ import annotations

import builtins
import collections
import itertools
import json
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.operators import plain
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Builtin,
    Choice,
    Class,
    External,
    Instance,
    Opaque,
    Property,
    Raised,
    Super,
    Tensor,
    Unknown,
    Value,
    Wrapped,
    choice,
    is_symbolic,
)

Arguments = list[Value]
Keywords = dict[str, Value]
# Modules that are pure computations; they are used as they are.
NATIVE_MODULES: dict[str, Any] = {
    "math": math,
    "itertools": itertools,
    "collections": collections,
    "operator": operator,
    "re": re,
    "json": json,
    "orjson": json,
}

# Where the model's files would be.
MODEL_PATH = "/model"


def _len(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    value = args[0]
    if isinstance(value, Instance) and value.cls.find("__len__") is not MISSING:
        return core.call(core.load(value, "__len__"), [], {})
    if isinstance(value, Tensor):
        return value.shape[0] if value.shape else UNKNOWN
    elements = value if isinstance(value, (str, dict, set, frozenset)) else core.iterate(value)
    return len(elements) if elements is not None else UNKNOWN


def _isinstance(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    found = core.is_instance(args[0], args[1])
    return UNKNOWN if found is None else found


def _issubclass(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    kinds = args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(args[0], Class):
        return any(
            kind in args[0].order or (isinstance(kind, External) and kind.path in args[0].externals) for kind in kinds
        )
    return UNKNOWN


def _getattr(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    owner, name, *default = args
    if not isinstance(name, str):
        return UNKNOWN
    if not default:
        return core.load(owner, name)
    if isinstance(owner, Choice):
        return choice([_getattr(core, [one, name, *default], {}) for one in owner.values])
    found = _find(core, owner, name)
    return default[0] if found is MISSING else found


def _find(core: Core, owner: Value, name: str) -> Value:
    frame = core.frame
    frame.handlers += 1
    try:
        return core.find(owner, name)  # type: ignore[attr-defined]
    except Raised:
        return MISSING
    finally:
        frame.handlers -= 1


def _hasattr(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    if isinstance(args[0], Unknown) or not isinstance(args[1], str):
        return UNKNOWN
    if isinstance(args[0], Choice):
        found = {_hasattr(core, [one, args[1]], {}) for one in args[0].values}
        return found.pop() if len(found) == 1 else UNKNOWN
    if isinstance(args[0], Tensor):
        return args[1] in args[0].fields or (args[1] in ("shape", "dtype", "data", "device"))
    if isinstance(args[0], Opaque):
        return args[1] in args[0].fields or UNKNOWN
    return _find(core, args[0], args[1]) is not MISSING


def _setattr(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    if isinstance(args[1], str):
        core.store(args[0], args[1], args[2])
    return None


def _super(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    frame = next(
        (one for one in reversed(core.stack) if one.function is not None and one.function.owner is not None), None
    )
    if len(args) == 2:
        return Super(args[0], args[1])
    if frame is None or frame.function is None or frame.function.owner is None:
        return UNKNOWN
    return Super(frame.function.owner, frame.receiver)


def _type(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    value = args[0]
    if isinstance(value, Instance):
        return value.cls
    if len(args) == 1 and not is_symbolic(value) and type(value).__module__ == "builtins":
        return type(value)
    return UNKNOWN


def _fold(name: str) -> Callable[..., Value]:
    def run(core: Core, args: Arguments, kwargs: Keywords) -> Value:
        values = core.iterate(args[0]) if len(args) == 1 else list(args)
        if values is None:
            return UNKNOWN
        truths = [core.truth(value) for value in values]
        if name == "any":
            return True if True in truths else UNKNOWN if None in truths else False
        return False if False in truths else UNKNOWN if None in truths else True

    return run


def _extreme(name: str) -> Callable[..., Value]:
    def run(core: Core, args: Arguments, kwargs: Keywords) -> Value:
        values = core.iterate(args[0]) if len(args) == 1 else list(args)
        if values is None or any(is_symbolic(value) for value in values):
            return UNKNOWN
        if not values:
            return kwargs.get("default", UNKNOWN)
        key = kwargs.get("key")
        function = getattr(builtins, name)
        try:
            return function(values, key=plain if key is None else lambda one: plain(core.call(key, [one], {})))
        except TypeError:
            return UNKNOWN

    return run


def _listed(make: Callable[[list[Value]], Value]) -> Callable[..., Value]:
    def run(core: Core, args: Arguments, kwargs: Keywords) -> Value:
        if not args:
            return make([])
        values = core.iterate(args[0])
        try:
            return make(values) if values is not None else UNKNOWN
        except TypeError:
            return UNKNOWN

    return run


def _dict(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    found: dict[Value, Value] = {}
    if args:
        if isinstance(args[0], dict):
            found |= args[0]
        else:
            for pair in core.iterate(args[0]) or []:
                if isinstance(pair, (tuple, list)) and len(pair) == 2:
                    found[pair[0]] = pair[1]
    return found | kwargs


def _range(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return range(*args) if all(isinstance(one, int) for one in args) else UNKNOWN


def _enumerate(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[0])
    start = kwargs.get("start", args[1] if len(args) > 1 else 0)
    return list(enumerate(values, start)) if values is not None and isinstance(start, int) else UNKNOWN


def _zip(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = [core.iterate(one) for one in args]
    known = [one for one in values if one is not None]
    if not known:
        return UNKNOWN
    length = min(len(one) for one in known)
    return [tuple(one[at] if one is not None else UNKNOWN for one in values) for at in range(length)]


def _map(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[1])
    return [core.call(args[0], [value], {}) for value in values] if values is not None else UNKNOWN


def _filter(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[1])
    if values is None:
        return UNKNOWN
    truths = [core.truth(core.call(args[0], [value], {}) if args[0] is not None else value) for value in values]
    return [value for value, truth in zip(values, truths, strict=True) if truth is not False]


def _next(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[0])
    if values is None:
        return UNKNOWN
    return values[0] if values else args[1] if len(args) > 1 else UNKNOWN


def _sorted(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[0])
    if values is None:
        return UNKNOWN
    key = kwargs.get("key")
    try:
        chosen = (lambda one: core.call(key, [one], {})) if key is not None else None
        return sorted(values, key=chosen, reverse=kwargs.get("reverse") is True)
    except TypeError:
        return values


def _callable(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    if isinstance(args[0], Instance):
        return args[0].cls.find("__call__") is not MISSING
    return not isinstance(args[0], (int, str, float, list, tuple, dict, Tensor, type(None)))


def _sum(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[0])
    if values is not None and len(args) > 1 and isinstance(args[1], list):
        return [*args[1], *(one for value in values for one in (core.iterate(value) or []))]
    if values is None or any(not isinstance(value, (int, float)) for value in values):
        return UNKNOWN
    return sum(values)


def _converted(kind: type[Any]) -> Callable[..., Value]:
    def run(core: Core, args: Arguments, kwargs: Keywords) -> Value:
        if not args:
            return kind()
        value = plain(args[0])
        if kind is bool:
            truth = core.truth(value)
            return UNKNOWN if truth is None else truth
        if kind is str and isinstance(value, Instance) and value.cls.find("__str__") is not MISSING:
            return core.call(core.load(value, "__str__"), [], {})
        if kind is str and isinstance(value, External):
            return value.path
        if not isinstance(value, (int, float, str)) and value is not None:
            return UNKNOWN
        try:
            return kind(value, *args[1:])
        except (ValueError, TypeError) as error:
            raise Raised(error) from None

    return run


def _silent(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return None


def vars_of(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return args[0].fields if args and isinstance(args[0], Instance) else UNKNOWN


BUILTINS: dict[str, Value] = {
    name: Builtin(name, run)
    for name, run in {
        "len": _len,
        "isinstance": _isinstance,
        "issubclass": _issubclass,
        "getattr": _getattr,
        "hasattr": _hasattr,
        "setattr": _setattr,
        "super": _super,
        "any": _fold("any"),
        "all": _fold("all"),
        "min": _extreme("min"),
        "max": _extreme("max"),
        "sum": _sum,
        "range": _range,
        "enumerate": _enumerate,
        "zip": _zip,
        "map": _map,
        "filter": _filter,
        "next": _next,
        "iter": lambda core, args, kwargs: args[0],
        "sorted": _sorted,
        "reversed": _listed(lambda values: list(reversed(values))),
        "callable": _callable,
        "print": _silent,
        "vars": vars_of,
        "id": lambda core, args, kwargs: id(args[0]),
        "property": lambda core, args, kwargs: Property(args[0]),
        "staticmethod": lambda core, args, kwargs: Wrapped("staticmethod", args[0]),
        "classmethod": lambda core, args, kwargs: Wrapped("classmethod", args[0]),
        "delattr": _silent,
    }.items()
}
# Types are values of their own, as isinstance names them; calling them goes through these.
CONSTRUCTORS: dict[type[Any], Callable[..., Value]] = {
    int: _converted(int),
    float: _converted(float),
    str: _converted(str),
    bool: _converted(bool),
    list: _listed(list),
    tuple: _listed(tuple),
    set: _listed(set),
    frozenset: _listed(frozenset),
    dict: _dict,
    type: _type,
}


def builtin(name: str) -> Value:
    """A builtin by name; MISSING if there is none."""
    if name in BUILTINS:
        return BUILTINS[name]
    found = getattr(builtins, name, MISSING)
    if isinstance(found, type) or found is Ellipsis or found is NotImplemented:
        return found
    return MISSING if found is MISSING else Builtin(name, lambda core, args, kwargs: UNKNOWN)
