"""What all parts of the evaluator share: its state, and the operations that the parts offer each other."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tools.kernel_tracing.evaluator.values import (
    Class,
    External,
    Function,
    Instance,
    LibraryClass,
    LibraryModule,
    ModuleObject,
    NativeModule,
    Raised,
    Scope,
    Value,
    choice,
    same,
)

if TYPE_CHECKING:
    from tools.kernel_tracing.rules.platforms import Platform
    from tools.kernel_tracing.source.index import Index


@dataclass(eq=False, slots=True)
class Test:
    """A test that encloses a statement; `open`: not decided, so both branches run."""

    node: ast.expr
    negated: bool
    open: bool


@dataclass(eq=False, slots=True)
class Frame:
    """A running function."""

    module: ModuleObject
    qualname: str
    scope: Scope
    function: Function | None = None
    line: int = 0
    call: ast.AST | None = None
    tests: list[Test] = field(default_factory=list)
    returns: list[Value] = field(default_factory=list)
    yielded: list[Value] = field(default_factory=list)
    receiver: Value = None
    globals: frozenset[str] = frozenset()
    nonlocals: frozenset[str] = frozenset()
    handled: Value = None  # the exception that an `except` clause handles
    handlers: int = 0  # enclosing `try` statements that catch something
    on_yield: Callable[[Value], Value] | None = None


@dataclass(frozen=True)
class Hop:
    """One frame of a recorded chain."""

    file: str
    line: int
    function: str
    call: ast.AST | None
    tests: tuple[Test, ...]


@dataclass(frozen=True)
class Event:
    """A kernel that was called, and its chain: the kernel's call first; `order` grows with time."""

    phase: str
    name: str
    source: str
    file: str
    line: int
    chain: tuple[Hop, ...]
    order: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What distinguishes events."""
        return (self.phase, self.name, tuple((hop.file, hop.line, hop.function) for hop in self.chain))


class Core(ABC):
    """State of an evaluation. The parts define the abstract methods; none can be missing when one is made."""

    def __init__(self, index: Index, platform: Platform) -> None:
        self.index = index
        self.platform = platform
        self.environment: dict[str, str] = {}
        self.answers: dict[str, Any] = {}  # what torch and the system say, by path
        self.overrides: dict[str, Any] = {}  # qualified names of functions whose results are decided
        self.operators: dict[str, Value] = {}  # torch operators that the sources register
        self.aten: dict[str, Function] = {}  # functions of the sources that replace torch's own, by operator
        self.modules: dict[str, ModuleObject] = {}
        self.classes: list[Class] = []
        self.stack: list[Frame] = []
        self.region = 0
        self.regions = 0
        self.phase = ""
        self.events: dict[tuple[Any, ...], Event] = {}
        self.launches = 0
        self.plain_modules: dict[tuple[Any, ...], Event] = {}  # modules that the model calls and that run no kernel
        self.problems: dict[str, int] = {}

    @property
    def frame(self) -> Frame:
        """The running function."""
        return self.stack[-1]

    def release(self) -> None:
        """Ends the evaluation: what refers to itself is taken apart, so that its memory is free at once."""
        for module in self.modules.values():
            module.scope.names.clear()
        for cls in self.classes:
            cls.names.clear()
            cls.order.clear()
            cls.members.clear()
        for table in (self.modules, self.overrides, self.operators, self.aten, self.events):
            table.clear()
        self.classes.clear()
        self.stack.clear()

    def problem(self, text: str) -> None:
        """Note what could not be evaluated."""
        where = f"{self.frame.module.file}:{self.frame.line}" if self.stack else ""
        key = f"{where}: {text}"
        self.problems[key] = self.problems.get(key, 0) + 1

    def record(self, name: str, source: str, file: str, line: int) -> None:
        """Notes a kernel's call, with the stack."""
        self.launches += 1
        event = self.event(name, source, file, line, self.launches)
        self.events.setdefault(event.key, event)

    def event(self, name: str, source: str, file: str, line: int, order: int) -> Event:
        """The event of a call that the running function makes."""
        chain = tuple(
            Hop(frame.module.file, frame.line, frame.qualname, frame.call, tuple(frame.tests))
            for frame in reversed(self.stack)
        )
        return Event(self.phase, name, source, file, line, chain, order)

    @contextmanager
    def uncertain(self) -> Iterator[None]:
        """What runs inside may not run: objects made before keep their old fields as well."""
        before = self.region
        self.regions += 1
        self.region = self.regions
        try:
            yield
        finally:
            self.region = before

    def merged(self, fields: dict[str, Value], name: str, value: Value, region: int) -> Value:
        """The value of a field after an assignment that may not happen."""
        if region == self.region or self.region == 0 or name not in fields or same(fields[name], value):
            return value
        return choice([fields[name], value])

    # Parts of the evaluator call each other through these.

    @abstractmethod
    def evaluate(self, node: ast.expr) -> Value: ...

    @abstractmethod
    def run(self, body: list[ast.stmt]) -> None: ...

    @abstractmethod
    def assign(self, target: ast.expr, value: Value) -> None: ...

    @abstractmethod
    def bind(self, name: str, value: Value) -> None: ...

    @abstractmethod
    def lookup(self, name: str) -> Value: ...

    @abstractmethod
    def call(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value: ...

    @abstractmethod
    def load(self, owner: Value, name: str) -> Value: ...

    @abstractmethod
    def store(self, owner: Value, name: str, value: Value) -> None: ...

    @abstractmethod
    def item(self, owner: Value, key: Value) -> Value: ...

    @abstractmethod
    def truth(self, value: Value) -> bool | None: ...

    @abstractmethod
    def iterate(self, value: Value) -> list[Value] | None: ...

    @abstractmethod
    def is_instance(self, value: Value, kind: Value) -> bool | None: ...

    @abstractmethod
    def equal(self, one: Value, other: Value) -> Value: ...

    @abstractmethod
    def module(self, name: str) -> ModuleObject | None: ...

    @abstractmethod
    def start(self, module: ModuleObject) -> None:
        """Runs a module's body, once."""

    @abstractmethod
    def imported(self, module: str, name: str) -> Value: ...

    @abstractmethod
    def resolve(self, value: Value) -> Value: ...

    @abstractmethod
    def import_module(self, name: str) -> Value: ...

    @abstractmethod
    def make_class(self, node: ast.ClassDef) -> Class: ...

    @abstractmethod
    def with_manager(self, manager: Value, inside: Callable[[Value], None]) -> None:
        """Runs `inside` within a context manager."""

    @abstractmethod
    def import_all(self, source: str) -> None:
        """`from source import *`."""

    @abstractmethod
    def narrow(self, test: ast.expr, negated: bool) -> bool: ...

    @abstractmethod
    def inherited(self, owner: Instance, name: str) -> Value:
        """An attribute that a base class outside the sources may define."""

    @abstractmethod
    def external_attribute(self, owner: External, name: str) -> Value: ...

    @abstractmethod
    def library_attribute(self, owner: LibraryModule | LibraryClass, name: str) -> Value: ...

    @abstractmethod
    def native_function(self, owner: NativeModule, name: str) -> Value: ...

    @abstractmethod
    def call_external(self, path: str, args: list[Value], kwargs: dict[str, Value]) -> Value: ...

    @abstractmethod
    def call_library(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value: ...

    @abstractmethod
    def call_native(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value: ...

    @abstractmethod
    def known(self, function: Function, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """The result of a function that a rule decides; MISSING for all others."""

    @abstractmethod
    def prepare(self, instance: Instance, args: list[Value]) -> None:
        """Gives an object the fields that a base class outside the sources sets."""

    def error(self, kind: type[BaseException], text: str) -> Raised:
        """An exception of the sources."""
        return Raised(kind(text))
