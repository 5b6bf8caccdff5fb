"""Conditions: what must hold for a hop to be taken, in terms that users of the framework know.

There are three kinds: what chooses the class or function that a call enters (`choices`:
"attention_backend=trtllm_mla", "speculative=EAGLE"), the class of a field that may hold objects of several ("MoE
layer", "quant_method=X"), and the tests around and before the call (`guards`).
"""

from __future__ import annotations

import ast
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from tools.kernel_tracing.configuration.choices import Choices, Labels
from tools.kernel_tracing.configuration.condition_text import (
    CONFIGURATION,
    KIND,
    SPECULATIVE,
    Part,
    join,
    named,
    setting,
    summarise,
)
from tools.kernel_tracing.configuration.guards import GuardReader
from tools.kernel_tracing.engine.solver import Context, Edge, Guard, Solver
from tools.kernel_tracing.engine.values import ClassValue, Instance
from tools.kernel_tracing.graph.chains import Chain
from tools.kernel_tracing.graph.roots import is_draft
from tools.kernel_tracing.rules import registries
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo
from tools.kernel_tracing.source.syntax import last_name

__all__ = ["Conditions", "summarise"]

# If more keys than this may choose a class, the condition names the class instead.
MAX_KEYS = 5


class Conditions:
    """Conditions of the hops of one solved analysis."""

    def __init__(self, solver: Solver, roots: Iterable[Context] = ()) -> None:
        """`roots`: contexts that the runtime enters."""
        self.solver = solver
        self.guards = GuardReader(solver)
        self.choices = Choices(solver, self.guards, {info for root in roots if (info := _receiver(root)) is not None})
        self._live = self._reaching()
        self._parts: dict[Edge, list[Part]] = {}

    def _reaching(self) -> set[Context]:
        """Contexts from which some kernel is called."""
        callers: dict[Context, list[Context]] = defaultdict(list)
        for caller, _, callee in self.solver.edges:
            callers[callee].append(caller)
        live = {call.caller for call in self.solver.kernel_calls.values()}
        pending = deque(live)
        while pending:
            for caller in callers.get(pending.popleft(), ()):
                if caller not in live:
                    live.add(caller)
                    pending.append(caller)
        return live

    def of_chain(self, chain: Chain) -> list[str]:
        """The condition of each frame, the kernel call's first.

        Each choice is stated once, at the hop nearest to the root that makes it. What chooses the root's class is
        stated in the last frame.
        """
        call = chain.kernel_call
        hops = [self.guards.parts(call.guards, call.caller), *(self._of_edge(edge) for edge in chain.edges)]
        hops[-1] = [*self._labels(chain.root), *hops[-1]]
        if is_draft(chain.root):
            hops[-1].insert(0, SPECULATIVE)
        said: dict[str, set[str]] = {}
        texts = []
        for parts in reversed(hops):
            kept = []
            for part in parts:
                if part.dimension and not part.negated:
                    known = said.get(part.dimension)
                    if known is not None and (known <= set(part.values) or part == SPECULATIVE):
                        continue
                    said[part.dimension] = set(part.values)
                kept.append(part)
            texts.append(join(kept))
        return texts[::-1]

    def below(self, chain: Chain, position: int) -> list[Part]:
        """What must hold between a frame and the kernel once that frame's call is made: not the frame's own tests, but
        the choice of what the call enters. The frame nearest to the root comes first.
        """
        call = chain.kernel_call
        if position == 0:
            return self.guards.parts(call.guards, call.caller)
        hops = [
            self.guards.parts(call.guards, call.caller),
            *(self._of_edge(edge) for edge in chain.edges[: position - 1]),
        ]
        return [part for parts in (self._choice(chain.edges[position - 1]), *reversed(hops)) for part in parts]

    def consistent(self, chain: Chain) -> bool:
        """Whether some configuration takes the chain.

        No two of its hops may require different values of one setting, or different members of an enumeration for the
        same expression (`forward_batch.forward_mode`).
        """
        allowed: dict[tuple[str, str], set[str]] = {}
        refused: dict[tuple[str, str], set[str]] = defaultdict(set)
        parts = [*self._labels(chain.root), *self.guards.parts(chain.kernel_call.guards, chain.kernel_call.caller)]
        for hop in [parts, *map(self._of_edge, chain.edges)]:
            for part in hop:
                is_setting = part.rank == CONFIGURATION
                if part == SPECULATIVE or not (is_setting or (part.rank == KIND and "." in part.subject)):
                    continue
                key = (part.dimension, "" if is_setting else part.subject)
                values = set(part.values)
                if part.negated:
                    refused[key] |= values
                else:
                    allowed[key] = allowed.get(key, values) & values
        return all(values - refused[key] for key, values in allowed.items())

    def of_edge(self, edge: Edge) -> str:
        """The condition of a single hop."""
        return join(self._of_edge(edge))

    def of_guards(self, context: Context, guards: Sequence[Guard]) -> str:
        """The condition that follows from the tests around and before a call in this context."""
        return join(self.guards.parts(guards, context))

    def _of_edge(self, edge: Edge) -> list[Part]:
        parts = self._parts.get(edge)
        if parts is None:
            parts = self._parts[edge] = [*self._choice(edge), *self.guards.parts(edge.guards, edge.caller)]
        return parts

    def _labels(self, context: Context) -> list[Part]:
        info = _receiver(context)
        return _settings(self.choices.of(info)) if info is not None else []

    def _choice(self, edge: Edge) -> list[Part]:
        """What chooses this callee among those that the call may enter."""
        callee, info = edge.callee, _receiver(edge.callee)
        others = [other for other in self.guards.callees[edge.caller, edge.call] if self._counts(other)]
        if len({_receiver(other) for other in others}) > 1 and info is not None:
            found = _settings(_telling(self.choices.of(info), others, self.choices))
            if found or callee not in others:
                return found
            kind = registries.kind(info.name)
            if kind:
                return [named("layer", kind, kind)]
            return [_class_choice(edge.call, callee.function, info)]
        if len({other.function for other in others}) > 1 and callee.function in self.choices.registered:
            return _settings(self.choices.of(callee.function))
        if info is not None and info is not _receiver(edge.caller) and info in self.choices.constructed:
            return _settings(self.choices.of(info))
        return []

    def _counts(self, context: Context) -> bool:
        """Whether an alternative matters because it reaches a kernel or because something chooses it."""
        info = _receiver(context)
        return context in self._live or (info is not None and bool(self.choices.of(info)))


