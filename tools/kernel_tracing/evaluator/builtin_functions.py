"""Python's builtins and the parts of its standard library that decide what a model does."""

from __future__ import annotations

import builtins
import collections
import functools
import itertools
import json
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.expressions import plain
from tools.kernel_tracing.evaluator.objects import fields_of
from tools.kernel_tracing.evaluator.tensors import is_factory, made
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Builtin,
    Choice,
    Class,
    External,
    Function,
    Instance,
    LibraryObject,
    Method,
    Opaque,
    Partial,
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
            return function(values, key=(lambda one: core.call(key, [one], {})) if key is not None else None)
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


def _vars(core: Core, args: Arguments, kwargs: Keywords) -> Value:
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
        "vars": _vars,
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


# The standard library, by path


def _partial(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return Partial(args[0], args[1:], kwargs)


def _same(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return args[0] if args else IDENTITY


def _wraps(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return IDENTITY


IDENTITY = Builtin("identity", lambda core, args, kwargs: args[0] if args else UNKNOWN)


def _context(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    if isinstance(args[0], Function):
        args[0].is_context = True
    return args[0]


def _dataclass(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    if not args:
        return Builtin("dataclass", _dataclass)
    if isinstance(args[0], Class):
        args[0].kind = args[0].kind or "dataclass"
    return args[0]


def _field(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return Opaque("dataclasses.field", {"settings": kwargs})


def _fields(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    info = args[0].cls if isinstance(args[0], Instance) else args[0]
    if not isinstance(info, Class):
        return UNKNOWN
    return [
        Opaque("dataclasses.Field", {"name": name, "type": UNKNOWN, "default": UNKNOWN}) for name in fields_of(info)
    ]


def _replace(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    if not isinstance(args[0], Instance):
        return UNKNOWN
    return Instance(args[0].cls, args[0].fields | kwargs, core.region)


def _copy(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    value = args[0]
    if isinstance(value, Instance) and value.cls.kind != "enum":
        return Instance(value.cls, dict(value.fields), core.region)
    if isinstance(value, (list, dict, set)):
        return type(value)(value) if type(value) in (list, dict, set) else value.copy()
    return value


def _getenv(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    environment: dict[str, str] = core.environment  # type: ignore[attr-defined]
    default = args[1] if len(args) > 1 else kwargs.get("default")
    return environment.get(args[0], default) if isinstance(args[0], str) else UNKNOWN


def _reduce(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[1])
    if values is None:
        return UNKNOWN
    return functools.reduce(lambda a, b: core.call(args[0], [a, b], {}), values, *args[2:])


def _namedtuple(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return Builtin(f"namedtuple {args[0]}", lambda core, given, named: Opaque(str(args[0]), dict(named)))


def _stack_method(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return args[0] if args else None


STANDARD: dict[str, Callable[..., Value]] = {
    "functools.partial": _partial,
    "functools.partialmethod": _partial,
    "functools.wraps": _wraps,
    "functools.update_wrapper": _same,
    "functools.lru_cache": _same,
    "functools.cache": _same,
    "functools.cached_property": lambda core, args, kwargs: Property(args[0]),
    "functools.reduce": _reduce,
    "functools.total_ordering": _same,
    "contextlib.contextmanager": _context,
    "contextlib.nullcontext": lambda core, args, kwargs: args[0] if args else Opaque("contextlib.nullcontext"),
    "dataclasses.dataclass": _dataclass,
    "dataclasses.field": _field,
    "dataclasses.fields": _fields,
    "dataclasses.replace": _replace,
    "dataclasses.asdict": _vars,
    "dataclasses.is_dataclass": lambda core, args, kwargs: (
        isinstance(args[0], Instance) and args[0].cls.kind == "dataclass"
    ),
    "copy.copy": _copy,
    "copy.deepcopy": _copy,
    "os.getenv": _getenv,
    "os.environ.get": _getenv,
    "os.path.exists": lambda core, args, kwargs: args[0] == MODEL_PATH,
    "os.path.isfile": lambda core, args, kwargs: False,
    "os.path.isdir": lambda core, args, kwargs: args[0] == MODEL_PATH,
    "typing.cast": lambda core, args, kwargs: args[1],
    "typing.TypeVar": lambda core, args, kwargs: External("typing.Any"),
    "typing.overload": _same,
    "typing.runtime_checkable": _same,
    "abc.abstractmethod": _same,
    "abc.abstractproperty": lambda core, args, kwargs: Property(args[0]),
    "collections.namedtuple": _namedtuple,
    "inspect.isfunction": lambda core, args, kwargs: isinstance(args[0], (Function, Method)),
    "torch.nn.Parameter": lambda core, args, kwargs: Tensor(*_tensor_of(args, kwargs)),
    "torch.nn.parameter.Parameter": lambda core, args, kwargs: Tensor(*_tensor_of(args, kwargs)),
    "torch.get_default_dtype": lambda core, args, kwargs: External("torch.bfloat16"),
}


def _tensor_of(args: Arguments, kwargs: Keywords) -> tuple[Any, Any]:
    value = kwargs.get("data", args[0] if args else None)
    return (value.shape, value.dtype) if isinstance(value, Tensor) else (None, None)


def standard(core: Core, path: str, args: Arguments, kwargs: Keywords) -> Value:
    """What a function of the standard library or of torch returns; MISSING if nothing is known of it."""
    known = STANDARD.get(path)
    if known is not None:
        return known(core, args, kwargs)
    if path.startswith("torch.") and path.count(".") <= 3 and path.rpartition(".")[2].islower() and "cuda" not in path:
        if not path.startswith(("torch.distributed", "torch.ops", "torch.library", "torch.compile", "torch.backends")):
            if is_factory(path) or any(isinstance(one, Tensor) for one in (*args, *kwargs.values())):
                return made(path, args, kwargs)
    return MISSING


__all__ = ["BUILTINS", "CONSTRUCTORS", "IDENTITY", "NATIVE_MODULES", "LibraryObject", "builtin", "standard"]
