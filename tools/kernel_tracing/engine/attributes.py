"""Attributes: fields of instances, methods by method resolution order, names of modules, annotations."""

from __future__ import annotations

import ast

from tools.kernel_tracing.engine import calls, expressions
from tools.kernel_tracing.engine.frame import Arguments, Frame
from tools.kernel_tracing.engine.models import containers, external
from tools.kernel_tracing.engine.values import (
    EMPTY,
    ClassValue,
    Constant,
    Container,
    ContainerMethod,
    EnumMember,
    External,
    Function,
    Instance,
    Method,
    ModuleValue,
    NativeFunction,
    NativeModule,
    Partial,
    Super,
    Unknown,
    Value,
    ValueSet,
)
from tools.kernel_tracing.rules import boundaries
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo, Module
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.syntax import last_name

# For an annotation that admits more classes than this, only the class itself is used.
MAX_SUBCLASSES = 120
# Label of containers that represent a bare object: `head = nn.Module(); head.norm = RMSNorm(...)`.
NAMESPACE = "Namespace"


def load(frame: Frame, owners: ValueSet, name: str, node: ast.expr) -> ValueSet:
    """`owner.name` for every owner."""
    found: ValueSet = EMPTY
    for owner in owners:
        found |= load_one(frame, owner, name, node)
    return found


def load_one(frame: Frame, owner: Value, name: str, node: ast.expr) -> ValueSet:
    """`owner.name`; properties are called."""
    if isinstance(owner, Unknown):
        return frozenset((owner,))
    if isinstance(owner, External):
        if "()." in owner.path:
            return frame.universe.any  # for what a library returns, only its methods are distinguished
        path = f"{owner.path}.{name}"
        constant = frame.solver.platform.constant(path)
        if constant is not None:
            return frame.constant(constant)
        return expressions.module_value(frame, path) if external.is_path(path) else frame.universe.any
    if isinstance(owner, Instance):
        return _load_instance(frame, owner, name, node)
    if isinstance(owner, ModuleValue):
        found = frame.read_global(owner.name, name)
        return (
            found or expressions.module_value(frame, f"{owner.name}.{name}")
            if _is_module(frame, owner, name)
            else found
        )
    if isinstance(owner, ClassValue):
        return _load_class(frame, owner, name)
    if isinstance(owner, Super):
        order = frame.solver.index.mro(_class_of(owner.receiver))
        later = order[order.index(owner.after) + 1 :] if owner.after in order else []
        return _from_classes(frame, later, name, owner.receiver, node)
    if isinstance(owner, Container) and owner.label == NAMESPACE:
        return frame.resolve(frame.items(owner, name))
    if isinstance(owner, Container):
        return frame.universe.one(ContainerMethod, owner, name) if name in containers.METHODS else frame.universe.data
    if isinstance(owner, NativeModule):
        return frame.universe.one(NativeFunction, boundaries.native_loader(owner.loaders, name), name)
    if isinstance(owner, EnumMember):
        return _load_instance(frame, frame.universe.make(Instance, owner.owner), name, node)
    if isinstance(owner, (Function, Method)) and name in ("__wrapped__", "__func__", "__get__"):
        return frozenset((owner,))
    if isinstance(owner, Partial) and name == "func":
        return frozenset((owner.function,))
    return frame.universe.data


def _is_module(frame: Frame, owner: ModuleValue, name: str) -> bool:
    return f"{owner.name}.{name}" in frame.solver.index.sources.modules


def _class_of(receiver: Value) -> ClassInfo:
    assert isinstance(receiver, (Instance, ClassValue))
    return receiver.info


def _load_instance(frame: Frame, owner: Instance, name: str, node: ast.expr) -> ValueSet:
    if name == "__class__":
        return frame.universe.one(ClassValue, owner.info)
    found = frame.resolve(frame.read(("field", owner.info, name)))
    order = frame.solver.index.mro(owner.info)
    found |= _from_classes(frame, order, name, owner, node)
    if all(is_literal(value) for value in found) and _declares(frame, order, name):
        # Nothing but literals was seen. If that does not change, the class's declaration is the only information.
        if frame.solver.waits(("declared", owner.info, name), frame.context):
            return found
        found |= declared_field(frame, owner.info, name)
    if found:
        return found
    if (getattr_method := _method(frame, order, "__getattr__")) is not None:
        # One variant per name. Otherwise a read of one name would give the values of all names ever read.
        asked, variant = Arguments([frame.constant(name)]), ("getattr", name)
        return calls.enter(frame, getattr_method, owner, None, asked, node, variant=variant)
    if frame.solver.waits(("field", owner.info, name), frame.context):
        return EMPTY
    return frame.universe.any


