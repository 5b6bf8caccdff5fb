"""Calls: which contexts a call enters, how arguments reach parameters, and what is returned."""

from __future__ import annotations

import ast
from collections.abc import Hashable

from tools.kernel_tracing.engine import attributes, variants
from tools.kernel_tracing.engine.frame import Arguments, Frame
from tools.kernel_tracing.engine.models import containers, custom_ops, decorators, external, modules
from tools.kernel_tracing.engine.solver import Context, Guard, OpenCall
from tools.kernel_tracing.engine.values import (
    EMPTY,
    ClassValue,
    Constant,
    Container,
    ContainerMethod,
    External,
    Function,
    Instance,
    Launch,
    Method,
    NativeFunction,
    NativeModule,
    Partial,
    Unknown,
    Value,
    ValueSet,
)
from tools.kernel_tracing.rules import boundaries, tensors
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo
from tools.kernel_tracing.source.syntax import last_name

__all__ = ["Guard", "bind_locals", "call", "call_method", "call_one", "enter", "is_enum"]


def call(frame: Frame, callees: ValueSet, arguments: Arguments, node: ast.Call, approximate: str = "") -> ValueSet:
    """Call every callee; returns the union of their results."""
    found: ValueSet = EMPTY
    if not callees and frame.solver.waits((frame.context, node), frame.context):
        return EMPTY
    opaque = not callees
    for callee in callees:
        if isinstance(callee, Unknown):
            opaque = True
            found |= frame.universe.any
        else:
            found |= call_one(frame, callee, arguments, node, approximate)
    if opaque:
        name = last_name(node.func)
        if name:
            frame.solver.open_calls.setdefault((frame.context, node), OpenCall(frame.context, node, name))
            found |= frame.universe.any
            external.call_back(frame, arguments, node, name)
    return found


def _ends(frame: Frame, function: FunctionInfo, node: ast.expr, approximate: str) -> bool:
    """Whether a chain ends with the call of this function. If so, the call is recorded as a kernel or as a leaf."""
    kernel = boundaries.kernel_of(frame.solver.index, function)
    if kernel:
        frame.solver.add_kernel_call(frame.context, node, function, kernel, frame.guards, approximate)
    elif kernel is not None:
        frame.solver.leaves[frame.function, node, function] = None
    return kernel is not None


def call_one(frame: Frame, callee: Value, arguments: Arguments, node: ast.expr, approximate: str = "") -> ValueSet:
    """Call one callee."""
    if isinstance(callee, Function):
        if custom_ops.is_registration(callee.info.qualname):
            custom_ops.register_called(frame, arguments)
            return frame.universe.data
        operator = custom_ops.wrap(frame, callee.info.qualname, arguments)
        if operator is not None:
            return operator
        if _ends(frame, callee.info, node, approximate):
            return frame.universe.any
        owner = callee.info.owner
        if owner is not None and arguments.positional and "staticmethod" not in callee.info.decorators:
            # Class.method(instance, ...): the first argument is the receiver.
            found: ValueSet = EMPTY
            rest = Arguments(arguments.positional[1:], *arguments.rest())
            for receiver in arguments.positional[0]:
                if isinstance(receiver, (Instance, ClassValue)):
                    found |= enter(frame, callee.info, receiver, None, rest, node, approximate)
            if found or any(isinstance(value, (Instance, ClassValue)) for value in arguments.positional[0]):
                return found
        return enter(frame, callee.info, None, callee.closure, arguments, node, approximate)
    if isinstance(callee, Method):
        if _ends(frame, callee.info, node, approximate):
            return frame.universe.any
        return enter(frame, callee.info, callee.receiver, None, arguments, node, approximate)
    if isinstance(callee, ClassValue):
        return construct(frame, callee.info, arguments, node)
    if isinstance(callee, Instance):
        return modules.call_instance(frame, callee, arguments, node, approximate)
    if isinstance(callee, Partial):
        merged = Arguments(
            [*callee.positional, *arguments.positional],
            {**dict(callee.keywords), **arguments.keywords},
            arguments.star,
            arguments.star_keywords,
        )
        return call_one(frame, callee.function, merged, node, approximate)
    if isinstance(callee, Launch):
        frame.solver.add_kernel_call(frame.context, node, callee.info, callee.info.node.name, frame.guards, approximate)  # type: ignore[union-attr]
        return frame.universe.data
    if isinstance(callee, NativeFunction):
        frame.solver.add_kernel_call(frame.context, node, callee.loader, callee.name, frame.guards, approximate)
        return frame.universe.any
    if isinstance(callee, External):
        return external.call(frame, callee.path, arguments, node, approximate)
    if isinstance(callee, Container):  # nn.Sequential calls its elements in order
        for element in frame.elements(frozenset((callee,))):
            if not isinstance(element, (Unknown, Container)):
                call_one(frame, element, Arguments([frame.universe.data]), node, approximate)
        return frame.universe.data
    if isinstance(callee, ContainerMethod):
        return containers.call(frame, callee.container, callee.name, arguments, node)
    return frame.universe.data


