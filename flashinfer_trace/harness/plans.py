"""Shapes of plans: what a family declares once, and the strategy, the plan for given axes and the corners derive from.

A plan is a small JSON-like dictionary. Its entries are counts of rows and the like, and choices, such as the kind of
values. `RowPlans` states both. A family whose plans have lengths of requests, or rows that differ, has `OwnPlans`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.inputs import Draws, sizes
from flashinfer_trace.verdict.tensors import torch_dtype

#: Everything about a case but its elements, as small JSON values: variable axes, sequence lengths, kinds of values.
#: (definition, plan, seed) repeats a case exactly, on any device.
Plan = dict[str, Any]
Options = TypeVar("Options")

#: Choices of an entry that is usually false.
FLAG = (False, True)
#: Rows of one more corner on a CPU if they are cheap: a kernel may be right up to a block or a grid of 1024.
BEYOND_1024 = 1100
#: Axes that count tokens or rows; of a Definition the first one that it has.
ROW_AXES = ("num_tokens", "m", "M", "seq_len", "total_rows", "num_rows", "batch_size")
#: Axis of a cache -> how many positions or slots it has: more than the 4096 that are drawn, and than 16 bits count.
POSITIONS = dict.fromkeys(("max_seq_len", "num_slots"), 70_000)
#: Fewer rows than this show no more than what is drawn.
FEWEST = 100
#: Values whose rows differ widely in magnitude: no scale, floor or clamp for all of them fits.
SPREAD = "spread"
#: The memory of inputs up to which a case takes about 0.2 seconds.
BYTES = 10 * 2**20
#: The size of other variable axes where the memory is estimated.
OTHERS = 8
#: A kernel that takes so many rows takes any number.
NO_LIMIT = 1 << 20


class FamilyError(LookupError):
    """A Definition that no family record covers, or that its record does not fit. The message says where and how."""


@dataclass(frozen=True)
class PlanRequest:
    """The constraints on the plans that may be drawn.

    Attributes:
        definition: at the sizes to be run (a family's small twin, or the real one).
        limits: inclusive limits of variable axes that a kernel imposes, e.g. ``{"m": (1, 16)}``.
        large: sizes for a GPU; otherwise sizes that a CPU runs in milliseconds.
        plan_options: what a kernel takes beyond limits of axes, as a frozen dataclass that its family defines.
    """

    definition: Definition
    limits: Mapping[str, tuple[int, int]]
    large: bool
    plan_options: object | None = None

    def options_of(self, kind: type[Options]) -> Options:
        """The kernel's options of that class, or its defaults if the kernel has none."""
        return self.plan_options if isinstance(self.plan_options, kind) else kind()

    def range(self, axis: str, low: int, small_high: int, large_high: int) -> tuple[int, int]:
        """Limits of an axis: the family's for this scale, cut to what the kernel takes.

        Raises:
            FamilyError: the axis is not a variable one of the Definition.
        """
        if axis not in self.definition.var_axes:
            raise FamilyError(
                f"{self.definition.name}: plans draw the axis {axis}; variable axes are {self.definition.var_axes}"
            )
        kernel_low, kernel_high = self.limits.get(axis, (low, large_high))
        return max(low, kernel_low), min(large_high if self.large else small_high, kernel_high)


@dataclass(frozen=True, kw_only=True)
class PlanShape(ABC):
    """The plans of a family.

    Attributes:
        many_rows: rows of one more corner, on a CPU (see the function of that name); 0 for none.
    """

    many_rows: int = 300

    @abstractmethod
    def plans(self, request: PlanRequest) -> st.SearchStrategy[Plan]:
        """Draws axes and structure, never elements. Includes awkward cases: no rows, empty sequences, ties."""

    @abstractmethod
    def plan_for_axes(self, definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
        """A plan with these values of variable axes; the rest is as a kernel is served."""

    @abstractmethod
    def corners(self, request: PlanRequest) -> Sequence[Plan]:
        """Plans that every verification runs before those that it draws: what random draws seldom meet."""

    @abstractmethod
    def with_corners(self, corners: Callable[[PlanRequest], Sequence[Plan]]) -> PlanShape:
        """The same with these corners only."""

    def entries(self, definition: Definition) -> frozenset[str]:
        """The entries that every plan has."""
        return frozenset(self.plan_for_axes(definition, {}, Draws(0, "cpu")))


#: (definition, axes that are given or already chosen) -> the usual value of an entry.
Usual = Callable[[Definition, Mapping[str, int]], Any]


@dataclass(frozen=True)
class Count:
    """How often a variable axis counts.

    Attributes:
        small, large: the most on a CPU, and on a GPU (or what gives it for a Definition).
        least: the fewest.
        usual: where the axis is not given.
        corner: in corners that do not say it.
        drawn: what draws it, if not `sizes` within these limits.
    """

    small: int
    large: int | Callable[[Definition], int]
    _: KW_ONLY
    least: int = 0
    usual: int | Usual = 8
    corner: int = 3
    drawn: Callable[[PlanRequest], st.SearchStrategy[int]] | None = None

    def range(self, axis: str, request: PlanRequest) -> tuple[int, int]:
        """The inclusive limits of the axis."""
        large = self.large(request.definition) if callable(self.large) else self.large
        return request.range(axis, self.least, self.small, large)


@dataclass(frozen=True)
class Drawn:
    """An entry that is not one of a few choices.

    Attributes:
        strategy: what draws it.
        usual: its value in a plan for given axes.
    """

    strategy: Callable[[PlanRequest], st.SearchStrategy[Any]]
    usual: Any


#: The values of an entry, the usual one first; or what gives them.
Choices = Sequence[Any] | Callable[[PlanRequest], Sequence[Any]] | Drawn
#: The entries of corners that differ from the usual plan; or a function that gives them.
Corners = Sequence[Mapping[str, Any]] | Callable[[PlanRequest], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class RowPlans(PlanShape):
    """Plans that consist of counts of variable axes, and of choices.

    Attributes:
        counts: by axis. One that is constant in a Definition has no entry. An entry ``m`` counts the axis ``M`` of
            Definitions that write it so, as those of flashinfer-bench do.
        choices: by entry.
        special: corners, each with the entries that are not usual. Counts are cut to what the kernel takes.
        on_cpu: further corners that only a CPU has, because it is not known what some kernels round there, or because
            a GPU draws more than these anyway.
        fit: changes what was drawn, where not all choices go together.
    """

    counts: Mapping[str, Count]
    choices: Mapping[str, Choices] = field(default_factory=dict)
    special: Corners = ()
    on_cpu: Sequence[Mapping[str, Any]] = ()
    fit: Callable[[PlanRequest, Plan], Plan] | None = None
    _: KW_ONLY
    many_rows: int = BEYOND_1024

    def entries(self, definition: Definition) -> frozenset[str]:
        return frozenset((*self._counts(definition), *self.choices))

    def plans(self, request: PlanRequest) -> st.SearchStrategy[Plan]:
        entries: dict[str, st.SearchStrategy[Any]] = {}
        for name, (axis, count) in self._counts(request.definition).items():
            entries[name] = count.drawn(request) if count.drawn else sizes(*count.range(axis, request))
        for name, choices in self.choices.items():
            if isinstance(choices, Drawn):
                entries[name] = choices.strategy(request)
            else:
                entries[name] = st.sampled_from(choices(request) if callable(choices) else choices)
        plans = st.fixed_dictionaries(entries)
        fit = self.fit
        return plans if fit is None else plans.map(lambda plan: fit(request, plan))

    def plan_for_axes(self, definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
        return self._usual(PlanRequest(definition, {}, large=False), axes)

    def corners(self, request: PlanRequest) -> list[Plan]:
        special = self.special(request) if callable(self.special) else self.special
        counts, usual = self._counts(request.definition), self._usual(request, {})
        for name, (axis, count) in counts.items():
            low, high = count.range(axis, request)
            usual[name] = max(low, min(count.corner, high))
        found = []
        # On a CPU, the case of many rows is the one of spread values.
        of_gpu = ({"values": SPREAD},) if self.has_spread else ()
        for changed in (*special, *(of_gpu if request.large else self.on_cpu)):
            unknown = sorted(changed.keys() - usual.keys() - request.definition.const_axes.keys())
            if unknown:
                raise FamilyError(f"{request.definition.name}: corners have entries {unknown}, plans {sorted(usual)}")
            plan = {**usual, **{name: value for name, value in changed.items() if name in usual}}
            for name, (axis, _) in counts.items():
                low, high = request.limits.get(axis, (plan[name], plan[name]))
                plan[name] = max(low, min(plan[name], high))
            found.append(plan)
        return found

    @property
    def has_spread(self) -> bool:
        """Whether values may be `SPREAD`."""
        kinds = self.choices.get("values", ())
        return isinstance(kinds, Sequence) and SPREAD in kinds

    def with_corners(self, corners: Callable[[PlanRequest], Sequence[Plan]]) -> RowPlans:
        return replace(self, special=corners, on_cpu=())

    def _counts(self, definition: Definition) -> dict[str, tuple[str, Count]]:
        """By entry, the axis of this Definition."""
        const, var = definition.const_axes, definition.var_axes
        axes = {name: name.upper() if name.upper() in var else name for name in self.counts if name not in const}
        return {name: (axis, self.counts[name]) for name, axis in axes.items()}

    def _usual(self, request: PlanRequest, axes: Mapping[str, int]) -> Plan:
        definition, plan, known = request.definition, {}, dict(axes)
        for name, (axis, count) in self._counts(definition).items():
            plan[name] = known[name] = axes[axis] if axis in axes else value_of(count.usual, definition, known)
        for name, choices in self.choices.items():
            if isinstance(choices, Drawn):
                plan[name] = value_of(choices.usual, definition, known)
            else:
                plan[name] = (choices(request) if callable(choices) else choices)[0]
        return plan


@dataclass(frozen=True)
class OwnPlans(PlanShape):
    """Plans of a structure of their own, given by the functions of a `PlanShape`."""

    draw: Callable[[PlanRequest], st.SearchStrategy[Plan]]
    for_axes: Callable[[Definition, Mapping[str, int], Draws], Plan]
    special: Callable[[PlanRequest], Sequence[Plan]]

    def plans(self, request: PlanRequest) -> st.SearchStrategy[Plan]:
        return self.draw(request)

    def plan_for_axes(self, definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
        return self.for_axes(definition, axes, draws)

    def corners(self, request: PlanRequest) -> Sequence[Plan]:
        return self.special(request)

    def with_corners(self, corners: Callable[[PlanRequest], Sequence[Plan]]) -> OwnPlans:
        return replace(self, special=corners)


def value_of(usual: Any, definition: Definition, axes: Mapping[str, int]) -> Any:
    return usual(definition, axes) if callable(usual) else usual


def row_axis(definition: Definition) -> str | None:
    """The axis that counts tokens or rows, or None."""
    return next((axis for axis in ROW_AXES if axis in definition.var_axes), None)


def one_row(shape: PlanShape, request: PlanRequest) -> list[Plan]:
    """One plan of one row, or of one request with one query, which decoding for a single user has and plans have only
    by chance; none on a GPU, for a kernel, or where plans have lengths of queries."""
    axis = row_axis(request.definition)
    if request.large or request.limits or request.plan_options is not None:
        return []
    if not shape.many_rows or axis is None or "qo_indptr" in request.definition.inputs:
        return []
    return [shape.plan_for_axes(request.definition, {axis: 1}, Draws(0, "cpu"))]


def many_rows(shape: PlanShape, request: PlanRequest) -> list[Plan]:
    """One plan of `shape.many_rows` rows, or of as many as fit into `BYTES`, which are `SPREAD` where a family has such
    values; none on a GPU, where plans draw more.

    On a CPU plans draw dozens of rows at most: a kernel that is right up to its first tile of rows, or up to position
    4095, is right in every case that is drawn there. Families of attention, whose requests have lengths, have corners
    of their own (`families.attention.cases`). There is none either for a kernel with options or with limits of other
    axes, which the plan may not keep, and where requests are given by offsets.
    """
    definition = request.definition
    axes, axis = definition.var_axes, row_axis(definition)
    if request.large or not shape.many_rows or axis is None or "len_indptr" in axes:
        return []
    low, high = request.limits.get(axis, (0, NO_LIMIT))
    others = [most for name, (_, most) in request.limits.items() if name != axis]
    if request.plan_options is not None or any(most < NO_LIMIT for most in others):
        return []
    one, two = (input_bytes(definition, {**dict.fromkeys(axes, OTHERS), axis: count}) for count in (1, 2))
    rows = min(shape.many_rows, high, (BYTES - one) // max(1, two - one))
    if rows < max(FEWEST, low):
        return []
    beside = {**POSITIONS, "num_copies": 2 * rows}
    given = {axis: rows, **{name: count for name, count in beside.items() if name in axes}}
    plan = shape.plan_for_axes(definition, given, Draws(0, "cpu"))
    return [{**plan, "values": SPREAD} if isinstance(shape, RowPlans) and shape.has_spread else plan]


def input_bytes(definition: Definition, axes: Mapping[str, int] | None = None) -> int:
    """Memory of the inputs at these values of the variable axes; where one is not given it is 1, which leaves the
    memory of the weights."""
    shapes = definition.input_shapes({**dict.fromkeys(definition.var_axes, 1), **(axes or {})})
    return sum(
        math.prod(shape) * torch_dtype(definition.inputs[name].dtype).itemsize
        for name, shape in shapes.items()
        if shape
    )
