"""Chains: paths of calls from a kernel call up to a root.

All paths would be too many to read: hops multiply (every linear layer, times every quantisation, times every
kernel's dispatch). A kernel's chains are chosen so that nothing that is on any path is missing: one shortest chain
through every pair of a kernel call and a call in the model's own files, then one through every hop not shown
yet. A limit per kernel keeps traces readable; how many acyclic paths are left out is counted, never silent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tools.kernel_tracing.kernels import Kernel
from tools.kernel_tracing.roots import is_draft
from tools.kernel_tracing.solver import Context, Edge, KernelCall, Solver

MAX_CHAINS = 16
_DRAFT_PENALTY = 1000


@dataclass(frozen=True)
class Chain:
    """A kernel call and the hops from its context up to a root."""

    kernel_call: KernelCall
    edges: tuple[Edge, ...]

    @property
    def root(self) -> Context:
        """The context that the chain ends in."""
        return self.edges[-1].caller if self.edges else self.kernel_call.caller


@dataclass(frozen=True)
class _Ways:
    """Where chains stop, and how far every context is from there."""

    stops: dict[Context, None]
    distance: dict[Context, int]


@dataclass(frozen=True)
class _Tree:
    """Hops above a context."""

    edges: list[Edge]
    parent: dict[Context, Edge]


class Chains:
    """Paths through one solved call graph."""

    def __init__(
        self,
        solver: Solver,
        ends: Iterable[Context],
        fallbacks: Iterable[Context],
        in_model: Callable[[Context], bool],
    ) -> None:
        self.ends = dict.fromkeys(ends)
        self.fallbacks = dict.fromkeys(fallbacks)
        self.in_model = in_model
        self._trees: dict[tuple[Context, bool], _Tree] = {}
        self._counts: dict[bool, dict[Context, int]] = {True: {}, False: {}}
        self._up: dict[Context, list[Edge]] = defaultdict(list)
        for edge in sorted(solver.edges.values(), key=_edge_order):
            self._up[edge.callee].append(edge)
        # Distance down from the nearest end, over contexts that an end reaches.
        self._to_end = self._distances(self.ends, solver)
        self._to_fallback = self._distances(self.fallbacks, solver)

    def _distances(self, roots: Iterable[Context], solver: Solver) -> dict[Context, int]:
        down: dict[Context, list[Context]] = defaultdict(list)
        for edge in solver.edges.values():
            down[edge.caller].append(edge.callee)
        # Draft models reuse the layers of the main one: a chain ends in them only if it must.
        distance: dict[Context, int] = {}
        for late in (False, True):
            chosen = [root for root in roots if is_draft(root) is late]
            distance |= {root: _DRAFT_PENALTY * late for root in chosen if root not in distance}
            pending = deque(chosen)
            while pending:
                context = pending.popleft()
                for callee in down.get(context, ()):
                    if callee not in distance:
                        distance[callee] = distance[context] + 1
                        pending.append(callee)
        return distance

    def of(self, kernel: Kernel) -> tuple[list[Chain], int]:
        """The kernel's chains, and how many acyclic paths they leave out."""
        calls = sorted(kernel.calls, key=lambda call: _place(call.caller, call.call))
        reaching = [call for call in calls if call.caller in self._to_end]
        ways = _Ways(self.ends, self._to_end) if reaching else _Ways(self.fallbacks, self._to_fallback)
        calls = reaching or [call for call in calls if call.caller in ways.distance]
        primary: dict[tuple[object, ...], Chain] = {}
        shown: set[tuple[object, ...]] = set()
        for call in calls:
            for chain in self._through_anchors(call, ways):
                if primary.setdefault(_frames(chain), chain) is chain:
                    shown |= {_hop(edge) for edge in chain.edges}
        secondary: dict[tuple[object, ...], Chain] = {}
        for call in calls:
            if len(primary) + len(secondary) >= MAX_CHAINS:
                break
            for chain in self._through_hops(call, ways, shown):
                if _frames(chain) not in primary:
                    secondary.setdefault(_frames(chain), chain)
        kept = _spread([*primary.values(), *secondary.values()], MAX_CHAINS)
        total = sum(self._count(call.caller, ways) for call in calls)
        return kept, max(0, total - len(kept))

    def _through_anchors(self, call: KernelCall, ways: _Ways) -> Iterator[Chain]:
        """A shortest chain through every call in the model's files that leads to the kernel call, nearest first."""
        tree = self._tree(call.caller, ways)
        if call.caller in ways.stops:
            yield Chain(call, ())
        anchors: set[tuple[object, ...]] = set()
        first = _place(call.caller, call.call) if self.in_model(call.caller) else None
        anchor_of: dict[Context, tuple[object, ...] | None] = {call.caller: first}
        for edge in tree.edges:
            below = anchor_of[edge.callee]
            anchor = below or (_place(edge.caller, edge.call) if self.in_model(edge.caller) else None)
            if tree.parent.get(edge.caller) is edge:
                anchor_of[edge.caller] = anchor
            if len(anchors) <= MAX_CHAINS and (anchor or ()) not in anchors:
                chain = self._chain(call, edge, tree, ways)
                # Without a call in the model the chain must end here, or it says nothing yet.
                if chain is not None and (anchor is not None or edge.caller in ways.stops):
                    anchors.add(anchor or ())
                    yield chain

    def _through_hops(self, call: KernelCall, ways: _Ways, shown: set[tuple[object, ...]]) -> Iterator[Chain]:
        """A shortest chain through every hop that no chain shows yet."""
        tree = self._tree(call.caller, ways)
        count = 0
        for edge in tree.edges:
            if _hop(edge) not in shown:
                chain = self._chain(call, edge, tree, ways)
                if chain is not None:
                    shown |= {_hop(other) for other in chain.edges}
                    yield chain
                    count += 1
                    if count >= MAX_CHAINS:
                        return

    def _chain(self, call: KernelCall, edge: Edge, tree: _Tree, ways: _Ways) -> Chain | None:
        """The kernel call, a shortest path to a hop, and one from there to a root; None if it would meet itself."""
        below = [edge]
        while below[-1].callee is not call.caller:
            below.append(tree.parent[below[-1].callee])
        chain = Chain(call, (*reversed(below), *self._above(edge.caller, ways)))
        return None if _repeats(chain) else chain

    def _tree(self, start: Context, ways: _Ways) -> _Tree:
        """All hops above a context, nearest first, and the first hop by which each context was met."""
        key = (start, ways.stops is self.ends)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = _Tree([], {})
            pending = deque([start])
            while pending:
                context = pending.popleft()
                if context in ways.stops:
                    continue
                for edge in self._up.get(context, ()):
                    if edge.caller in ways.distance and edge.caller is not start:
                        tree.edges.append(edge)
                        if edge.caller not in tree.parent:
                            tree.parent[edge.caller] = edge
                            pending.append(edge.caller)
        return tree

    def _above(self, context: Context, ways: _Ways) -> Iterator[Edge]:
        """A shortest path from a context up to a root."""
        while context not in ways.stops:
            edge = min(
                (edge for edge in self._up[context] if edge.caller in ways.distance),
                key=lambda edge: (ways.distance[edge.caller], bool(edge.approximate)),
            )
            yield edge
            context = edge.caller

    def _count(self, start: Context, ways: _Ways) -> int:
        """Number of paths to a root; hops that close a cycle do not count."""
        counts = self._counts[ways.stops is self.ends]
        if start in counts:
            return counts[start]
        active = {start}
        counts[start] = 1 if start in ways.stops else 0
        stack: list[tuple[Context, Iterator[Edge]]] = [(start, iter(self._up.get(start, ())))]
        while stack:
            context, edges = stack[-1]
            edge = next(edges, None) if context not in ways.stops else None
            if edge is None:
                stack.pop()
                active.discard(context)
                if stack:
                    counts[stack[-1][0]] += counts[context]
            elif edge.caller in active or edge.caller not in ways.distance:
                continue
            elif edge.caller in counts:
                counts[context] += counts[edge.caller]
            else:
                active.add(edge.caller)
                counts[edge.caller] = 1 if edge.caller in ways.stops else 0
                stack.append((edge.caller, iter(self._up.get(edge.caller, ()))))
        return counts[start]

    def holds(self, kernel: Kernel, places: Sequence[tuple[str, int, str]]) -> bool:
        """Whether the call graph has a chain with these frames (file, line, function), kernel call first."""
        at = {call.caller for call in kernel.calls if _matches(places[0], call.caller, call.call)}
        for place in places[1:]:
            at = {
                edge.caller for context in at for edge in self._up[context] if _matches(place, edge.caller, edge.call)
            }
        return bool(at)


