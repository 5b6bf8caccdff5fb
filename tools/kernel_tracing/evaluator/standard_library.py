"""The standard library and torch, as far as they decide what a model does."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable
from typing import Any

from tools.kernel_tracing.evaluator.builtin_functions import MODEL_PATH, Arguments, Keywords, vars_of
from tools.kernel_tracing.evaluator.classes import fields_of
from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.factories import is_factory, made
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Builtin,
    Class,
    External,
    Function,
    Instance,
    Method,
    Opaque,
    Partial,
    Property,
    Tensor,
    Value,
)

# The standard library, by path


def _partial(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return Partial(args[0], args[1:], kwargs)


def _same(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return args[0] if args else IDENTITY


def _wraps(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return IDENTITY


class _Bar(list[Value]):
    """What a progress bar goes through."""

    def set_description(self, *args: Value, **kwargs: Value) -> None:
        """Shows nothing."""


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
    defaults = {name: info.find(name) for name in fields_of(core, info)}
    return [
        Opaque("dataclasses.Field", {"name": name, "type": UNKNOWN, "default": UNKNOWN if value is MISSING else value})
        for name, value in defaults.items()
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
    environment: dict[str, str] = core.environment
    default = args[1] if len(args) > 1 else kwargs.get("default")
    return environment.get(args[0], default) if isinstance(args[0], str) else UNKNOWN


def _reduce(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    values = core.iterate(args[1])
    if values is None:
        return UNKNOWN
    return functools.reduce(lambda a, b: core.call(args[0], [a, b], {}), values, *args[2:])


def _namedtuple(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    return Builtin(f"namedtuple {args[0]}", lambda core, given, named: Opaque(str(args[0]), dict(named)))


def _reference(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    """`weakref.ref(thing)`: a function that returns the thing, which is never collected here."""
    return Builtin("weakref", lambda core, given, named: args[0])


def _bisect(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    plain = isinstance(args[0], list) and all(isinstance(one, int) for one in (*args[0], args[1]))
    return bisect.bisect_left(args[0], args[1]) if plain else UNKNOWN


def _matches(name: str) -> Callable[..., Value]:
    def run(core: Core, args: Arguments, kwargs: Keywords) -> Value:
        if len(args) < 2 or not (isinstance(args[0], str) and isinstance(args[1], str)):
            return UNKNOWN
        return Opaque("re.Match") if getattr(re, name)(args[0], args[1]) else None

    return run


def _signature(core: Core, args: Arguments, kwargs: Keywords) -> Value:
    function = args[0].function if isinstance(args[0], Method) else args[0]
    if not isinstance(function, Function):
        return UNKNOWN
    spec = function.node.args
    names = [argument.arg for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return Opaque("inspect.Signature", {"parameters": dict.fromkeys(names, UNKNOWN)})


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
    "dataclasses.asdict": vars_of,
    "dataclasses.is_dataclass": lambda core, args, kwargs: (
        isinstance(args[0], Instance) and args[0].cls.kind == "dataclass"
    ),
    "tqdm.tqdm": lambda core, args, kwargs: _Bar(core.iterate(args[0]) or []),
    "tqdm.auto.tqdm": lambda core, args, kwargs: _Bar(core.iterate(args[0]) or []),
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
    "dill.dumps": lambda core, args, kwargs: UNKNOWN,
    "bisect.bisect_left": _bisect,
    **{f"{module}.{name}": _matches(name) for module in ("re", "regex") for name in ("match", "fullmatch", "search")},
    "weakref.ref": _reference,
    "inspect.signature": _signature,
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
    is_tensor_function = path.startswith("torch.") and path.count(".") <= 3 and path.rpartition(".")[2].islower()
    if not is_tensor_function or path.startswith(_OTHER):
        return MISSING
    if is_factory(path) or any(isinstance(one, Tensor) for one in (*args, *kwargs.values())):
        return made(path, args, kwargs)
    return MISSING


# Parts of torch that make no tensors.
_OTHER = ("torch.cuda", "torch.distributed", "torch.ops", "torch.library", "torch.compile", "torch.backends")
