"""Calls of functions that are not traced: builtins, functools, torch. Those that pass calls or values on have rules."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from tools.kernel_tracing.engine.models import custom_ops
from tools.kernel_tracing.engine.solver import GIVEN_TO, OpenCall
from tools.kernel_tracing.engine.values import (
    EMPTY,
    ClassValue,
    Constant,
    Container,
    External,
    Function,
    Instance,
    Method,
    NativeModule,
    Partial,
    Super,
    Unknown,
    ValueSet,
)
from tools.kernel_tracing.rules import external_libraries

if TYPE_CHECKING:
    from tools.kernel_tracing.engine.frame import Arguments, Frame

TORCH_OP_PARTS = len(["torch", "ops", "namespace", "name", "overload"])
MAX_PARTS = 10  # more than the deepest package of the libraries in use, plus a class and a method
Rule = Callable[["Frame", "Arguments", ast.expr], ValueSet]


def call(frame: Frame, path: str, arguments: Arguments, node: ast.expr, approximate: str = "") -> ValueSet:
    """Call something external, by dotted path."""
    if path.startswith("torch.ops."):
        return _torch_op(frame, path, arguments, node, approximate)
    rule = _RULES.get(path)
    if rule is not None:
        return rule(frame, arguments, node)
    call_back(frame, arguments, node, path)
    package = external_libraries.may_launch(path)
    if not package or not isinstance(node, ast.Call):
        return frame.universe.any
    frame.solver.open_calls.setdefault(
        (frame.context, node), OpenCall(frame.context, node, path.rpartition(".")[2], package)
    )
    # Its result is tracked for one level: `buffer = Buffer(...)` and then `buffer.dispatch(...)`.
    return frame.universe.any if "()" in path else frame.universe.one(External, f"{path}()")


def is_path(path: str) -> bool:
    """Whether a dotted path is short enough to name something; a longer one is taken as unknown data.

    Otherwise a loop over `node = node.next` would make longer and longer paths.
    """
    parts = path.count(".") + 1
    return parts <= (TORCH_OP_PARTS if path.startswith("torch.ops.") else MAX_PARTS)


def call_back(frame: Frame, arguments: Arguments, node: ast.expr, name: str) -> None:
    """An unknown function may call the functions that it is given."""
    from tools.kernel_tracing.engine import calls
    from tools.kernel_tracing.engine.frame import Arguments as Given

    for values in [*arguments.positional, *arguments.keywords.values()]:
        for value in values:
            if isinstance(value, (Function, Method, Partial)):
                calls.call_one(frame, value, Given(star=frame.universe.data), node, f"{GIVEN_TO}{name}")


def _torch_op(frame: Frame, path: str, arguments: Arguments, node: ast.expr, approximate: str) -> ValueSet:
    from tools.kernel_tracing.engine import calls

    implementations = custom_ops.implementation(frame, path)
    if implementations:
        found: ValueSet = EMPTY
        for implementation in implementations:
            found |= calls.call_one(frame, implementation, arguments, node, approximate)
        return found
    parts = path.split(".")
    if len(parts) > 3 and frame.solver.waits(("custom op", parts[3]), frame.context):
        return EMPTY
    if len(parts) > 3 and not frame.solver.platform.name_is_foreign(parts[2], parts[3]):
        frame.solver.add_kernel_call(frame.context, node, ".".join(parts[:4]), parts[3], frame.guards, approximate)
    return frame.universe.any


def _getattr(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    from tools.kernel_tracing.engine import attributes

    found: ValueSet = arguments.get(2)
    for name in arguments.get(1):
        if isinstance(name, Constant) and isinstance(name.literal, str):
            found |= attributes.load(frame, arguments.get(0), name.literal, node)
        else:
            found |= frame.universe.any
    return found


def _setattr(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    from tools.kernel_tracing.engine import attributes

    for name in arguments.get(1):
        if isinstance(name, Constant) and isinstance(name.literal, str):
            attributes.store(frame, arguments.get(0), name.literal, arguments.get(2))
    return frame.universe.data


def _super(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    function = frame.context.function
    receiver = frame.context.receiver
    context = frame.context.closure
    while receiver is None and context is not None:
        function, receiver, context = context.function, context.receiver, context.closure
    if function.owner is None or not isinstance(receiver, (Instance, ClassValue)):
        return frame.universe.any
    after = function.owner
    for value in arguments.get(0):
        if isinstance(value, ClassValue):
            after = value.info
    return frame.universe.one(Super, after, receiver)


def _type(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    found: ValueSet = EMPTY
    for value in arguments.get(0):
        if isinstance(value, Instance):
            found |= frame.universe.one(ClassValue, value.info)
    return found or frame.universe.any


def _first(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    """Function that returns its first argument, or something that behaves like it."""
    return arguments.get(0) or frame.universe.any


def _decorator_factory(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    """`torch.compile(f)` and `torch.compile(**options)(f)`: the function stays what it is."""
    callables = frozenset(v for v in arguments.get(0) if not isinstance(v, (Unknown, Constant)))
    return callables or frame.universe.one(*_IDENTITY)


def _new_list(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    container = frame.container(node, "List")
    for values in [*arguments.positional, *arguments.keywords.values()]:
        frame.put(container, "*", frame.elements(values))
    return frozenset((container,))


def _module_list(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    """ModuleList(layers): a list. Sequential(a, b): a list of its arguments, which calls them in order."""
    container = frame.container(node, "ModuleList")
    for values in arguments.positional:
        frame.put(container, "*", frame.elements(values))
        frame.put(container, "*", frozenset(value for value in values if isinstance(value, Instance)))
    return frozenset((container,))


def _new_dict(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    from tools.kernel_tracing.engine.models import containers

    container = frame.container(node, "Dict")
    containers.update(frame, container, arguments.get(0))
    for key, values in arguments.keywords.items():
        frame.put(container, key, values)
    return frozenset((container,))


def _zip(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    row, rows = frame.container((node, "row"), "Tuple"), frame.container(node, "List")
    for position, values in enumerate(arguments.positional):
        frame.put(row, position, frame.elements(values))
    frame.put(rows, "*", frozenset((row,)))
    return frozenset((rows,))


def _enumerate(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    row, rows = frame.container((node, "row"), "Tuple"), frame.container(node, "List")
    frame.put(row, 0, frame.universe.data)
    frame.put(row, 1, frame.elements(arguments.get(0)))
    frame.put(rows, "*", frozenset((row,)))
    return frozenset((rows,))


def _map(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    from tools.kernel_tracing.engine import calls
    from tools.kernel_tracing.engine.frame import Arguments as Given

    container = frame.container(node, "List")
    elements = [frame.elements(values) for values in arguments.positional[1:]]
    for function in arguments.get(0):
        frame.put(container, "*", calls.call_one(frame, function, Given(elements), node))
    return frozenset((container,))


def _filter(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    return arguments.get(1)


def _element(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    return frame.elements(arguments.get(0)) | arguments.get(1)


def _partial(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    found: ValueSet = EMPTY
    for function in arguments.get(0):
        if isinstance(function, Unknown):
            found |= frozenset((function,))
        else:
            found |= frame.universe.one(
                Partial, function, tuple(arguments.positional[1:]), tuple(sorted(arguments.keywords.items()))
            )
    return found


def _method_type(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    found: ValueSet = EMPTY
    for function in arguments.get(0):
        found |= frame.universe.one(Partial, function, (arguments.get(1),), ())
    return found


def _reference(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    """`weakref.ref(x)`: calling it returns x."""
    return frame.universe.one(Partial, frame.universe.make(*_IDENTITY), (arguments.get(0),), ())


def _namespace(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    """A bare object to which attributes are added."""
    from tools.kernel_tracing.engine.attributes import NAMESPACE

    return frozenset((frame.container(node, NAMESPACE),))


def _native_module(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    """A module built when it is loaded; if it has only C++ sources, it works on the host."""
    from tools.kernel_tracing.rules import boundaries

    if isinstance(node, ast.Call) and not any(word.arg == "cuda_sources" for word in node.keywords):
        given = [word.value for word in node.keywords if word.arg == "sources"]
        parts = given[0].elts if len(given) == 1 and isinstance(given[0], (ast.List, ast.Tuple)) else []
        if boundaries.is_host_code([_ending(part) for part in parts]):
            return frame.universe.data
    return frame.universe.one(NativeModule, (frame.function,))


def _ending(node: ast.expr) -> str:
    """The end of a string, an f-string or a path joined from parts; "" if that is not a literal."""
    while isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Call)):
        parts = (
            node.values
            if isinstance(node, ast.JoinedStr)
            else node.args
            if isinstance(node, ast.Call)
            else [node.right]
        )
        if not parts:
            return ""
        node = parts[-1]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _import_module(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    from tools.kernel_tracing.engine.expressions import module_value

    found: ValueSet = EMPTY
    for name in arguments.get(0):
        if isinstance(name, Constant) and isinstance(name.literal, str):
            found |= module_value(frame, name.literal)
    return found or frame.universe.any


def _isinstance(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    """Decided if all tested values are instances of known classes, and all or none of them pass."""
    classes = frame.elements(arguments.get(1)) | arguments.get(1)
    wanted = {value.info for value in classes if isinstance(value, ClassValue)}
    if not wanted or not all(isinstance(value, (ClassValue, Container)) for value in classes):
        return frame.universe.data
    configs = frame.solver.model_configs
    if configs is not None and all(configs.is_impossible(info) for info in wanted):
        return frame.constant(False)
    passes = {
        not wanted.isdisjoint(frame.solver.index.mro(value.info)) if isinstance(value, Instance) else None
        for value in arguments.get(0)
    }
    return frame.constant(passes.pop()) if passes in ({True}, {False}) else frame.universe.data


def _nothing(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    return frame.universe.data


def _bool(frame: Frame, arguments: Arguments, node: ast.expr) -> ValueSet:
    return frame.universe.data


_IDENTITY = (External, "identity")
_RULES: dict[str, Rule] = {
    "identity": _first,
    "builtins.getattr": _getattr,
    "builtins.setattr": _setattr,
    "builtins.super": _super,
    "builtins.type": _type,
    "builtins.map": _map,
    "builtins.filter": _filter,
    "builtins.zip": _zip,
    "builtins.enumerate": _enumerate,
    "builtins.next": _element,
    "builtins.dict": _new_dict,
    "builtins.isinstance": _isinstance,
    "builtins.hasattr": _nothing,
    "builtins.print": _nothing,
    "inspect.signature": _nothing,
    "inspect.isclass": _nothing,
    "inspect.getsource": _nothing,
    "functools.partial": _partial,
    "functools.wraps": lambda frame, arguments, node: frame.universe.one(*_IDENTITY),
    "types.MethodType": _method_type,
    "weakref.ref": _reference,
    "importlib.import_module": _import_module,
    "tvm_ffi.cpp.load_inline": _native_module,
    "tvm_ffi.cpp.load": _native_module,
    "torch.utils.cpp_extension.load": _native_module,
    "torch.utils.cpp_extension.load_inline": _native_module,
    "torch.nn.ModuleList": _module_list,
    "torch.nn.Sequential": _module_list,
    "torch.nn.ModuleDict": _new_dict,
    "torch.nn.Module": _namespace,
    "types.SimpleNamespace": _namespace,
}
for _path in ("list", "tuple", "set", "sorted", "reversed", "frozenset", "iter"):
    _RULES[f"builtins.{_path}"] = _new_list
for _path in ("copy.copy", "copy.deepcopy", "typing.cast", "functools.cache", "weakref.proxy"):
    _RULES[_path] = _first
_RULES["typing.cast"] = lambda frame, arguments, node: arguments.get(1)
for _path in ("compile", "compiler.disable", "compiler.allow_in_graph", "_dynamo.disable", "jit.script", "jit.ignore"):
    _RULES[f"torch.{_path}"] = _decorator_factory
for _path in ("torch.no_grad", "torch.inference_mode", "functools.lru_cache"):
    _RULES[_path] = _decorator_factory
for _path in ("min", "max", "len", "range", "int", "float", "str", "bool", "sum", "abs", "any", "all", "round", "id"):
    _RULES[f"builtins.{_path}"] = _bool
_RULES["collections.deque"] = _RULES["queue.Queue"] = _new_list
for _path in ("collections.defaultdict", "collections.OrderedDict", "typing.DefaultDict", "typing.OrderedDict"):
    _RULES[_path] = _new_dict
__all__ = ["Container", "call"]
