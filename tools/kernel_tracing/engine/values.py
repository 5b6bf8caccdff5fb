"""Abstract values: what a name may hold, as far as it matters for calls.

A `Universe` interns values, and they are hashed by the order of their creation, so that sets of them iterate in the
same order in every run.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tools.kernel_tracing.engine.solver import Context
    from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo


class Value:
    """One abstract value; equal only to itself."""

    __slots__ = ("uid",)
    uid: int

    def __hash__(self) -> int:
        return self.uid

    def __eq__(self, other: object) -> bool:
        return self is other


ValueSet = frozenset[Value]
EMPTY: ValueSet = frozenset()


class Unknown(Value):
    """A value that could be anything (`opaque`: anything that makes no calls, such as a number)."""

    __slots__ = ("opaque",)

    def __init__(self, opaque: bool) -> None:
        self.opaque = opaque


class Constant(Value):
    """A literal: a str, bool, None or int."""

    __slots__ = ("literal",)

    def __init__(self, literal: object) -> None:
        self.literal = literal


class EnumMember(Value):
    """A member of an Enum class."""

    __slots__ = ("name", "owner")

    def __init__(self, owner: ClassInfo, name: str) -> None:
        self.owner, self.name = owner, name


class ModuleValue(Value):
    """A module of the traced sources."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Alias(Value):
    """`from module import name`, not looked up yet, because a module is parsed only when one of its names is used."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class External(Value):
    """A dotted path in a library that is not traced: `torch.nn.functional.linear`."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


class ClassValue(Value):
    """A class of the traced sources."""

    __slots__ = ("info",)

    def __init__(self, info: ClassInfo) -> None:
        self.info = info


class Instance(Value):
    """All instances of one concrete class."""

    __slots__ = ("info",)

    def __init__(self, info: ClassInfo) -> None:
        self.info = info


class Function(Value):
    """A function or lambda, with the context that holds its free variables."""

    __slots__ = ("closure", "info")

    def __init__(self, info: FunctionInfo, closure: Context | None) -> None:
        self.info, self.closure = info, closure


class Method(Value):
    """A function bound to a receiver (an Instance, or a ClassValue for class methods)."""

    __slots__ = ("info", "receiver")

    def __init__(self, info: FunctionInfo, receiver: Value) -> None:
        self.info, self.receiver = info, receiver


class Super(Value):
    """`super()`: attributes of `receiver`, looked up after `after` in its method resolution order."""

    __slots__ = ("after", "receiver")

    def __init__(self, after: ClassInfo, receiver: Value) -> None:
        self.after, self.receiver = after, receiver


class Container(Value):
    """A list, tuple, dict, set or generator, identified by the place that makes it."""

    __slots__ = ("label", "site")

    def __init__(self, site: Hashable, label: str) -> None:
        self.site, self.label = site, label


class ContainerMethod(Value):
    """A method of a container: `layers.append`."""

    __slots__ = ("container", "name")

    def __init__(self, container: Container, name: str) -> None:
        self.container, self.name = container, name


class Partial(Value):
    """functools.partial: a callable and its first arguments."""

    __slots__ = ("function", "keywords", "positional")

    def __init__(
        self, function: Value, positional: tuple[ValueSet, ...], keywords: tuple[tuple[str, ValueSet], ...]
    ) -> None:
        self.function, self.positional, self.keywords = function, positional, keywords


class Launch(Value):
    """`kernel[grid]` of a Triton kernel."""

    __slots__ = ("info",)

    def __init__(self, info: FunctionInfo) -> None:
        self.info = info


class NativeModule(Value):
    """The module that a JIT loader returns, each function of which is a kernel.

    `loaders`: the function that loads it, then the caller of that function.
    """

    __slots__ = ("loaders",)

    def __init__(self, loaders: tuple[FunctionInfo, ...]) -> None:
        self.loaders = loaders


class NativeFunction(Value):
    """A function of a NativeModule; `loader` is the function that contains its name."""

    __slots__ = ("loader", "name")

    def __init__(self, loader: FunctionInfo, name: str) -> None:
        self.loader, self.name = loader, name


V = TypeVar("V", bound=Value)


class Universe:
    """Makes values, each of them only once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, ...], Value] = {}
        self._count = 0
        self.unknown = self.make(Unknown, False)
        self.opaque = self.make(Unknown, True)
        self.any: ValueSet = frozenset((self.unknown,))
        self.data: ValueSet = frozenset((self.opaque,))

    def make(self, kind: type[V], *arguments: Hashable) -> V:
        """The value of `kind` with these arguments."""
        # True == 1, so the type of a literal is part of its key.
        key = (kind, *arguments, type(arguments[0])) if kind is Constant else (kind, *arguments)
        value = self._made.get(key)
        if value is None:
            value = kind(*arguments)
            value.uid = self._count
            self._count += 1
            self._made[key] = value
        return value  # type: ignore[return-value]

    def storable(self, values: ValueSet) -> ValueSet:
        """The values as fields and parameters hold them. Literals other than strings become opaque: they could only
        decide tests, which stored values must not do.
        """
        return frozenset(
            self.opaque if isinstance(value, Constant) and not isinstance(value.literal, str) else value
            for value in values
        )

    def one(self, kind: type[V], *arguments: Hashable) -> ValueSet:
        """The set with only that value."""
        return frozenset((self.make(kind, *arguments),))
