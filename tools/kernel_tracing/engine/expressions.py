"""Expressions: what they may evaluate to."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable

from tools.kernel_tracing.engine import attributes, calls, decisions
from tools.kernel_tracing.engine.frame import Arguments, Frame
from tools.kernel_tracing.engine.models import containers
from tools.kernel_tracing.engine.values import (
    EMPTY,
    ClassValue,
    Constant,
    Container,
    EnumMember,
    External,
    Function,
    Instance,
    Launch,
    ModuleValue,
    Unknown,
    ValueSet,
)


def evaluate(frame: Frame, node: ast.expr) -> ValueSet:
    """Values of an expression; every call in it is recorded."""
    handler = _HANDLERS.get(type(node))
    return handler(frame, node) if handler is not None else frame.universe.data


def _name(frame: Frame, node: ast.Name) -> ValueSet:
    values = frame.lookup(node.id)
    if not values and node.id not in frame.module.bindings and node.id in _BUILTINS:
        return frame.universe.one(External, f"builtins.{node.id}")
    return values


_BUILTINS = frozenset(dir(builtins))


def _constant(frame: Frame, node: ast.Constant) -> ValueSet:
    if isinstance(node.value, (str, bool, int)) or node.value is None:
        return frame.constant(node.value)
    return frame.universe.data


def _attribute(frame: Frame, node: ast.Attribute) -> ValueSet:
    return attributes.load(frame, evaluate(frame, node.value), node.attr, node)


def _call(frame: Frame, node: ast.Call) -> ValueSet:
    callees = evaluate(frame, node.func)
    arguments = Arguments()
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            _spread(frame, arguments, evaluate(frame, argument.value))
        else:
            arguments.positional.append(evaluate(frame, argument))
    for keyword in node.keywords:
        values = evaluate(frame, keyword.value)
        if keyword.arg is not None:
            arguments.keywords[keyword.arg] = values
        else:
            _spread_keywords(frame, arguments, values)
    return calls.call(frame, callees, arguments, node)


def _spread(frame: Frame, arguments: Arguments, values: ValueSet) -> None:
    """`*args`: elements keep their positions as far as these are known."""
    for value in values:
        if isinstance(value, Container):
            keys = [key.literal for key in frame.read(("keys", value)) if isinstance(key, Constant)]
            for position in sorted(key for key in keys if isinstance(key, int)):
                here = len(arguments.positional)
                if position >= here:
                    arguments.positional.extend([frame.universe.data] * (position - here + 1))
                arguments.positional[position] |= frame.items(value, position)
            arguments.star |= frame.read(("item", value, "*"))
        elif isinstance(value, Unknown):
            arguments.star |= frozenset((value,))


def _spread_keywords(frame: Frame, arguments: Arguments, values: ValueSet) -> None:
    for value in values:
        if isinstance(value, Container):
            for key in frame.read(("keys", value)):
                if isinstance(key, Constant) and isinstance(key.literal, str):
                    known = arguments.keywords.get(key.literal, EMPTY)
                    arguments.keywords[key.literal] = known | frame.items(value, key.literal)
            arguments.star_keywords |= frame.read(("item", value, "*"))
        elif isinstance(value, Unknown):
            arguments.star_keywords |= frozenset((value,))


def _sequence(frame: Frame, node: ast.Tuple | ast.List | ast.Set) -> ValueSet:
    container = frame.container(node, type(node).__name__)
    for position, element in enumerate(node.elts):
        if isinstance(element, ast.Starred):
            frame.put(container, "*", frame.elements(evaluate(frame, element.value)))
        else:
            frame.put(container, position, evaluate(frame, element))
    return frozenset((container,))


def _dictionary(frame: Frame, node: ast.Dict) -> ValueSet:
    container = frame.container(node, "Dict")
    for key, value in zip(node.keys, node.values, strict=True):
        values = evaluate(frame, value)
        if key is None:
            containers.update(frame, container, values)
        else:
            frame.put(container, literal_key(frame, key), values)
    return frozenset((container,))


def literal_key(frame: Frame, node: ast.expr) -> object:
    """The key of a subscript or a dict item if it can only be one literal, otherwise "*"."""
    if isinstance(node, ast.Slice):
        return "*"
    values = evaluate(frame, node)
    return key_of(values)


def key_of(values: ValueSet) -> object:
    """The literal that these values represent; "*" if there is not exactly one."""
    if len(values) == 1:
        (value,) = values
        if isinstance(value, Constant) and value.literal is not None:
            return value.literal
        if isinstance(value, EnumMember):
            return f"{value.owner.name}.{value.name}"
    return "*"


def item(frame: Frame, values: ValueSet, key: object) -> ValueSet:
    """values[key]."""
    found: ValueSet = EMPTY
    for value in values:
        if isinstance(value, Container):
            found |= frame.items(value, key)
        elif isinstance(value, Unknown):
            found |= frozenset((value,))
    return frame.resolve(found)


def _subscript(frame: Frame, node: ast.Subscript) -> ValueSet:
    owners = evaluate(frame, node.value)
    key = literal_key(frame, node.slice)
    found: ValueSet = EMPTY
    for owner in owners:
        if isinstance(owner, Container):
            if isinstance(node.slice, ast.Slice):
                found |= frozenset((owner,))
            else:
                found |= frame.resolve(frame.items(owner, key))
        elif isinstance(owner, Function):
            found |= frame.universe.one(Launch, owner.info)
        elif isinstance(owner, Instance):
            found |= calls.call_method(frame, owner, "__getitem__", [frame.universe.data], node)
        elif isinstance(owner, (ClassValue, Launch)):
            found |= frozenset((owner,))
            if isinstance(owner, ClassValue) and calls.is_enum(frame, owner.info):
                found |= frame.universe.one(Instance, owner.info)
        elif isinstance(owner, (Unknown, External)):  # External: a generic alias, OrderedDict[int, str]
            found |= frozenset((owner,))
        else:
            found |= frame.universe.any
    return found


def _binary(frame: Frame, node: ast.BinOp) -> ValueSet:
    left, right = evaluate(frame, node.left), evaluate(frame, node.right)
    if isinstance(node.op, ast.BitOr) and any(isinstance(value, ClassValue) for value in left | right):
        return left | right  # a union of types
    both = frozenset(value for value in left | right if isinstance(value, Container))
    if not both:
        return frame.universe.data
    if isinstance(node.op, ast.Add) and len(both) > 1:
        container = frame.container(node, "List")
        frame.put(container, "*", frame.elements(both))
        return frozenset((container,))
    return both


def _boolean(frame: Frame, node: ast.BoolOp) -> ValueSet:
    """`and` and `or`: operands after one that decides the result are dead."""
    found: ValueSet = EMPTY
    environment, stop = frame.environment, "false" if isinstance(node.op, ast.And) else "true"
    frame.environment = dict(environment)
    for position, operand in enumerate(node.values):
        decided = decisions.truth(frame, operand)
        values = evaluate(frame, operand)
        if decided == "waits":
            found = EMPTY if position == 0 else found
            break
        if decided == stop:
            # `x and False` is falsy whatever x is; only the deciding operand matters later.
            found = values if _is_static(values) else found | values
            break
        if decided == "open" or position == len(node.values) - 1:
            found |= values
        decisions.narrow(frame, operand, isinstance(node.op, ast.Or))
    frame.environment = environment
    return found


def _is_static(values: ValueSet) -> bool:
    return len(values) == 1 and all(isinstance(value, Constant) for value in values)


def _conditional(frame: Frame, node: ast.IfExp) -> ValueSet:
    decided = decisions.truth(frame, node.test)
    if decided == "waits":
        return EMPTY
    found: ValueSet = EMPTY
    environment, guards = frame.environment, frame.guards
    if decided == "open":
        evaluate(frame, node.test)
    for branch, negated, dead in ((node.body, False, "false"), (node.orelse, True, "true")):
        if decided != dead:
            frame.environment = dict(environment)
            if decisions.narrow(frame, node.test, negated):
                frame.guards = (*guards, calls.Guard(node.test, negated)) if decided == "open" else guards
                found |= evaluate(frame, branch)
            frame.environment, frame.guards = environment, guards
    return found


def _unary(frame: Frame, node: ast.UnaryOp) -> ValueSet:
    evaluate(frame, node.operand)
    if isinstance(node.op, ast.Not):
        decided = decisions.truth(frame, node.operand)
        if decided in ("true", "false"):
            return frame.constant(decided == "false")
        if decided == "waits":
            return EMPTY
    return frame.universe.data


def _compare(frame: Frame, node: ast.Compare) -> ValueSet:
    for part in (node.left, *node.comparators):
        evaluate(frame, part)
    return frame.universe.data


def _lambda(frame: Frame, node: ast.Lambda) -> ValueSet:
    info = frame.module.function(node, frame.function.qualname)
    return frame.universe.one(Function, info, None if frame.is_module else frame.context)


def _comprehension(frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> ValueSet:
    from tools.kernel_tracing.engine.interpreter import store

    environment, is_module = frame.environment, frame.is_module
    frame.environment, frame.is_module = dict(environment), False
    for generator in node.generators:
        store(frame, generator.target, iterate(frame, generator.iter))
        for test in generator.ifs:
            evaluate(frame, test)
            decisions.narrow(frame, test, False)
    container = frame.container(node, "Dict" if isinstance(node, ast.DictComp) else "List")
    if isinstance(node, ast.DictComp):
        frame.put(container, literal_key(frame, node.key), evaluate(frame, node.value))
    else:
        frame.put(container, "*", evaluate(frame, node.elt))
    frame.environment, frame.is_module = environment, is_module
    return frozenset((container,))


def iterate(frame: Frame, node: ast.expr) -> ValueSet:
    """What a loop over an expression binds."""
    values = evaluate(frame, node)
    found = frame.elements(values)
    for value in values:
        if isinstance(value, Instance):
            found |= frame.elements(calls.call_method(frame, value, "__iter__", [], node))
        elif isinstance(value, ClassValue) and calls.is_enum(frame, value.info):
            found |= frame.universe.one(Instance, value.info)
    return found or frame.universe.any


def _yield(frame: Frame, node: ast.Yield) -> ValueSet:
    if node.value is not None:
        generator = frame.universe.make(Container, ("yield", frame.context), "generator")
        frame.put(generator, "*", evaluate(frame, node.value))
    return frame.universe.any


def _yield_from(frame: Frame, node: ast.YieldFrom) -> ValueSet:
    generator = frame.universe.make(Container, ("yield", frame.context), "generator")
    frame.put(generator, "*", frame.elements(evaluate(frame, node.value)))
    return frame.universe.any


def _walrus(frame: Frame, node: ast.NamedExpr) -> ValueSet:
    values = evaluate(frame, node.value)
    frame.assign(node.target.id, values)
    return values


def _formatted(frame: Frame, node: ast.JoinedStr) -> ValueSet:
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            evaluate(frame, part.value)
    return frame.universe.data


def module_value(frame: Frame, name: str) -> ValueSet:
    """A module by its absolute name."""
    if name in frame.solver.index.sources.modules:
        return frame.universe.one(ModuleValue, name)
    return frame.universe.one(External, name)


def _starred(frame: Frame, node: ast.Starred) -> ValueSet:
    return frame.elements(evaluate(frame, node.value))


def _await(frame: Frame, node: ast.Await) -> ValueSet:
    return evaluate(frame, node.value)


_HANDLERS: dict[type[ast.expr], Callable[..., ValueSet]] = {
    ast.Name: _name,
    ast.Constant: _constant,
    ast.Attribute: _attribute,
    ast.Call: _call,
    ast.Tuple: _sequence,
    ast.List: _sequence,
    ast.Set: _sequence,
    ast.Dict: _dictionary,
    ast.Subscript: _subscript,
    ast.BinOp: _binary,
    ast.BoolOp: _boolean,
    ast.IfExp: _conditional,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.Lambda: _lambda,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.Yield: _yield,
    ast.YieldFrom: _yield_from,
    ast.NamedExpr: _walrus,
    ast.JoinedStr: _formatted,
    ast.Starred: _starred,
    ast.Await: _await,
}
