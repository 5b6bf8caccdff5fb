"""Choices: which classes and functions a configuration chooses, through the framework's own registries and factories.

A class is chosen by the keys under which a registry stores it or the function that makes it, or by the tests around the
`return` of a factory that returns classes. Otherwise, it is chosen by whatever holds at every place that constructs it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from tools.kernel_tracing.configuration.condition_text import CONFIGURATION
from tools.kernel_tracing.configuration.enumerations import is_plain_enum
from tools.kernel_tracing.configuration.guards import GuardReader
from tools.kernel_tracing.configuration.names import symbols
from tools.kernel_tracing.engine.solver import Context, Guard, Solver
from tools.kernel_tracing.engine.values import ClassValue, Container, Function, Instance, Method, ValueSet
from tools.kernel_tracing.rules import registries
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo

# A setting or other choice -> those of its values that select this class.
Labels: TypeAlias = dict[str, tuple[str, ...]]
# Configurations make methods, methods make runners, runners make cores, and cores make their helpers.
_ROUNDS = 4


class Choices:
    """What chooses each class and function of one solved analysis."""

    def __init__(self, solver: Solver, guards: GuardReader, roots: Collection[ClassInfo] = ()) -> None:
        """`roots`: classes that the runtime also makes in places that the analysis does not see."""
        self.solver = solver
        self.guards = guards
        self.roots = roots
        self.registered: dict[ClassInfo | FunctionInfo, Labels] = {}
        self.constructed: dict[ClassInfo, Labels] = {}
        self._values: dict[str, dict[str, None]] = defaultdict(dict)  # of each registry
        self._read_registries()
        self._read_factories()
        self._read_decorators()
        self._read_construction()

    def of(self, chosen: ClassInfo | FunctionInfo) -> Labels:
        """What chooses a class or function. A registry in which all keys lead to a class does not choose it."""
        labels = self.registered.get(chosen)
        if labels is None:
            labels = self.constructed.get(chosen, {}) if isinstance(chosen, ClassInfo) else {}
        return {
            dimension: values
            for dimension, values in labels.items()
            if len(self._values.get(dimension, ())) < 2 or set(self._values[dimension]) - set(values)
        }

    def _read_registries(self) -> None:
        """Label what is stored in named dicts, and what the stored functions make, with the keys."""
        names: dict[Container, str] = {}
        for key, values in self.solver.cells():
            if isinstance(key, tuple) and key[0] in ("global", "class"):
                for value in values:
                    if isinstance(value, Container) and value.label in ("Dict", "List"):
                        names.setdefault(value, str(key[2]))
        returned: dict[FunctionInfo, list[ClassInfo]] = defaultdict(list)
        for context in self.solver.contexts.values():
            for value in self.solver.peek(("return", context)):
                if isinstance(value, Instance):
                    returned[context.function].append(value.info)
        for key, values in self.solver.cells():
            if isinstance(key, tuple) and key[0] == "item" and key[1] in names and isinstance(key[2], str):
                dimension = registries.dimension(names[key[1]])
                if key[2] != "*" and dimension:
                    self._register(dimension, key[2], values, returned)

    def _register(
        self, dimension: str, key: str, values: ValueSet, returned: dict[FunctionInfo, list[ClassInfo]]
    ) -> None:
        stored: list[ClassInfo | FunctionInfo] = []
        for value in values:
            if isinstance(value, ClassValue):
                stored.append(value.info)
            elif isinstance(value, (Function, Method)):
                stored += [value.info, *returned.get(value.info, [])]
        if stored:
            self._values[dimension][key] = None
        for one in stored:
            labels = self.registered.setdefault(one, {})
            if not labels or dimension in labels:
                labels[dimension] = tuple(dict.fromkeys((*labels.get(dimension, ()), key)))

    def _read_factories(self) -> None:
        """Read the tests around `return SomeClass` in functions that return one of several classes.

        Methods of enumerations are read even if nothing calls them: a runtime asks its algorithm for its worker class.
        """
        factories: dict[FunctionInfo, Context | None] = {
            function: None
            for module in self.solver.index.parsed()
            for info in module.classes.values()
            if is_plain_enum(info)
            for function in info.methods.values()
        }
        for context in self.solver.contexts.values():
            returned = self.solver.peek(("return", context))
            if sum(isinstance(value, ClassValue) for value in returned) > 1:
                factories.setdefault(context.function, context)
        for function, known in factories.items():
            found: dict[ClassInfo, list[Labels]] = defaultdict(list)
            for value, guards in _returns(getattr(function.node, "body", [])):
                for symbol in symbols(self.solver.index, function, value):
                    if isinstance(symbol, ClassInfo):
                        found[symbol].append(self._labels(guards, function, known))
            for info, sites in found.items():
                if len(found) > 1 and info not in self.registered and (labels := _either(sites)):
                    self.registered[info] = labels

    def _labels(self, guards: Sequence[Guard], function: FunctionInfo, context: Context | None) -> Labels:
        """The configuration that tests require."""
        labels: Labels = {}
        for guard in guards:
            for part in self.guards.read(guard.test, guard.negated, function, context):
                if part.rank == CONFIGURATION and not part.negated and part.values != ("false",):
                    labels[part.dimension] = part.values
        return labels

    def _read_decorators(self) -> None:
        """`@register_fused_func("none", "triton")`: the parameters of the decorator name what its arguments choose."""
        for context in self.solver.contexts.values():
            function = context.function
            if function not in self.registered and (labels := self._registration(function)):
                self.registered[function] = labels

    def _registration(self, function: FunctionInfo) -> Labels:
        for decorator in getattr(function.node, "decorator_list", []):
            if not isinstance(decorator, ast.Call) or decorator.keywords:
                continue
            keys = [argument.value for argument in decorator.args if isinstance(argument, ast.Constant)]
            name = ast.unparse(decorator.func).rpartition(".")[2]
            if not keys or len(keys) != len(decorator.args) or not name.startswith("register"):
                continue
            for symbol in self.solver.index.resolve(function.module, decorator.func):
                if isinstance(symbol, FunctionInfo) and len(symbol.parameters) >= len(keys):
                    return {
                        registries.setting_of(parameter, self.guards.settings) or parameter.removesuffix("_name"): (
                            str(key),
                        )
                        for parameter, key in zip(symbol.parameters, keys, strict=False)
                    }
        return {}

    def _read_construction(self) -> None:
        """Find what holds at every place that constructs a class: Fp8Config makes Fp8LinearMethod."""
        sites: dict[ClassInfo, list[tuple[Context, Labels]]] = defaultdict(list)
        entered = set()
        for edge in self.solver.edges.values():
            made = edge.callee.receiver
            if not isinstance(made, Instance) or not edge.callee.function.qualname.endswith(".__init__"):
                continue
            if edge.caller in self.solver.constructed.get(made.info, {}):
                entered.add((made.info, edge.caller))
                sites[made.info].append((edge.caller, self._labels(edge.guards, edge.caller.function, edge.caller)))
        for info, makers in self.solver.constructed.items():
            sites[info] += [(maker, {}) for maker in makers if (info, maker) not in entered]
        for info, places in sites.items():
            # A registered maker may make a further choice: `if server_args.enable_x: return SparseBackend(...)`.
            chosen = [own for maker, own in places if maker.function in self.registered]
            if info in self.registered and chosen:
                self.registered[info] = {**_either(chosen), **self.registered[info]}
        for info in [info for info in sites if self._is_made_elsewhere(info)]:
            sites.pop(info)
        for _ in range(_ROUNDS):
            found: dict[ClassInfo, Labels] = {}
            for info, places in sites.items():
                if info in self.registered:
                    continue
                # Makers in the class's file come first, because its own configuration is there.
                ordered = sorted(places, key=lambda place: place[0].function.module is not info.module)
                labels = _either([{**self._maker(maker, info), **own} for maker, own in ordered])
                if labels:
                    found[info] = labels
            if found == self.constructed:
                break
            self.constructed = found

    def _is_made_elsewhere(self, info: ClassInfo) -> bool:
        """Whether the runtime makes a class in code that no root reaches, such as its scheduler.

        Only checked for classes that the runtime calls and that other such classes make: not all their makers are seen.
        """
        makers = self.solver.constructed.get(info, {})
        if info not in self.roots or not any(_owner(maker) in self.roots for maker in makers):
            return False
        seen = {info.module.name, *(maker.function.module.name for maker in makers)}
        sources, call = self.solver.index.sources, f" {info.name}("
        package = info.module.name.partition(".")[0] + "."
        return any(
            call in sources.text(name).replace(f"class{call}", "") if call in sources.text(name) else False
            for name in sources.modules
            if name.startswith(package) and name not in seen
        )

    def _maker(self, maker: Context, info: ClassInfo) -> Labels:
        receiver = maker.receiver
        if isinstance(receiver, (Instance, ClassValue)) and receiver.info is not info:
            return self.of(receiver.info)
        context: Context | None = maker
        while context is not None:
            if context.function in self.registered:
                return self.of(context.function)
            context = context.closure
        return {}


def _owner(context: Context) -> ClassInfo | None:
    return context.receiver.info if isinstance(context.receiver, Instance) else None


def _either(sites: Sequence[Labels]) -> Labels:
    """The labels that hold if any of these sets of labels does."""
    common = [dimension for dimension in sites[0] if all(dimension in labels for labels in sites)] if sites else []
    return {
        dimension: tuple(dict.fromkeys(value for labels in sites for value in labels[dimension]))
        for dimension in common
    }


def _returns(body: Sequence[ast.stmt], guards: tuple[Guard, ...] = ()) -> Iterator[tuple[ast.expr, tuple[Guard, ...]]]:
    """What a body returns by name, and the tests on the way there."""
    for node in body:
        if isinstance(node, ast.Return) and isinstance(node.value, (ast.Name, ast.Attribute)):
            yield node.value, guards
        elif isinstance(node, ast.If):
            yield from _returns(node.body, (*guards, Guard(node.test, False)))
            yield from _returns(node.orelse, (*guards, Guard(node.test, True)))
        elif isinstance(node, (ast.With, ast.Try)):
            yield from _returns(node.body, guards)
