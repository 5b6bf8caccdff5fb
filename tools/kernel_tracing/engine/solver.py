"""The solver: cells of values, contexts of functions, and the work list that brings them to a fixed point.

A cell holds the values that may reach one place: a parameter, a field of a class, a module's name, a result. A
context is a function as called on one receiver class. Contexts read and write cells; when a cell grows, its
readers are interpreted again. Values are only ever added, so this process ends.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from tools.kernel_tracing.engine.values import EMPTY, Universe, Value, ValueSet
from tools.kernel_tracing.rules.data_types import is_data
from tools.kernel_tracing.rules.model_configs import ModelConfigs
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo, Module
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.libraries import LIBRARIES

# Contexts are interpreted at their first call, so that the caller can continue with their results. Below this depth,
# they wait in the work list instead.
MAX_DEPTH = 80
# The start of the reason for an approximate edge whose callee was passed to an unknown function.
GIVEN_TO = "passed to "


@dataclass(eq=False)
class Context:
    """A function, as called on one receiver, with the free variables of one enclosing context."""

    function: FunctionInfo
    receiver: Value | None
    closure: Context | None
    variant: tuple[Hashable, ...]  # values of sensitive parameters, or the site of a decorator
    started: bool = False
    running: bool = False
    queued: bool = False


@dataclass(frozen=True)
class Guard:
    """A test that encloses a call, and whether it must fail.

    `early`: the test does not enclose the call but leaves before it: "return" (or the end of an iteration) or "raise".
    """

    test: ast.expr
    negated: bool
    early: str = ""


@dataclass(eq=False)
class Edge:
    """A call in one context that enters another."""

    caller: Context
    call: ast.AST
    callee: Context
    guards: tuple[Guard, ...]
    approximate: str = ""

    @property
    def given_to(self) -> bool:
        """Whether the callee was only passed to an unknown function, which may call it."""
        return self.approximate.startswith(GIVEN_TO)


@dataclass(eq=False)
class KernelCall:
    """A call in a context that enters a kernel: a library's function, a Triton function, or the path of a torch op."""

    caller: Context
    call: ast.AST
    target: FunctionInfo | str
    name: str
    guards: tuple[Guard, ...]
    approximate: str = ""


@dataclass(eq=False)
class OpenCall:
    """A call whose target is not known."""

    caller: Context
    call: ast.Call
    name: str  # last component of the called expression
    library: str = ""  # the package that contains the target, if known


class Interpret(Protocol):
    """Interprets one context once."""

    def __call__(self, solver: Solver, context: Context) -> None: ...