def _place(context: Context, call: object) -> tuple[str, int, int, str]:
    return (
        context.function.module.file,
        getattr(call, "lineno", 0),
        getattr(call, "col_offset", 0),
        context.function.qualname,
    )


def _matches(place: tuple[str, int, str], context: Context, call: object) -> bool:
    file, line, function = place
    lines = range(getattr(call, "lineno", 0), getattr(call, "end_lineno", 0) + 1)
    return (file, function) == (context.function.module.file, context.function.qualname) and line in lines


def _edge_order(edge: Edge) -> tuple[object, ...]:
    return (bool(edge.approximate), *_place(edge.caller, edge.call))


def _hop(edge: Edge) -> tuple[object, ...]:
    return (*_place(edge.caller, edge.call), edge.callee.function.module.file, edge.callee.function.qualname)


def _frames(chain: Chain) -> tuple[object, ...]:
    places = [_place(chain.kernel_call.caller, chain.kernel_call.call)]
    return (*places, *(_place(edge.caller, edge.call) for edge in chain.edges))


def _repeats(chain: Chain) -> bool:
    contexts = [chain.kernel_call.caller, *(edge.caller for edge in chain.edges)]
    return len(set(contexts)) != len(contexts)


def _spread(chains: list[Chain], limit: int) -> list[Chain]:
    """At most `limit` chains, taken in turn from each kernel call, so that every call site keeps some."""
    if len(chains) <= limit:
        return chains
    groups: dict[tuple[object, ...], list[Chain]] = defaultdict(list)
    for chain in chains:
        groups[_place(chain.kernel_call.caller, chain.kernel_call.call)].append(chain)
    kept: list[Chain] = []
    turn = 0
    while len(kept) < max(limit, len(groups)):
        kept += [group[turn] for group in groups.values() if turn < len(group)]
        turn += 1
    return kept
