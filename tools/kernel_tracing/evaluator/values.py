"""Values of the evaluator. Plain Python values stand for themselves; the classes here stand for all others."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Value = Any


class Unknown:
    """A value of which nothing is known."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()
# A size of a tensor: not known, but not zero.
SIZE = Unknown()


@dataclass(eq=False, slots=True)
class External:
    """A name of a library that is not evaluated, such as `torch.float16`; two of the same path are equal."""

    path: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, External) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)


@dataclass(eq=False, slots=True)
class Tensor:
    """A tensor.

    Attributes:
        shape: None if it is not known; elements may be unknown.
        dtype: None if it is not known.
        data: the contents of short lists of integers.
        fields: what the sources set on it.
        transposed: whether it is the transpose of a contiguous tensor; None if it may be any view.
    """

    shape: tuple[Value, ...] | None = None
    dtype: Value = None
    data: tuple[int, ...] | None = None
    fields: dict[str, Value] = field(default_factory=dict)
    transposed: bool | None = False


@dataclass(eq=False, slots=True)
class Opaque:
    """An object of a library's class: not None, true, and otherwise unknown unless a field was set."""

    path: str
    fields: dict[str, Value] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Choice:
    """One of several values."""

    values: tuple[Value, ...]


@dataclass(eq=False, slots=True)
class Scope:
    """Names of a module, a function, a class body or a comprehension."""

    names: dict[str, Value]
    parent: Scope | None = None
    module: ModuleObject | None = None


@dataclass(eq=False, slots=True)
class ModuleObject:
    """A module of the sources; its body runs when a name is first needed."""

    name: str
    file: str
    scope: Scope = field(default_factory=lambda: Scope({}))
    started: bool = False
    stars: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Lazy:
    """`from module import name`, not looked up yet."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Function:
    """A function of the sources, with the scope that holds its free variables."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    module: ModuleObject
    qualname: str
    owner: Class | None = None
    defaults: dict[str, Value] = field(default_factory=dict)
    fields: dict[str, Value] = field(default_factory=dict)
    is_context: bool = False

    @property
    def name(self) -> str:
        """Its name without the scopes that contain it."""
        return self.qualname.rpartition(".")[2]


@dataclass(eq=False, slots=True)
class Class:
    """A class of the sources."""

    name: str
    qualname: str
    module: ModuleObject
    node: ast.ClassDef
    bases: list[Value]
    names: dict[str, Value] = field(default_factory=dict)
    order: list[Class] = field(default_factory=list)  # its method resolution order
    externals: frozenset[str] = frozenset()  # paths of all bases that are not evaluated
    kind: str = ""  # "enum", "dataclass" or "namedtuple"
    members: dict[str, Instance] = field(default_factory=dict)

    def find(self, name: str) -> Value:
        """A class attribute, by method resolution order; MISSING if there is none."""
        for cls in self.order:
            if name in cls.names:
                return cls.names[name]
        return MISSING


@dataclass(eq=False, slots=True)
class Instance:
    """An object of a class of the sources."""

    cls: Class
    fields: dict[str, Value] = field(default_factory=dict)
    region: int = 0

    def __hash__(self) -> int:
        if self.cls.kind == "dataclass":
            return hash(self.cls.name)
        return id(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Instance) and self.cls.kind == other.cls.kind == "dataclass":
            return self is other or (self.cls is other.cls and self.fields == other.fields)
        return self is other

    def __iter__(self) -> Iterator[Value]:
        return iter(self.fields.values())


@dataclass(eq=False, slots=True)
class Method:
    """A function bound to an instance or a class."""

    function: Value
    receiver: Value


@dataclass(eq=False, slots=True)
class Super:
    """`super()`."""

    after: Class
    receiver: Value


@dataclass(eq=False, slots=True)
class Property:
    """A property, or a cached one."""

    getter: Value
    setter: Value = None


@dataclass(eq=False, slots=True)
class Wrapped:
    """`staticmethod` or `classmethod`."""

    kind: str
    function: Value


@dataclass(eq=False, slots=True)
class Partial:
    """functools.partial."""

    function: Value
    args: list[Value]
    kwargs: dict[str, Value]


@dataclass(eq=False, slots=True)
class TritonKernel:
    """A function that Triton compiles; `launched`: with its grid."""

    function: Function
    launched: bool = False


@dataclass(eq=False, slots=True)
class NativeModule:
    """What a just-in-time loader returns: each of its functions is a kernel."""

    loader: Function | None


@dataclass(eq=False, slots=True)
class Kernel:
    """A callable that ends a chain: a library's function, a function of a native module, or a torch op."""

    name: str
    source: str
    file: str = ""
    line: int = 0


@dataclass(eq=False, slots=True)
class LibraryClass:
    """A class of a kernel library; `info` is its entry in the index."""

    info: Any


@dataclass(eq=False, slots=True)
class LibraryObject:
    """An instance of a LibraryClass."""

    info: Any
    fields: dict[str, Value] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class LibraryFunction:
    """A function of a kernel library."""

    info: Any


@dataclass(eq=False, slots=True)
class LibraryModule:
    """A module of a kernel library."""

    name: str


@dataclass(eq=False, slots=True)
class Builtin:
    """A function that the evaluator itself implements, called with the evaluator, arguments and keywords."""

    name: str
    run: Callable[..., Value]


@dataclass(eq=False, slots=True)
class Generator:
    """A context manager made from a generator function, not entered yet."""

    function: Function
    args: list[Value]
    kwargs: dict[str, Value]


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()


def choice(values: list[Value], most: int = 8) -> Value:
    """One of the values; UNKNOWN if one of them or their number is."""
    found: list[Value] = []
    for value in values:
        for one in value.values if isinstance(value, Choice) else (value,):
            if isinstance(one, Unknown):
                return UNKNOWN
            if not any(same(one, other) for other in found):
                found.append(one)
    if not found or len(found) > most:
        return UNKNOWN
    return found[0] if len(found) == 1 else Choice(tuple(found))


def same(one: Value, other: Value) -> bool:
    """Whether two values cannot be told apart."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (bool, int, float, str, External)):
        return bool(one == other)
    if isinstance(one, Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.data == other.data
            and not one.fields
            and not other.fields
        )
    if isinstance(one, Method):
        return one.function is other.function and one.receiver is other.receiver
    if isinstance(one, NativeModule):
        return one.loader is other.loader
    if isinstance(one, tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return False


def is_symbolic(value: Value) -> bool:
    """Whether Python itself cannot compute with a value."""
    return isinstance(value, (Unknown, Tensor, Choice, Opaque))


class Signal(Exception):
    """Leaves a statement."""


class Return(Signal):
    """`return`."""

    def __init__(self, value: Value) -> None:
        self.value = value


class Break(Signal):
    """`break`."""


class Continue(Signal):
    """`continue`."""


class Raised(Signal):
    """`raise`, with the exception that the sources raise."""

    def __init__(self, value: Value) -> None:
        self.value = value