def _receiver(context: Context) -> ClassInfo | None:
    return context.receiver.info if isinstance(context.receiver, (Instance, ClassValue)) else None


def _settings(labels: Labels) -> list[Part]:
    return [setting(dimension, values) for dimension, values in labels.items() if len(values) <= MAX_KEYS]


def _telling(labels: Labels, others: Sequence[Context], choices: Choices) -> Labels:
    """Labels that not all alternatives share."""
    found = [choices.of(info) for info in map(_receiver, others) if info is not None]
    return {
        dimension: values
        for dimension, values in labels.items()
        if any(other.get(dimension) != values for other in found)
    }


def _class_choice(call: ast.AST, callee: FunctionInfo, info: ClassInfo) -> Part:
    """What the field of the receiver must hold: `quant_method=X` for `self.quant_method.apply(x)`.

    For a function stored in a field, the function is named: `op=Attention.prepare` for `op.run(x)`.
    """
    target = call.func if isinstance(call, ast.Call) else call
    name = callee.qualname.rpartition(".")[2]
    if isinstance(target, ast.Attribute):
        holder = _name(target.value)
        if holder in ("", "self"):
            return setting(target.attr, [info.name])
        if target.attr != name and name not in ("forward", "__call__"):
            return setting(holder, [callee.qualname])
        return setting(holder if target.attr == name else target.attr, [info.name])
    return setting(_name(target) or "call", [info.name])


def _name(node: ast.AST) -> str:
    """The last name of an expression: `pool` for `batch.pool`, for `batch.pool[0]` and for `get_pool()`."""
    if isinstance(node, ast.Call):
        return _name(node.func).removeprefix("get_")
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return last_name(node)
