"""Objects: classes, attributes, items, truth and equality."""

from __future__ import annotations

from collections import deque
from typing import Any

from tools.kernel_tracing.evaluator import tensors
from tools.kernel_tracing.evaluator.classes import Classes, fields_of
from tools.kernel_tracing.evaluator.operators import plain
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    SIZE,
    UNKNOWN,
    Builtin,
    Choice,
    Class,
    External,
    Function,
    Instance,
    Kernel,
    LibraryClass,
    LibraryFunction,
    LibraryModule,
    LibraryObject,
    Method,
    ModuleObject,
    NativeModule,
    Opaque,
    Partial,
    Property,
    Raised,
    Super,
    Tensor,
    TritonKernel,
    Unknown,
    Value,
    Wrapped,
    choice,
)

_NATIVE = (
    str,
    int,
    float,
    bool,
    list,
    tuple,
    dict,
    set,
    frozenset,
    bytes,
    slice,
    range,
    deque,
    type(None),
    BaseException,
)


# Plain data that compares as Python does.
_ATOMS = frozenset({str, int, float, bool})
# Bases outside the sources of which no attribute is read from a class itself.
_PLAIN_BASES = frozenset({"torch.nn.Module", "abc.ABC", "typing.Generic", "typing.Protocol", "builtins.object"})