@dataclass
class Solver:
    """All tables of one analysis."""

    index: Index
    platform: Platform
    interpret: Interpret
    universe: Universe = field(default_factory=Universe)
    edges: dict[tuple[Context, ast.AST, Context], Edge] = field(default_factory=dict)
    kernel_calls: dict[tuple[Context, ast.AST, FunctionInfo | str, str], KernelCall] = field(default_factory=dict)
    open_calls: dict[tuple[Context, ast.AST], OpenCall] = field(default_factory=dict)
    # Calls of known targets that have nothing to follow: classes without an initialiser, host helpers of libraries.
    leaves: dict[tuple[FunctionInfo, ast.AST, FunctionInfo | ClassInfo], None] = field(default_factory=dict)
    constructed: dict[ClassInfo, dict[Context, None]] = field(default_factory=dict)
    expanded: dict[ClassInfo, str] = field(default_factory=dict)  # class -> base whose annotation admitted it
    foreign: dict[ClassInfo | FunctionInfo, bool] = field(default_factory=dict)  # of other platforms
    data: dict[ast.expr, bool] = field(default_factory=dict)  # whether an annotation is plain data
    annotated: dict[ast.expr, ValueSet] = field(default_factory=dict)  # instances that annotations allow
    contexts: dict[tuple[Hashable, ...], Context] = field(default_factory=dict)
    model_configs: ModelConfigs | None = None  # of the model that is traced
    runs: int = 0
    on_progress: Callable[[int, int], None] | None = None
    _cells: dict[Hashable, ValueSet] = field(default_factory=dict)
    _readers: dict[Hashable, dict[Context, None]] = field(default_factory=dict)
    _work: deque[Context] = field(default_factory=deque)
    _waiting: dict[Hashable, dict[Context, None]] = field(default_factory=dict)
    _released: set[Hashable] = field(default_factory=set)
    _modules: set[Module] = field(default_factory=set)
    _depth: int = 0

    def read(self, key: Hashable, reader: Context) -> ValueSet:
        """The cell's values; when it grows, `reader` is interpreted again."""
        readers = self._readers.get(key)
        if readers is None:
            self._readers[key] = {reader: None}
        else:
            readers[reader] = None
        return self._cells.get(key, EMPTY)

    def peek(self, key: Hashable) -> ValueSet:
        """The cell's values, without depending on them."""
        return self._cells.get(key, EMPTY)

    def cells(self) -> list[tuple[Hashable, ValueSet]]:
        """All cells, in the order in which they were first written."""
        return list(self._cells.items())

    def write(self, key: Hashable, values: ValueSet) -> None:
        """Add values to a cell."""
        if not values:
            return
        old = self._cells.get(key)
        if old is None:
            self._cells[key] = values
        elif values <= old:
            return
        else:
            self._cells[key] = old | values
        for reader in self._readers.get(key, ()):
            self.enqueue(reader)

    def is_data(self, annotation: ast.expr | None) -> bool:
        """Whether an annotation admits only plain data."""
        if annotation is None:
            return False
        known = self.data.get(annotation)
        if known is None:
            known = self.data[annotation] = is_data(annotation)
        return known

    def is_foreign(self, function: FunctionInfo) -> bool:
        """Whether a function belongs to another platform, according to its name or its file's name."""
        known = self.foreign.get(function)
        if known is None:
            known = self.foreign[function] = self.platform.name_is_foreign(
                function.module.name
            ) or self.platform.function_is_foreign(function.qualname.rpartition(".")[2])
        return known

    def enqueue(self, context: Context) -> None:
        """Interpret the context again, later."""
        if not context.queued:
            context.queued = True
            self._work.append(context)

    def context(
        self,
        function: FunctionInfo,
        receiver: Value | None = None,
        closure: Context | None = None,
        variant: tuple[Hashable, ...] = (),
    ) -> Context:
        """The context of a function, created if it is new (but not interpreted yet: see `start`)."""
        key = (function, receiver, closure, variant)
        context = self.contexts.get(key)
        if context is None:
            context = self.contexts[key] = Context(function, receiver, closure, variant)
        return context

    def start(self, context: Context) -> None:
        """Interpret a new context, immediately if the call depth allows."""
        if context.started:
            return
        context.started = True
        if self._depth < MAX_DEPTH:
            self._run(context)
        else:
            self.enqueue(context)

    def start_module(self, module: Module) -> None:
        """Interpret a module's body, unless that was done before or it belongs to a kernel library."""
        if module not in self._modules:
            self._modules.add(module)
            if module.name.partition(".")[0] not in LIBRARIES:
                self.start(self.context(module.body))

    def _run(self, context: Context) -> None:
        context.running, context.queued = True, False
        self._depth += 1
        self.runs += 1
        try:
            self.interpret(self, context)
        finally:
            self._depth -= 1
            context.running = False
        if self.on_progress is not None and self.runs % 200 == 0:
            self.on_progress(len(self.contexts), len(self._work))

    def waits(self, key: Hashable, context: Context) -> bool:
        """Whether something that is not known yet may still become known.

        A cell that is empty at first is usually filled by other contexts. It counts as unknown only when all of them
        have been interpreted, so that a guess is never mixed with the precise answer. Keys that start with "declared"
        are released first, because an annotation says more than nothing.
        """
        if key in self._released:
            return False
        self._waiting.setdefault(key, {})[context] = None
        return True

    def solve(self) -> None:
        """Interpret until nothing changes; release what waits; repeat until nothing waits."""
        while True:
            while self._work:
                context = self._work.popleft()
                if context.queued:
                    self._run(context)
            if not self._waiting:
                return
            keys: list[Hashable] = [key for key in self._waiting if isinstance(key, tuple) and key[0] == "declared"]
            for key in keys or list(self._waiting):
                self._released.add(key)
                for context in self._waiting.pop(key):
                    self.enqueue(context)

    def add_edge(
        self, caller: Context, call: ast.AST, callee: Context, guards: tuple[Guard, ...], approximate: str = ""
    ) -> None:
        """Record that a call may enter a context. A precise edge replaces an approximate one."""
        key = (caller, call, callee)
        known = self.edges.get(key)
        if known is None:
            self.edges[key] = Edge(caller, call, callee, guards, approximate)
        elif known.approximate and not approximate:
            known.approximate = ""

    def add_kernel_call(
        self,
        caller: Context,
        call: ast.AST,
        target: FunctionInfo | str,
        name: str,
        guards: tuple[Guard, ...],
        approximate: str = "",
    ) -> None:
        """Record that a call enters a kernel."""
        self.kernel_calls.setdefault(
            (caller, call, target, name), KernelCall(caller, call, target, name, guards, approximate)
        )