def _declares(frame: Frame, order: list[ClassInfo], name: str) -> bool:
    return any(name in info.annotations for info in order)


def is_literal(value: Value) -> bool:
    """Whether a value carries no information about calls: a constant, or plain data."""
    return isinstance(value, Constant) or (isinstance(value, Unknown) and value.opaque)


def _method(frame: Frame, order: list[ClassInfo], name: str) -> FunctionInfo | None:
    for info in order:
        if name in info.methods:
            return info.methods[name]
    return None


def find_method(frame: Frame, info: ClassInfo, name: str) -> FunctionInfo | None:
    """The method of that name that instances of a class have."""
    return find_method_in(frame.solver.index, info, name)


def find_method_in(index: Index, info: ClassInfo, name: str) -> FunctionInfo | None:
    """Like `find_method`, without a frame."""
    return next((cls.methods[name] for cls in index.mro(info) if name in cls.methods), None)


def _from_classes(frame: Frame, order: list[ClassInfo], name: str, receiver: Value, node: ast.expr) -> ValueSet:
    """The first class attribute or method of that name, bound to the receiver."""
    for info in order:
        frame.solver.start_module(info.module)
        replaced = frame.resolve(frame.read(("class", info, name)))
        if replaced:
            return frozenset(_bind(frame, value, receiver, info, name) for value in replaced)
        method = info.methods.get(name)
        if method is None and boundaries.is_library(info.module.name):
            method = boundaries.class_attribute(info, name)
        if method is not None:
            if method.decorators & {"property", "cached_property"} and isinstance(receiver, Instance):
                return calls.enter(frame, method, receiver, None, Arguments(), node)
            if "staticmethod" in method.decorators:
                return frame.universe.one(Function, method, None)
            if "classmethod" in method.decorators:
                return frame.universe.one(Method, method, frame.universe.make(ClassValue, _class_of(receiver)))
            return frame.universe.one(Method, method, receiver)
    return EMPTY


def _bind(frame: Frame, value: Value, receiver: Value, info: ClassInfo, name: str) -> Value:
    """A class attribute as seen from an instance: functions become methods."""
    if isinstance(value, Function) and isinstance(receiver, Instance) and not isinstance(value.info.node, ast.Lambda):
        method = info.methods.get(name)
        if method is not None and "staticmethod" in method.decorators:
            return value
        if value.closure is None:
            return frame.universe.make(Method, value.info, receiver)
        return frame.universe.make(Partial, value, (frozenset((receiver,)),), ())
    return value


def _load_class(frame: Frame, owner: ClassValue, name: str) -> ValueSet:
    if name == "__name__":
        return frame.constant(owner.info.name)
    for info in frame.solver.index.mro(owner.info):
        frame.solver.start_module(info.module)
        values = frame.resolve(frame.read(("class", info, name)))
        if values:
            if calls.is_enum(frame, info):
                return frame.universe.one(EnumMember, info, name)
            return values
        method = info.methods.get(name)
        if method is not None:
            if "classmethod" in method.decorators:
                return frame.universe.one(Method, method, owner)
            return frame.universe.one(Function, method, None)
    if name == "apply" and any(
        path.endswith("autograd.Function") for path in frame.solver.index.external_bases(owner.info)
    ):
        return _load_class(frame, owner, "forward")
    return frame.universe.any if frame.solver.index.external_bases(owner.info) else EMPTY


def store(frame: Frame, owners: ValueSet, name: str, values: ValueSet) -> None:
    """`owner.name = values`."""
    kept = frame.universe.storable(values)
    for owner in owners:
        if isinstance(owner, Instance):
            declaring = next((c for c in frame.solver.index.mro(owner.info) if name in c.annotations), None)
            if declaring is not None and frame.solver.is_data(declaring.annotations[name]):
                frame.write(("field", owner.info, name), frame.universe.data)
                continue
            frame.write(("field", owner.info, name), kept)
            setter = frame.solver.index.mro(owner.info)
            if (method := _method(frame, setter, "__setattr__")) is not None and method is not frame.function:
                calls.enter(frame, method, owner, None, Arguments([frame.constant(name), values]), None)
        elif isinstance(owner, ClassValue):
            frame.write(("class", owner.info, name), kept)
        elif isinstance(owner, Container) and owner.label == NAMESPACE:
            frame.put(owner, name, kept)
        elif isinstance(owner, ModuleValue):
            frame.write(("global", owner.name, name), values | frame.universe.data)