class Objects(Classes):
    """Classes, attributes and items."""

    # Attributes

    def load(self, owner: Value, name: str) -> Value:
        found = self.find(owner, name)
        if found is MISSING:
            if self.frame.handlers:
                raise self.error(AttributeError, name)
            self.problem(f"no attribute {name} of {describe(owner)}")
            return UNKNOWN
        return found

    def find(self, owner: Value, name: str) -> Value:
        """`owner.name`, or MISSING if it has no such attribute."""
        if isinstance(owner, Instance):
            return self._of_instance(owner, name)
        if isinstance(owner, Unknown):
            return UNKNOWN
        if isinstance(owner, Tensor):
            return tensors.attribute(owner, name)
        if isinstance(owner, ModuleObject):
            return self._of_module(owner, name)
        if isinstance(owner, Class):
            return self._of_class(owner, name)
        if isinstance(owner, External):
            return self.external_attribute(owner, name)
        if isinstance(owner, Choice):
            found = [self.find(one, name) for one in owner.values if one is not None]
            known = [one for one in found if one is not MISSING]
            return choice(known) if known else MISSING
        if isinstance(owner, Super):
            order = owner.receiver.cls.order if isinstance(owner.receiver, Instance) else owner.receiver.order
            for cls in order[order.index(owner.after) + 1 :] if owner.after in order else []:
                if name in cls.names:
                    return self._bound(cls.names[name], owner.receiver, cls)
            return Builtin(f"super.{name}", lambda core, args, kwargs: None)
        if isinstance(owner, (Opaque, LibraryObject)):
            return self._of_opaque(owner, name)
        if isinstance(owner, (LibraryModule, LibraryClass)):
            return self.library_attribute(owner, name)
        if isinstance(
            owner, (Function, Method, Partial, TritonKernel, Builtin, LibraryFunction, Kernel, Wrapped, Property)
        ):
            return self._of_function(owner, name)
        if isinstance(owner, NativeModule):
            return self.native_function(owner, name)
        if isinstance(owner, (*_NATIVE, type)):
            return getattr(owner, name, MISSING)
        return getattr(owner, name, UNKNOWN)

    def _of_instance(self, owner: Instance, name: str) -> Value:
        if name in owner.fields:
            return self.resolve(owner.fields[name])
        if name == "__class__":
            return owner.cls
        if name == "__dict__":
            return owner.fields
        if name == "_replace" and owner.cls.kind == "namedtuple":
            return Builtin(name, lambda core, args, kwargs: Instance(owner.cls, owner.fields | kwargs, core.region))
        for cls in owner.cls.order:
            if name in cls.names:
                return self._bound(cls.names[name], owner, cls)
        hook = owner.cls.find("__getattr__")
        if hook is not MISSING and not name.startswith("__"):
            try:
                return self.call(Method(hook, owner), [name], {})
            except Raised:
                return MISSING
        if owner.cls.externals:
            return self.inherited(owner, name)
        return MISSING

    def _bound(self, value: Value, receiver: Value, cls: Class) -> Value:
        value = self.resolve(value)
        if isinstance(value, Function):
            return Method(value, receiver) if isinstance(receiver, Instance) else value
        if isinstance(value, Property) and isinstance(receiver, Instance):
            return self.call(value.getter, [receiver], {})
        if isinstance(value, Wrapped):
            if value.kind == "staticmethod":
                return value.function
            return Method(value.function, receiver.cls if isinstance(receiver, Instance) else receiver)
        if isinstance(value, Builtin) and isinstance(receiver, Instance) and value.name.startswith("method "):
            return Method(value, receiver)
        if isinstance(value, Instance) and value.cls.find("__get__") is not MISSING:
            return self.call(self.load(value, "__get__"), [receiver, cls], {})
        return value

    def _of_class(self, owner: Class, name: str) -> Value:
        if name in ("__name__", "__qualname__"):
            return owner.name if name == "__name__" else owner.qualname
        if name == "__module__":
            return owner.module.name
        if name == "__dataclass_fields__" and owner.kind == "dataclass":
            return dict.fromkeys(fields_of(self, owner))
        if name == "__mro__":
            return tuple(owner.order)
        if name in ("__members__", "_member_map_", "_value2member_map_") and owner.kind == "enum":
            return (
                dict(owner.members) if "value2" not in name else {m.fields["value"]: m for m in owner.members.values()}
            )
        for cls in owner.order:
            if name in cls.names:
                return self._bound(cls.names[name], owner, cls)
        if name in ("__dict__", "__annotations__"):
            return owner.names if name == "__dict__" else dict.fromkeys(fields_of(self, owner), UNKNOWN)
        if name in ("__init__", "__new__", "__setattr__") or owner.externals - _PLAIN_BASES:
            return Builtin(name, lambda core, args, kwargs: Opaque("()") if name == "apply" else None)
        return MISSING

    def _of_module(self, owner: ModuleObject, name: str) -> Value:
        found = self.imported(owner.name, name)
        return MISSING if isinstance(found, Unknown) and not self._defines(owner, name) else found

    def _defines(self, owner: ModuleObject, name: str) -> bool:
        return name in owner.scope.names or bool(owner.stars)

    def _of_opaque(self, owner: Opaque | LibraryObject, name: str) -> Value:
        if name in owner.fields:
            return owner.fields[name]
        if isinstance(owner, LibraryObject):
            return self.library_attribute(LibraryClass(owner.info), name)
        return self.external_attribute(External(f"{owner.path}()"), name)

    def _of_function(self, owner: Value, name: str) -> Value:
        function = owner.function if isinstance(owner, (Method, Partial, TritonKernel, Wrapped)) else owner
        if name in ("__func__", "__wrapped__", "func", "fn", "fget"):
            return function
        if name == "__self__" and isinstance(owner, Method):
            return owner.receiver
        if isinstance(function, Function):
            if name in function.fields:
                return function.fields[name]
            if name in ("__name__", "__qualname__"):
                return function.name if name == "__name__" else function.qualname
            if name == "__module__":
                return function.module.name
            if isinstance(owner, TritonKernel):
                return UNKNOWN
            return UNKNOWN if name.startswith("__") or name in ("cache_clear", "cache_info") else MISSING
        return UNKNOWN

    def store(self, owner: Value, name: str, value: Value) -> None:
        if isinstance(owner, Choice):
            for one in owner.values:
                with self.uncertain():
                    self.store(one, name, value)
        elif isinstance(owner, Instance):
            known = owner.cls.find(name)
            if isinstance(known, Property) and known.setter is not None:
                self.call(known.setter, [owner, value], {})
                return
            hook = owner.cls.find("__setattr__")
            inside = self.frame.function is not None and self.frame.function.name == "__setattr__"
            if isinstance(hook, Function) and not inside:
                self.call(Method(hook, owner), [name, value], {})
                return
            fields = owner.fields
            if name not in fields and not isinstance(known, (Function, Property)) and known is not MISSING:
                fields = {name: self.resolve(known)}  # what the class says stays possible
            owner.fields[name] = self.merged(fields, name, value, owner.region)
        elif isinstance(owner, (Tensor, Opaque, LibraryObject, Function)):
            owner.fields[name] = value
        elif isinstance(owner, Method) and isinstance(owner.function, Function):
            owner.function.fields[name] = value
        elif isinstance(owner, Class):
            owner.names[name] = self.merged(owner.names, name, value, -1)
        elif isinstance(owner, ModuleObject):
            owner.scope.names[name] = self.merged(owner.scope.names, name, value, -1)

    # Items

    def item(self, owner: Value, key: Value) -> Value:
        if isinstance(owner, Choice):
            return choice([self.item(one, key) for one in owner.values])
        if isinstance(key, Choice):
            return choice([self.item(owner, one) for one in key.values])
        if isinstance(owner, TritonKernel):
            return TritonKernel(owner.function, True)
        if isinstance(owner, Tensor):
            return tensors.indexed(owner, key)
        if owner is tensors.UnknownShape:
            return SIZE if isinstance(key, int) else UNKNOWN
        if isinstance(owner, (External, Class)):
            if isinstance(owner, Class) and owner.kind == "enum":
                return owner.members.get(key, UNKNOWN) if isinstance(key, str) else UNKNOWN
            return owner  # a generic type
        if isinstance(owner, Instance):
            if owner.cls.find("__getitem__") is not MISSING:
                return self.call(self.load(owner, "__getitem__"), [key], {})
            if "elements" in owner.fields:
                return self.item(owner.fields["elements"], key)
            if owner.cls.kind == "namedtuple" and isinstance(key, int):
                return list(owner.fields.values())[key]
            return UNKNOWN
        if isinstance(owner, (list, tuple, str, dict, range, deque, bytes)):
            return self._native_item(owner, plain(key))
        return UNKNOWN

    def _native_item(self, owner: Any, key: Value) -> Value:
        if is_open(key):
            values = list(owner.values()) if isinstance(owner, dict) else list(owner)
            return choice(values) if values and not isinstance(owner, str) else UNKNOWN
        try:
            if isinstance(owner, dict) and key not in owner and type(owner) is dict:
                match = next((known for known in owner if self.equal(known, key) is True), MISSING)
                if match is not MISSING:
                    return owner[match]
            return self.resolve(owner[key])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if self.frame.handlers:
                raise Raised(error) from None
            self.problem(f"no item {key!r}"[:80])
            return UNKNOWN

    # Truth and equality

    def truth(self, value: Value) -> bool | None:
        if value is True or value is False:
            return value
        if value is None:
            return False
        if isinstance(value, (Unknown, Tensor)):
            return None
        if isinstance(value, Choice):
            found = {self.truth(one) for one in value.values}
            return found.pop() if len(found) == 1 else None
        if isinstance(value, Instance):
            value = plain(value)
            if not isinstance(value, Instance):
                return bool(value)
            for name in ("__bool__", "__len__"):
                if value.cls.find(name) is not MISSING:
                    return self.truth(self.call(self.load(value, name), [], {}))
            return bool(value.fields["elements"]) if "elements" in value.fields else True
        try:
            return bool(value)
        except (TypeError, ValueError):
            return True

    def equal(self, one: Value, other: Value) -> Value:
        if isinstance(one, Choice) or isinstance(other, Choice):
            ones = one.values if isinstance(one, Choice) else (one,)
            others = other.values if isinstance(other, Choice) else (other,)
            found = [self.equal(left, right) for left in ones for right in others]
            return found[0] if all(result is found[0] for result in found) else UNKNOWN
        if one is other and not isinstance(one, Unknown):
            return True
        if isinstance(one, Unknown) or isinstance(other, Unknown):
            return UNKNOWN
        if one is None or other is None:
            return False
        if one.__class__ in _ATOMS and other.__class__ in _ATOMS:
            return bool(one == other)
        if isinstance(one, Tensor) or isinstance(other, Tensor):
            return UNKNOWN
        left, right = plain(one), plain(other)
        for value, against in ((left, right), (right, left)):
            if isinstance(value, Instance):
                method = value.cls.find("__eq__")
                return (
                    self.call(Method(method, value), [against], {})
                    if isinstance(method, Function)
                    else value == against
                )
        if isinstance(left, (tuple, list)) and type(left) is type(right):
            if len(left) != len(right):
                return False
            found = [self.equal(a, b) for a, b in zip(left, right, strict=True)]
            return False if False in found else UNKNOWN if UNKNOWN in found else True
        if isinstance(left, Opaque) or isinstance(right, Opaque):
            return UNKNOWN
        return bool(left == right)


def is_open(key: Value) -> bool:
    """Whether a key is not known."""
    return isinstance(key, (Unknown, Tensor)) or (isinstance(key, tuple) and any(is_open(one) for one in key))


def describe(value: Value) -> str:
    """A value in a message."""
    if isinstance(value, Instance):
        return value.cls.name
    if isinstance(value, (Class, ModuleObject)):
        return value.name
    return str(getattr(value, "path", None) or getattr(value, "qualname", None) or type(value).__name__)
