"""The record that a family of Definitions gives the harness, and nothing about any family in particular."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.harness.exact import ExactOperations
from flashinfer_trace.harness.far import far_axis, rows_before
from flashinfer_trace.harness.faults import Fault
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.layouts import (
    FAR,
    LAYOUT,
    NAN_ROW,
    STRIDED,
    nan_rows,
    rows_apart,
    with_nan_row,
    without_nan,
)
from flashinfer_trace.harness.plans import NO_LIMIT, FamilyError, OwnPlans, Plan, PlanRequest, PlanShape, RowPlans
from flashinfer_trace.kernels import in_table
from flashinfer_trace.kernels.table import TURING as ANY_GPU
from flashinfer_trace.kernels.table import Capabilities, KernelFacts, Need, Place
from flashinfer_trace.verdict.compare import Expected, Policy

__all__ = [
    "Family",
    "FamilyError",
    "Inputs",
    "Kernel",
    "KernelCall",
    "Outputs",
    "Plan",
    "PlanRequest",
    "ReferenceRun",
    "Relation",
    "SeededCall",
    "private_kernel",
]

#: By name, in the Definition's order: tensors, and numbers for scalars.
Inputs = dict[str, Any]
Outputs = dict[str, torch.Tensor]
#: (definition, inputs, poisoned outputs) -> outputs.
KernelCall = Callable[[Definition, Inputs, Outputs], Outputs]
#: (definition, inputs, outputs) -> one line for each way in which the outputs do not fit each other.
Relation = Callable[[Definition, Inputs, Outputs], list[str]]
#: (definition, inputs, seed) -> outputs.
SeededCall = Callable[[Definition, Inputs, int], Outputs]
#: (definition, inputs, numbers that torch.rand returns instead of the generator's) -> outputs of the reference.
ReferenceRun = Callable[..., Outputs]


@dataclass(frozen=True)
class Kernel:
    """How a family calls one real implementation of it, and what the harness must know to judge it.

    Facts that hold for every caller are in the table of kernels (`flashinfer_trace.kernels`), under the path, the
    variant and the family: the distribution by version, the GPUs, and the sizes that it takes.

    Attributes:
        path: dotted path of the public function or class, e.g. ``flashinfer.norm.rmsnorm``.
        call: (definition, inputs, outputs) -> outputs by name. `outputs` are poisoned tensors (NaN, or a sentinel)
            of the declared shapes, for kernels that take ``out=``; a kernel that returns its results ignores them.
            Imports its library itself.
        variant: distinguishes two uses of one path, e.g. a backend.
        limits: inclusive limits of variable axes.
        plan_options: what it takes beyond them, as a frozen dataclass of its family (see `PlanRequest.options_of`).
        common: the `plan_options` of other kernels with the same limits, which take less: it shares their cases, before
            it has some of its own.
        in_place: inputs that it overwrites; every other input must come out unchanged.
        compare: policies by output that differ from the family's, with their own reasons.
        seeded: (definition, inputs, seed) -> outputs, of a kernel that draws: two seeds must give two results.
        facts: what is known of it; the family that has the kernel takes them from the table (see `private_kernel`).
    """

    path: str
    call: KernelCall
    variant: str = ""
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    plan_options: object | None = None
    common: object | None = None
    in_place: tuple[str, ...] = ()
    compare: Mapping[str, Policy] = field(default_factory=dict)
    seeded: SeededCall | None = None
    facts: KernelFacts | None = None

    @property
    def label(self) -> str:
        """Short unique name within a family: the path, and the variant in brackets."""
        return f"{self.path}[{self.variant}]" if self.variant else self.path

    @property
    def known(self) -> KernelFacts:
        """Its facts.

        Raises:
            FamilyError: no family has it.
        """
        if self.facts is None:
            raise FamilyError(f"the kernel {self.label} has no facts before a family has it")
        return self.facts

    @property
    def library(self) -> str:
        """The distribution it comes from, as pip names it; its version goes into the evidence."""
        return self.known.library

    def unsupported(self, definition: Definition) -> str | None:
        """Why it does not compute a Definition of the family, or None if it does."""
        return self.known.unsupported(definition)

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        """Why it cannot run on a GPU of this compute capability, or None."""
        return self.known.unavailable(capability)

    def missing(self) -> str | None:
        """Why its library cannot be used in this environment, or None."""
        return self.known.missing()

    def of_family(self, family: str) -> Kernel:
        """The kernel with the facts that the table has of it for a family.

        Raises:
            FamilyError: it has none of its own, and the table has none.
        """
        known = in_table(family).get(self.label, self.facts)
        if known is None:
            raise FamilyError(
                f"family {family}: the table of kernels has no {self.label} that computes it; add it to the entry in "
                "flashinfer_trace/kernels/"
            )
        return self if known is self.facts else replace(self, facts=known)

    def ignores_seed(self, definition: Definition, inputs: Mapping[str, Any]) -> bool:
        """Whether it draws, and gives the same results with two seeds: no single call shows that."""
        if self.seeded is None:
            return False
        first, second = (self.seeded(definition, dict(inputs), seed) for seed in (1, 2))
        return all(torch.equal(first[name], second[name]) for name in definition.outputs)


def private_kernel(
    path: str,
    library: str,
    call: KernelCall,
    *,
    variant: str = "",
    on: Capabilities = ANY_GPU,
    needs: tuple[Need, ...] = (),
    **how: Any,
) -> Kernel:
    """A kernel that the table of kernels lacks, such as one of another package.

    Args:
        path, call, variant: see `Kernel`.
        library: the distribution that has it, as pip names it.
        on: the lowest and the highest compute capability of the GPUs that run it.
        needs: (definition) -> why it does not compute that one, or None.
        how: the other attributes of `Kernel`.
    """
    facts = KernelFacts(path, (Place(path, library),), variant, *on, needs, (path,))
    return Kernel(path, call, variant, facts=facts, **how)


@dataclass(frozen=True)
class Family:
    """Everything the harness must know of one family.

    Attributes:
        name: the key in schema/naming.json.
        op_type: the directory of its Definitions.
        twin: small values of const axes, for CPU tests.
        plan: the shape of its plans (see `harness.plans`).
        make_inputs: (definition, plan, draws) -> valid inputs.
        oracle: (definition, inputs) -> what each output must be, in float64, computed another way.
        compare: policy of each output.
        kernels: the real implementations.
        relations: (definition, inputs, outputs) -> one line for each way in which the outputs do not fit each other,
            where each alone may be right in several ways: ids that point to other rows than their weights.
        checks: (definition at the sizes to run, what runs its reference) -> one line for each way in which the
            reference alone is wrong, where inputs and outputs do not tell: how a sampler uses the number that it draws.
        strided: inputs that its kernels take with memory between their rows, as slices of wider tensors. Where one of
            them does not, or nobody knows, its adapter makes them dense, as its callers must.
        isolated: inputs of which one row may be NaN, of all of them the same one. It may spoil the same row of each
            output that has as many, and nothing else. Every kernel of the family keeps its rows apart like this.
        faults: errors of kernels of this family, in addition to those of any kernel (see `harness.faults`).
        unseen: why a verification does not reject a kernel with a fault, by pattern of the fault's name.
        unverified: why none of its kernels can be run for evidence; empty if they have run, or only await a GPU run.
    """

    name: str
    op_type: str
    twin: Mapping[str, int]
    plan: PlanShape
    make_inputs: Callable[[Definition, Plan, Draws], Inputs]
    oracle: Callable[[Definition, Inputs], dict[str, Expected]]
    compare: Mapping[str, Policy]
    kernels: tuple[Kernel, ...]
    relations: tuple[Relation, ...] = ()
    checks: tuple[Callable[[Definition, ReferenceRun], list[str]], ...] = ()
    strided: tuple[str, ...] = ()
    isolated: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)
    unverified: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(kernel.of_family(self.name) for kernel in self.kernels))

    def plans(self, request: PlanRequest) -> st.SearchStrategy[Plan]:
        """The plans that may be drawn; some are not dense."""
        plans, layouts = self.plan.plans(request), self.layouts(request.definition)
        if not layouts:
            return plans
        drawn = st.sampled_from([None, None, *layouts])
        return st.tuples(plans, drawn).map(lambda each: each[0] if each[1] is None else {**each[0], LAYOUT: each[1]})

    def layouts(self, definition: Definition) -> tuple[str, ...]:
        """The layouts of its inputs other than the dense one."""
        return (NAN_ROW,) * bool(self.isolated_of(definition)) + (STRIDED,) * bool(self.strided_of(definition))

    def strided_of(self, definition: Definition) -> list[str]:
        """The strided inputs that a Definition has."""
        return [name for name in self.strided if name in definition.inputs]

    def isolated_of(self, definition: Definition) -> list[str]:
        """The isolated inputs that a Definition has."""
        return [name for name in self.isolated if name in definition.inputs]

    def plan_for_axes(self, definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
        """A plan with these values of variable axes."""
        return self.plan.plan_for_axes(definition, axes, draws)

    def corners(self, request: PlanRequest) -> Sequence[Plan]:
        """The plans that every verification runs before those that it draws; the last ones are not dense. Of rows
        these are usual ones, since other corners need each of theirs."""
        plans, layouts = list(self.plan.corners(request)), self.layouts(request.definition)
        if isinstance(self.plan, RowPlans):
            usual = self._usual_corner(request)
            return [*plans, *({**usual, LAYOUT: layout} for layout in layouts)]
        for place, layout in zip(reversed(range(len(plans))), layouts, strict=False):
            plans[place] = {**plans[place], LAYOUT: layout}
        return plans

    def _usual_corner(self, request: PlanRequest) -> Plan:
        """A few usual rows; of requests, the last corner."""
        if isinstance(self.plan, OwnPlans):
            return self.plan.plan_for_axes(request.definition, {}, Draws(0, "cpu"))
        plan = self.plan.with_corners(lambda _: [{}]) if isinstance(self.plan, RowPlans) else None
        return plan.corners(request)[0] if plan else self.plan.corners(request)[-1]

    def far_plan(self, request: PlanRequest) -> Plan | None:
        """The plan whose offsets do not fit in 32 bits (see `harness.far`); None if there is none, on a CPU as well, or
        for a kernel that takes fewer rows."""
        rows, axis = rows_before(request.definition), far_axis(request.definition)
        _, most = request.limits.get(axis or "", (0, 2 * rows))
        if not (request.large and rows) or most < min(2 * rows, NO_LIMIT):
            return None
        return {**self._usual_corner(request), LAYOUT: FAR}

    def inputs(self, definition: Definition, plan: Plan, seed: int, device: str | torch.device) -> Inputs:
        """The inputs of one case, checked against the Definition's shapes, dtypes and constraints."""
        return self.inputs_and_axes(definition, plan, seed, device)[0]

    def inputs_and_axes(
        self, definition: Definition, plan: Plan, seed: int, device: str | torch.device
    ) -> tuple[Inputs, dict[str, int]]:
        """The inputs of one case, and the values that they give the variable axes.

        Raises:
            InputError: the plan has not the entries of the family's plans, or the inputs do not fit the Definition.
        """
        entries, layout = self.plan.entries(definition), plan.get(LAYOUT)
        unknown, missing = sorted(plan.keys() - entries), sorted(entries - plan.keys())
        if layout in self.layouts(definition) or (layout == FAR and rows_before(definition)):
            unknown.remove(LAYOUT)
        if unknown or missing:
            raise InputError(
                f"{definition.name}: a plan with unknown entries {unknown} and without {missing}; "
                f"plans of {self.name} have {sorted(entries)}"
            )
        with ExactOperations():
            inputs = self.make_inputs(definition, plan, Draws(seed, device))
        if layout == NAN_ROW:
            inputs = with_nan_row(inputs, self.isolated_of(definition), seed)
        elif layout == STRIDED:
            inputs = rows_apart(inputs, self.strided_of(definition))
        return inputs, definition.check_inputs(inputs)

    def inputs_for_axes(
        self, definition: Definition, axes: Mapping[str, int], seed: int, device: str | torch.device
    ) -> Inputs:
        """Inputs with these values of variable axes; the rest is chosen from the seed.

        Raises:
            InputError: an axis is not variable, is negative, or the inputs cannot have that value.
        """
        unknown = [axis for axis in axes if axis not in definition.var_axes]
        if unknown:
            raise InputError(f"{definition.name}: {unknown} are not variable axes; those are {definition.var_axes}")
        negative = [f"{axis} = {value}" for axis, value in axes.items() if value < 0]
        if negative:
            raise InputError(f"{definition.name}: {negative[0]}; sizes are zero or more")
        plan = self.plan_for_axes(definition, axes, Draws(seed, "cpu"))
        inputs, actual = self.inputs_and_axes(definition, plan, seed, device)
        wrong = [
            f"{axis} = {value} (it would be {actual[axis]})" for axis, value in axes.items() if actual[axis] != value
        ]
        if wrong:
            raise InputError(f"{definition.name}: no valid inputs with {', '.join(wrong)} and axes {dict(axes)}")
        return inputs

    def expected(self, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
        """The oracle's expectation of each output.

        Raises:
            FamilyError: it does not speak of exactly the Definition's outputs.
        """
        names = self.isolated_of(definition)
        rows = nan_rows(inputs, names) if names else None
        expected = self.oracle(definition, inputs if rows is None else without_nan(inputs, names))
        if rows is not None:
            axis = (definition.inputs[names[0]].shape or [""])[0]
            own = [name for name, spec in definition.outputs.items() if spec.shape and spec.shape[0] == axis]
            expected |= {name: replace(expected[name], unjudged=rows) for name in own}
        if expected.keys() != definition.outputs.keys():
            raise FamilyError(
                f"family {self.name}: the oracle speaks of the outputs {list(expected)}; "
                f"{definition.name} has {list(definition.outputs)}"
            )
        return expected

    def unrelated(self, definition: Definition, inputs: Mapping[str, Any], outputs: Outputs) -> list[str]:
        """One line for each way in which the outputs do not fit each other."""
        return [line for relation in self.relations for line in relation(definition, dict(inputs), outputs)]

    def why_unseen(self, fault: str) -> str:
        """The declared reason why a fault is not rejected; empty if it has to be."""
        return next((why for pattern, why in self.unseen.items() if fnmatch.fnmatchcase(fault, pattern)), "")

    def check(self, definition: Definition, kernel: Kernel | None = None) -> None:
        """Checks that the names in the record, and in one of its kernels, are those of the Definition.

        Raises:
            FamilyError: a policy is missing, or an output, an input or an axis is not one of the Definition's.
        """
        missing = [name for name in definition.outputs if name not in self.compare]
        if missing:
            raise FamilyError(f"family {self.name}: `compare` has no policy for the outputs {missing}")
        named: list[tuple[str, str, Collection[str], Collection[str]]] = [
            ("`compare`", "outputs", self.compare, definition.outputs),
            ("`twin`", "constant axes", self.twin, definition.const_axes),
        ]
        if kernel is not None:
            named += [
                (f"`compare` of {kernel.label}", "outputs", kernel.compare, definition.outputs),
                (f"`limits` of {kernel.label}", "variable axes", kernel.limits, definition.var_axes),
                (f"`in_place` of {kernel.label}", "inputs", kernel.in_place, definition.inputs),
            ]
        for where, kind, names, known in named:
            unknown = [name for name in names if name not in known]
            if unknown:
                raise FamilyError(
                    f"family {self.name}: {where} names {unknown}, which are not {kind} of {definition.name}; "
                    f"those are {list(known)}"
                )

    def kernels_of(self, definition: Definition) -> list[Kernel]:
        """The real kernels that compute this Definition."""
        return [kernel for kernel in self.kernels if kernel.unsupported(definition) is None]

    def policies(self, kernel: Kernel | None = None) -> dict[str, Policy]:
        """Policies by output, for the reference or for one kernel."""
        return {**self.compare, **(kernel.compare if kernel else {})}
