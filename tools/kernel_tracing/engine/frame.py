"""One interpretation of a context: its local names while the body is walked."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from tools.kernel_tracing.engine.solver import Context, Guard, Solver
from tools.kernel_tracing.engine.values import (
    EMPTY,
    Alias,
    ClassValue,
    Constant,
    Container,
    External,
    Function,
    ModuleValue,
    Unknown,
    Value,
    ValueSet,
)
from tools.kernel_tracing.rules import boundaries
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo, Module
from tools.kernel_tracing.source.libraries import LIBRARIES

Environment = dict[str, ValueSet]


@dataclass
class Arguments:
    """Arguments of a call: `star` has the elements of `*args` of unknown length, `star_keywords` of `**kwargs`."""

    positional: list[ValueSet] = field(default_factory=list)
    keywords: dict[str, ValueSet] = field(default_factory=dict)
    star: ValueSet = EMPTY
    star_keywords: ValueSet = EMPTY

    def get(self, position: int, keyword: str = "") -> ValueSet:
        """The argument at a position or with a name; empty if it is not given."""
        if position < len(self.positional):
            return self.positional[position]
        return self.keywords.get(keyword, EMPTY)

    def every(self) -> ValueSet:
        """All values passed in any way."""
        return frozenset().union(*self.positional, *self.keywords.values(), self.star, self.star_keywords)

    def rest(self) -> tuple[dict[str, ValueSet], ValueSet, ValueSet]:
        """All but the positional arguments."""
        return self.keywords, self.star, self.star_keywords

    def after(self, *first: ValueSet) -> Arguments:
        """The same arguments, preceded by more positional ones."""
        return Arguments([*first, *self.positional], self.keywords, self.star, self.star_keywords)


class Frame:
    """Local state while one context is interpreted."""

    def __init__(self, solver: Solver, context: Context) -> None:
        self.solver = solver
        self.universe = solver.universe
        self.context = context
        self.function: FunctionInfo = context.function
        self.module: Module = context.function.module
        self.environment: Environment = {}
        self.guards: tuple[Guard, ...] = ()
        self.loop_exits: list[Environment] = []
        self.global_names: set[str] = set()
        self.is_module = isinstance(self.function.node, ast.Module)

    def read(self, key: Hashable) -> ValueSet:
        """Read a cell; when it grows, this context is interpreted again."""
        return self.solver.read(key, self.context)

    def write(self, key: Hashable, values: ValueSet) -> None:
        """Add to a cell."""
        self.solver.write(key, values)

    def constant(self, literal: object) -> ValueSet:
        """The set of one literal."""
        return self.universe.one(Constant, literal)

    def assign(self, name: str, values: ValueSet) -> None:
        """Bind a local name, or in a module a global one."""
        if self.is_module or name in self.global_names:
            self.write(("global", self.module.name, name), values)
            if not self.is_module:
                return
        self.environment[name] = values
        if not self.is_module:
            # Nested functions see every value that the name ever has.
            self.write(("local", self.context, name), values)

    def lookup(self, name: str) -> ValueSet:
        """Values of a name, according to Python's scoping rules."""
        values = self.environment.get(name)
        if values is not None:
            return self.resolve(values)
        closure = self.context.closure
        while closure is not None:
            values = self.read(("local", closure, name))
            if values:
                return self.resolve(values)
            closure = closure.closure
        return self.read_global(self.module.name, name)

    def read_global(self, module_name: str, name: str, depth: int = 0) -> ValueSet:
        """Values of a name in a module, whose body is interpreted first if necessary."""
        module = self.solver.index.module(module_name)
        if module is None:
            return EMPTY
        if module_name.partition(".")[0] in LIBRARIES:
            return self._library_symbol(module, name)
        if module is not self.module or not self.is_module:
            self.solver.start_module(module)
        values = self.read(("global", module_name, name))
        if name in module.bindings:
            if name in module.rebound:
                values |= self.universe.data
            return self.resolve(values, depth)
        for star in module.stars:
            found = self.read_global(star, name, depth + 1) if depth < 20 else EMPTY
            if found:
                return found
        if values:  # assigned from outside, or by `global`
            return self.resolve(values, depth)
        if self.solver.index.module(f"{module_name}.{name}") is not None:
            return self.universe.one(ModuleValue, f"{module_name}.{name}")
        return EMPTY

    def _library_symbol(self, module: Module, name: str) -> ValueSet:
        """A name of a kernel library, found in its definitions; the library's code is not interpreted."""
        found: set[Value] = set()
        for symbol in self.solver.index.lookup(module, name):
            if isinstance(symbol, FunctionInfo):
                if not boundaries.alive(self.solver.platform, symbol):
                    continue
                found.add(self.universe.make(Function, symbol, None))
            elif isinstance(symbol, ClassInfo):
                found.add(self.universe.make(ClassValue, symbol))
            elif isinstance(symbol, Module):
                found.add(self.universe.make(ModuleValue, symbol.name))
            else:
                found.add(self.universe.make(External, symbol))
        if not found and self.solver.index.module(f"{module.name}.{name}") is not None:
            return self.universe.one(ModuleValue, f"{module.name}.{name}")
        return frozenset(found) or self.universe.any

    def resolve(self, values: ValueSet, depth: int = 0) -> ValueSet:
        """Replace aliases made by imports with what they refer to."""
        for value in values:
            if type(value) is Alias:
                break
        else:
            return values
        resolved: set[Value] = set()
        for value in values:
            if isinstance(value, Alias):
                resolved |= self.import_from(value.module, value.name, depth + 1)
            else:
                resolved.add(value)
        return frozenset(resolved)

    def import_from(self, module_name: str, name: str, depth: int = 0) -> ValueSet:
        """What `from module_name import name` binds."""
        if depth > 20:
            return EMPTY
        return self.read_global(module_name, name, depth)

    # Containers have one cell for each constant key, and one ("*") for the rest.

    def container(self, site: Hashable, label: str = "") -> Container:
        """The container made at a place, by this context."""
        return self.universe.make(Container, (site, self.context), label)

    def put(self, container: Container, key: object, values: ValueSet) -> None:
        """Store under a literal key, or under any key ("*")."""
        if values:
            self.write(("item", container, key), values)
            if key != "*":
                self.write(("keys", container), self.constant(key))

    def items(self, container: Container, key: object = "*") -> ValueSet:
        """What may be stored under a literal key; for "*", everything."""
        keys = self.read(("keys", container))
        found = self.read(("item", container, "*"))
        for known in keys:
            if isinstance(known, Constant) and (key == "*" or known.literal == key):
                found |= self.read(("item", container, known.literal))
        return found

    def elements(self, values: ValueSet) -> ValueSet:
        """What iterating over the values yields."""
        found: ValueSet = EMPTY
        for value in values:
            if isinstance(value, Container):
                found |= self.items(value)
            elif isinstance(value, Unknown):
                found |= frozenset((value,))
        return self.resolve(found)


def union(parts: Iterable[ValueSet]) -> ValueSet:
    """Union of any number of value sets."""
    return frozenset().union(*parts)