def call_method(frame: Frame, receiver: Instance, name: str, arguments: list[ValueSet], node: ast.expr) -> ValueSet:
    """Call a method that the syntax implies, such as __enter__, if the class has it."""
    method = attributes.find_method(frame, receiver.info, name)
    if method is None:
        return frame.universe.any
    return enter(frame, method, receiver, None, Arguments(arguments), node)


def is_enum(frame: Frame, info: ClassInfo) -> bool:
    """Whether a class is an enumeration."""
    return any(path.rpartition(".")[2] in _ENUMS for path in frame.solver.index.external_bases(info))


_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


def construct(frame: Frame, info: ClassInfo, arguments: Arguments, node: ast.expr) -> ValueSet:
    """Call a class: run its initialiser; dataclasses and named tuples take fields in order."""
    instance = frame.universe.make(Instance, info)
    result = frozenset((instance,))
    if tensors.is_tensor(frame.solver.index, info):
        return frame.universe.data
    if attributes.is_foreign(frame, info):
        return EMPTY
    if is_enum(frame, info):
        return result
    frame.solver.leaves[frame.function, node, info] = None
    if boundaries.is_library(info.module.name):
        return result
    if info not in frame.solver.constructed:
        for base in frame.solver.index.mro(info):
            frame.write(("instances", base), result)
    frame.solver.constructed.setdefault(info, {})[frame.context] = None
    metaclass_call = attributes.find_method(frame, info, "__new__")
    if metaclass_call is not None:
        made = enter(frame, metaclass_call, frame.universe.make(ClassValue, info), None, arguments, node)
        result |= frozenset(value for value in made if isinstance(value, Instance))
    initialiser = attributes.find_method(frame, info, "__init__")
    if initialiser is not None:
        enter(frame, initialiser, instance, None, arguments, node)
        return result
    fields = [name for cls in reversed(frame.solver.index.mro(info)) for name in cls.annotations]
    for position, name in enumerate(dict.fromkeys(fields)):
        attributes.store(frame, frozenset((instance,)), name, arguments.get(position, name))
    hook = attributes.find_method(frame, info, "__post_init__")
    if hook is not None:
        enter(frame, hook, instance, None, Arguments(), node)
    return result


def enter(
    frame: Frame,
    function: FunctionInfo,
    receiver: Value | None,
    closure: Context | None,
    arguments: Arguments,
    node: ast.expr | None,
    approximate: str = "",
    variant: tuple[Hashable, ...] = (),
) -> ValueSet:
    """Enter a function: bind arguments, record the edge, return its results."""
    if boundaries.is_library(function.module.name) or "abstractmethod" in function.decorators:
        return frame.universe.any if boundaries.is_library(function.module.name) else EMPTY
    predicate = frame.solver.platform.predicate(function.qualname)
    if predicate is None and frame.solver.is_foreign(function):
        return frame.universe.data
    found: ValueSet = EMPTY
    apart = variants.receivers(frame, function, closure, arguments) if receiver is None else []
    if apart and not any(isinstance(choice, variants.Choice) for choice in variant):
        for value in apart:
            one = Arguments([frozenset((value,)), *arguments.positional[1:]], *arguments.rest())
            choice = variants.Choice("*", value)
            found |= enter(frame, function, receiver, closure, one, node, approximate, (*variant, choice))
        return found
    has_self = receiver is not None and function.owner is not None and "staticmethod" not in function.decorators
    bound = _bind(frame, function, arguments, variant, skip=1 if has_self or receiver is not None else 0)
    returns_data = frame.solver.is_data(getattr(function.node, "returns", None))
    for way in variants.split(frame, function, bound):
        context = frame.solver.context(function, receiver, closure, (*variant, *way.choices))
        if node is not None and context is not frame.context:
            frame.solver.add_edge(frame.context, node, context, frame.guards, approximate or way.approximate)
        for name, values in way.arguments.items():
            frame.write(("parameter", context, name), values)
        frame.solver.start(context)
        returned = frame.read(("return", context))
        found |= _booleans(frame, returned) if returns_data else returned
    if predicate is not None:
        if node is not None:
            frame.solver.leaves[frame.function, node, function] = None
        return frame.constant(predicate)
    found = decorators.transparent(frame, found)
    if any(isinstance(value, NativeModule) for value in found):
        return frozenset(_loaded(frame, function, value) for value in found)
    return found


