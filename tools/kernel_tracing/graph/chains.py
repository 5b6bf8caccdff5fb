"""Chains: paths of calls from a kernel call up to a root.

There are too many paths to read, because hops multiply: every linear layer, times every quantisation, times every
kernel's dispatch. For each pair of a call of the kernel and a call in the model's own files, one shortest chain is
kept, so that nothing the model does with the kernel is missing; then some chains through hops that are not shown yet.
The number of acyclic paths omitted is always reported.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tools.kernel_tracing.engine.solver import Context, Edge, KernelCall, Solver
from tools.kernel_tracing.graph.kernels import Kernel
from tools.kernel_tracing.graph.roots import is_draft

# The most chains of a kernel in addition to those through each of the model's calls.
MAX_MORE = 8
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
    """Where chains stop, and the distance of every context from there."""

    stops: dict[Context, None]
    distance: dict[Context, int]


@dataclass(frozen=True)
class _Tree:
    """Hops above a context."""

    edges: list[Edge]
    parent: dict[Context, Edge]
    depth: dict[Context, int]


class Chains:
    """Paths through one solved call graph."""

    def __init__(
        self,
        solver: Solver,
        ends: Iterable[Context],
        fallbacks: Iterable[Context],
        in_model: Callable[[Context], bool],
        consistent: Callable[[Chain], bool] = lambda chain: True,
    ) -> None:
        """`consistent`: whether some configuration takes a chain; others are kept only if there is none."""
        self.ends = dict.fromkeys(ends)
        self.fallbacks = dict.fromkeys(fallbacks)
        self.in_model = in_model
        self.consistent = consistent
        self._found: dict[Kernel, tuple[list[Chain], int]] = {}
        self._trees: dict[tuple[Context, bool], _Tree] = {}
        self._counts: dict[bool, dict[Context, int]] = {True: {}, False: {}}
        self._up: dict[Context, list[Edge]] = defaultdict(list)
        self.edges = edges = _credible(solver.edges.values())
        for edge in sorted(edges, key=_edge_order):
            self._up[edge.callee].append(edge)
        # The distance down from the nearest end, for contexts that an end reaches.
        self._to_end = self._distances(self.ends, edges)
        self._to_fallback = self._distances(self.fallbacks, edges)

    def _distances(self, roots: Iterable[Context], edges: Iterable[Edge]) -> dict[Context, int]:
        down: dict[Context, list[Context]] = defaultdict(list)
        for edge in edges:
            down[edge.caller].append(edge.callee)
        # Draft models reuse the layers of the main model: a chain ends in a draft model only if it must.
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
        """The kernel's chains, and the number of acyclic paths that are omitted."""
        if kernel not in self._found:
            self._found[kernel] = self._find(kernel)
        return self._found[kernel]

    def _find(self, kernel: Kernel) -> tuple[list[Chain], int]:
        calls = sorted(kernel.calls, key=lambda call: place(call.caller, call.call))
        reaching = [call for call in calls if call.caller in self._to_end]
        ways = _Ways(self.ends, self._to_end) if reaching else _Ways(self.fallbacks, self._to_fallback)
        calls = reaching or [call for call in calls if call.caller in ways.distance]
        kept: dict[tuple[object, ...], Chain] = {}
        anchors: set[tuple[object, ...]] = set()
        shown: set[tuple[object, ...]] = set()
        spare: dict[tuple[object, ...], Chain] = {}
        primary = (chain for call in calls for chain in self._through_anchors(call, ways, anchors, spare))
        more = (chain for call in calls for chain in self._through_hops(call, ways, shown))
        for chain in itertools.chain(primary, itertools.islice(more, MAX_MORE)):
            kept.setdefault(_frames(chain), chain)
            shown |= {_hop(edge) for edge in chain.edges}
        passed = {key for chain in kept.values() for key in self._passed(chain)}
        for key, chain in spare.items():
            if key not in passed:
                kept.setdefault(_frames(chain), chain)
        total = sum(self._count(call.caller, ways) for call in calls)
        return list(kept.values()), max(0, total - len(kept))

    def _passed(self, chain: Chain) -> Iterator[tuple[object, ...]]:
        """Pairs of a chain's kernel call and each of its calls in the model's files, or None if there are none."""
        site = place(chain.kernel_call.caller, chain.kernel_call.call)
        calls = [
            (chain.kernel_call.caller, site),
            *((edge.caller, place(edge.caller, edge.call)) for edge in chain.edges),
        ]
        anchors = [where for caller, where in calls if self.in_model(caller)]
        yield from ((site, anchor) for anchor in anchors)
        if not anchors:
            yield (site, None)

    def _through_anchors(
        self, call: KernelCall, ways: _Ways, seen: set[tuple[object, ...]], spare: dict[tuple[object, ...], Chain]
    ) -> Iterator[Chain]:
        """A shortest chain through every call in the model's files that leads to the kernel call, nearest first.

        Chains that no configuration takes go to `spare`, by kernel call and call in the model.
        """
        site = place(call.caller, call.call)
        if call.caller in ways.stops and (site, None) not in seen:
            seen.add((site, None))
            yield Chain(call, ())
        tree = self._tree(call.caller, ways)
        anchors: dict[Context, tuple[object, ...] | None] = {call.caller: site if self.in_model(call.caller) else None}
        found = []
        for edge in tree.edges:
            anchor = anchors[edge.callee]
            if anchor is None and self.in_model(edge.caller):
                anchor = place(edge.caller, edge.call)
            if tree.parent.get(edge.caller) is edge:
                anchors[edge.caller] = anchor
            # A chain without a call in the model must end here; otherwise it is not yet of use.
            if (site, anchor) not in seen and (anchor is not None or edge.caller in ways.stops):
                found.append((tree.depth[edge.callee] + ways.distance[edge.caller], edge, anchor))
        for _, edge, anchor in sorted(found, key=lambda item: item[0]):
            if (site, anchor) not in seen:
                chain = self._chain(call, edge, tree, ways)
                if chain is not None and self.consistent(chain):
                    seen.add((site, anchor))
                    yield chain
                elif chain is not None:
                    spare.setdefault((site, anchor), chain)

    def _through_hops(self, call: KernelCall, ways: _Ways, seen: set[tuple[object, ...]]) -> Iterator[Chain]:
        """A shortest chain through every hop that no chain of the kernel shows yet, nearest first."""
        tree = self._tree(call.caller, ways)
        for edge in tree.edges:
            if _hop(edge) not in seen:
                chain = self._chain(call, edge, tree, ways)
                if chain is not None and self.consistent(chain):
                    yield chain

    def _chain(self, call: KernelCall, edge: Edge, tree: _Tree, ways: _Ways) -> Chain | None:
        """The kernel call, a shortest path to a hop, and one from there to a root; None if that has a cycle."""
        below = [edge]
        while below[-1].callee is not call.caller:
            below.append(tree.parent[below[-1].callee])
        chain = Chain(call, (*reversed(below), *self._above(edge.caller, ways)))
        return None if _repeats(chain) else chain

    def _tree(self, start: Context, ways: _Ways) -> _Tree:
        """All hops above a context, nearest first, and the first hop through which each context was reached."""
        key = (start, ways.stops is self.ends)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = _Tree([], {}, {start: 0})
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
                            tree.depth[edge.caller] = tree.depth[context] + 1
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
        """The number of paths to a root; hops that close a cycle do not count."""
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


def _credible(edges: Collection[Edge]) -> list[Edge]:
    """Edges, except those to functions that are given to a known call: what it does with them is already traced."""
    known = {(edge.caller, edge.call) for edge in edges if not edge.given_to}
    return [edge for edge in edges if not edge.given_to or (edge.caller, edge.call) not in known]


def place(context: Context, call: object) -> tuple[str, int, int, str]:
    """File, line, column and enclosing function of a call."""
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
    return (bool(edge.approximate), *place(edge.caller, edge.call))


def _hop(edge: Edge) -> tuple[object, ...]:
    return (*place(edge.caller, edge.call), edge.callee.function.module.file, edge.callee.function.qualname)


def _frames(chain: Chain) -> tuple[object, ...]:
    places = [place(chain.kernel_call.caller, chain.kernel_call.call)]
    return (*places, *(place(edge.caller, edge.call) for edge in chain.edges))


def _repeats(chain: Chain) -> bool:
    contexts = [chain.kernel_call.caller, *(edge.caller for edge in chain.edges)]
    return len(set(contexts)) != len(contexts)