def declare(frame: Frame, target: ast.Attribute, annotation: ast.expr) -> None:
    """`self.field: Type [= value]`: record the annotation, for use when nothing better is known."""
    for owner in expressions.evaluate(frame, target.value):
        if isinstance(owner, Instance):
            owner.info.annotations.setdefault(target.attr, annotation)


def declared_field(frame: Frame, info: ClassInfo, name: str) -> ValueSet:
    """Instances that a field's annotation allows."""
    for cls in frame.solver.index.mro(info):
        if name in cls.annotations:
            return annotated(frame, cls.annotations[name], cls.module)
    return EMPTY


def annotated(frame: Frame, annotation: ast.expr, module: Module) -> ValueSet:
    """Instances that an annotation allows: of the class, and of every class of this platform that derives from it."""
    known = frame.solver.annotated.get(annotation)
    if known is None:
        known = frame.solver.annotated[annotation] = _annotated(frame, annotation, module)
    return known


def _annotated(frame: Frame, annotation: ast.expr, module: Module) -> ValueSet:
    if isinstance(annotation, ast.Constant):
        if not isinstance(annotation.value, str):
            return EMPTY
        try:
            return annotated(frame, ast.parse(annotation.value, mode="eval").body, module)
        except SyntaxError:
            return EMPTY
    if isinstance(annotation, ast.BinOp):
        return annotated(frame, annotation.left, module) | annotated(frame, annotation.right, module)
    if isinstance(annotation, ast.Subscript):
        outer = last_name(annotation.value)
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if outer in ("Optional", "Union", "Final", "Annotated", "ClassVar"):
            return frozenset().union(*(annotated(frame, part, module) for part in parts))
        if outer in ("type", "Type"):
            return EMPTY
        if outer in ("List", "list", "Sequence", "Iterable", "Tuple", "tuple", "Dict", "dict", "Set", "Iterator"):
            inside = frozenset().union(*(annotated(frame, part, module) for part in parts))
            if inside:
                container = frame.universe.make(
                    Container, ("annotation", module.name, annotation.lineno, annotation.col_offset), outer
                )
                frame.put(container, "*", inside)
                return frozenset((container,))
        return EMPTY
    found: set[Value] = set()
    for symbol in frame.solver.index.resolve(module, annotation):
        if isinstance(symbol, ClassInfo):
            found |= instances(frame, symbol)
    return frozenset(found)


def instances(frame: Frame, base: ClassInfo) -> ValueSet:
    """Instances of a class and of the classes that derive from it, except those of other platforms."""
    candidates = frame.solver.index.subclasses(base)
    if len(candidates) > MAX_SUBCLASSES:
        candidates = [base]
    found = []
    for info in candidates:
        if info is base or not (is_foreign(frame, info) or boundaries.is_test(info.module.name)):
            found.append(frame.universe.make(Instance, info))
            if len(candidates) > 1:
                frame.solver.expanded.setdefault(info, base.name)
    return frozenset(found)


def is_foreign(frame: Frame, info: ClassInfo) -> bool:
    """Whether a class belongs to another platform, according to its name, its file's name or the file's imports."""
    known = frame.solver.foreign.get(info)
    if known is None:
        known = frame.solver.foreign[info] = _is_foreign(frame.solver.platform, info)
    return known


def _is_foreign(platform: Platform, info: ClassInfo) -> bool:
    if platform.name_is_foreign(info.module.name, info.name):
        return True
    for node in info.module.tree.body:
        statements = node.body if isinstance(node, ast.Try) else [node]
        for statement in statements:
            paths = []
            if isinstance(statement, ast.Import):
                paths = [item.name for item in statement.names]
            elif isinstance(statement, ast.ImportFrom) and not statement.level:
                paths = [statement.module or ""]
            if any(platform.package_is_foreign(path) for path in paths):
                return True
    return False