def _booleans(frame: Frame, values: ValueSet) -> ValueSet:
    """Keep only True and False of plain data, because they decide tests."""
    if not values:
        return frame.universe.data
    return frozenset(
        value if isinstance(value, Constant) and isinstance(value.literal, bool) else frame.universe.opaque
        for value in values
    )


def _loaded(frame: Frame, function: FunctionInfo, value: Value) -> Value:
    """A returned value; for a native module that the function loaded, the caller is added to the loaders."""
    if isinstance(value, NativeModule) and value.loaders == (function,):
        return frame.universe.make(NativeModule, (function, frame.function))
    return value


def _bind(
    frame: Frame, function: FunctionInfo, arguments: Arguments, variant: tuple[Hashable, ...], skip: int
) -> dict[str, ValueSet]:
    """Values for each parameter, from the arguments of one call."""
    if isinstance(function.node, ast.Module):
        return {}
    parameters = function.parameters[skip:]
    spec = function.node.args
    bound: dict[str, ValueSet] = {}
    spill = arguments.star
    rest: list[ValueSet] = []
    for position, values in enumerate(arguments.positional):
        if position < len(parameters):
            bound[parameters[position]] = values
        else:
            rest.append(values)
    keyword_only = {argument.arg for argument in spec.kwonlyargs}
    extra: dict[str, ValueSet] = {}
    for name, values in arguments.keywords.items():
        if name in keyword_only or name in parameters:
            bound[name] = bound.get(name, EMPTY) | values
        else:
            extra[name] = values
    omitted = function.optional.difference(bound)
    for name in parameters[len(arguments.positional) :]:
        bound[name] = bound.get(name, EMPTY) | spill | arguments.star_keywords
    for name in keyword_only:
        bound[name] = bound.get(name, EMPTY) | arguments.star_keywords
    for name in omitted:
        if not bound.get(name):
            bound.pop(name, None)
    if spec.vararg is not None and (rest or spill):
        site = frame.universe.make(Container, ("varargs", function, frame.context, len(rest), *variant), "Tuple")
        for position, values in enumerate(rest):
            frame.put(site, position, values)
        frame.put(site, "*", spill)
        bound[spec.vararg.arg] = frozenset((site,))
    if spec.kwarg is not None and (extra or arguments.star_keywords):
        site = frame.universe.make(Container, ("keywords", function, frame.context, *variant), "Dict")
        for name, values in extra.items():
            frame.put(site, name, values)
        frame.put(site, "*", arguments.star_keywords)
        bound[spec.kwarg.arg] = frozenset((site,))
    return {name: _expand(frame, function, name, values) for name, values in bound.items()}


def _expand(frame: Frame, function: FunctionInfo, name: str, values: ValueSet) -> ValueSet:
    """What a parameter receives. An unknown value is taken to be at least what the annotation says."""
    if frame.solver.is_data(function.annotations.get(name)):
        return frame.universe.data
    kept = frame.universe.storable(values)
    if frame.universe.unknown in kept and name in function.annotations:
        kept |= attributes.annotated(frame, function.annotations[name], function.module)
    return kept


def bind_locals(frame: Frame) -> None:
    """Fill the environment of a context with its parameters: arguments and defaults, or else values of annotations."""
    function, context = frame.function, frame.context
    node = function.node
    if isinstance(node, ast.Module):
        return
    from tools.kernel_tracing.engine import expressions

    spec = node.args
    defaults = dict(zip(reversed(function.parameters), reversed(spec.defaults), strict=False))
    defaults |= {
        argument.arg: default
        for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        if default is not None
    }
    names = [*function.parameters, *(argument.arg for argument in spec.kwonlyargs)]
    names += [argument.arg for argument in (spec.vararg, spec.kwarg) if argument is not None]
    for position, name in enumerate(names):
        if position == 0 and context.receiver is not None and function.parameters:
            frame.assign(name, frozenset((context.receiver,)))
            continue
        values = frame.resolve(frame.read(("parameter", context, name)))
        if name in defaults:
            default = expressions.evaluate(frame, defaults[name])
            values |= frame.universe.storable(default)
        if not values and not frame.solver.waits(("parameter", context, name), context):
            values = frame.universe.any
            if name in function.annotations:
                values |= attributes.annotated(frame, function.annotations[name], function.module)
        frame.assign(name, values)
    if context.receiver is not None and function.parameters and isinstance(context.receiver, Instance):
        _mixin_self(frame, function.parameters[0])


def _mixin_self(frame: Frame, name: str) -> None:
    """`def method(self: Host)` of a mixin: if called on the mixin itself, the receiver is of the annotated class."""
    annotation = frame.function.annotations.get(name)
    receiver = frame.context.receiver
    owner = frame.function.owner
    if annotation is not None and isinstance(receiver, Instance) and receiver.info is owner:
        hosts = attributes.annotated(frame, annotation, frame.module)
        if hosts:
            frame.assign(name, hosts)
