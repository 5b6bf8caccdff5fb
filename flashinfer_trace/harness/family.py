"""The record that a family of Definitions gives the harness, and nothing about any family in particular."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.harness.compare import Expected, Policy
from flashinfer_trace.harness.faults import Fault
from flashinfer_trace.harness.inputs import Draws

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
    "capability_range",
]

#: The highest compute capability of a kernel that has no limit.
UNLIMITED = (99, 9)

#: Everything about a case but its elements, as small JSON values: variable axes, sequence lengths, kinds of values.
#: (definition, plan, seed, kind of device) repeats a case exactly.
Plan = dict[str, Any]
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
Options = TypeVar("Options")


class FamilyError(LookupError):
    """A Definition that no family record covers, or that its record does not fit. The message says where and how."""


@dataclass(frozen=True)
class PlanRequest:
    """What plans may be drawn.

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


def capability_range(lowest: tuple[int, int], highest: tuple[int, int]) -> str:
    """An inclusive range of compute capabilities: ``10.0``, ``10.0 to 10.3``, or ``10.0 or above``."""
    low, high = (".".join(map(str, each)) for each in (lowest, highest))
    if highest == UNLIMITED:
        return f"{low} or above"
    return low if lowest == highest else f"{low} to {high}"


@dataclass(frozen=True)
class Kernel:
    """One real implementation of a family.

    Attributes:
        path: dotted path of the public function or class, e.g. ``flashinfer.norm.rmsnorm``.
        library: the distribution it comes from, as pip names it; its version goes into the evidence.
        call: (definition, inputs, outputs) -> outputs by name. `outputs` are poisoned tensors (NaN, or a sentinel)
            of the declared shapes, for kernels that take ``out=``; a kernel that returns its results ignores them.
            Imports its library itself.
        variant: distinguishes two uses of one path, e.g. a backend.
        min_capability, max_capability: inclusive range of CUDA compute capabilities.
        limits: inclusive limits of variable axes.
        plan_options: what it takes beyond them, as a frozen dataclass of its family (see `PlanRequest.options_of`).
        common: the `plan_options` of other kernels with the same limits, which take less: it shares their cases, before
            it has some of its own.
        const_axes: the only sizes it is built for; empty for any.
        supports: (definition) -> why it does not compute that one, or None.
        in_place: inputs that it overwrites; every other input must come out unchanged.
        compare: policies by output that differ from the family's, with their own reasons.
        modules: modules that `call` imports and that an installed library may be unable to import, because it was
            installed without what they need.
        seeded: (definition, inputs, seed) -> outputs, of a kernel that draws: two seeds must give two results.
        optional: whether a machine that has to run the kernels may do without its library.
    """

    path: str
    library: str
    call: KernelCall
    variant: str = ""
    min_capability: tuple[int, int] = (7, 5)
    max_capability: tuple[int, int] = UNLIMITED
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    plan_options: object | None = None
    common: object | None = None
    const_axes: Mapping[str, int] = field(default_factory=dict)
    supports: Callable[[Definition], str | None] = lambda definition: None
    in_place: tuple[str, ...] = ()
    compare: Mapping[str, Policy] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    seeded: SeededCall | None = None
    optional: bool = False

    @property
    def label(self) -> str:
        """Short unique name within a family: the path, and the variant in brackets."""
        return f"{self.path}[{self.variant}]" if self.variant else self.path

    def unsupported(self, definition: Definition) -> str | None:
        """Why this kernel does not compute this Definition, or None if it does."""
        for axis, value in self.const_axes.items():
            if definition.const_axes.get(axis) != value:
                return f"needs {axis} = {value}"
        return self.supports(definition)

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        """Why it cannot run on a GPU of this compute capability, or None."""
        if self.min_capability <= capability <= self.max_capability:
            return None
        return f"needs compute capability {self.capabilities}, this GPU has {capability[0]}.{capability[1]}"

    @property
    def capabilities(self) -> str:
        """The compute capabilities of the GPUs that run it, as `capability_range` writes them."""
        return capability_range(self.min_capability, self.max_capability)

    def ignores_seed(self, definition: Definition, inputs: Mapping[str, Any]) -> bool:
        """Whether it draws, and gives the same results with two seeds: no single call shows that."""
        if self.seeded is None:
            return False
        first, second = (self.seeded(definition, dict(inputs), seed) for seed in (1, 2))
        return all(torch.equal(first[name], second[name]) for name in definition.outputs)

    def missing(self) -> str | None:
        """Why its library cannot be used in this environment, or None."""
        return _missing(self.library, self.modules)


@functools.cache
def _missing(library: str, modules: tuple[str, ...]) -> str | None:
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return f"needs {library}, which is not installed"
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # modules of kernels fail to import in many ways: no driver, another version, ...
            return f"needs {module} of {library}, which cannot be imported: {type(error).__name__}: {error}"
    return None


class _Identical:
    """A Definition as a key: equal to itself alone. Its dictionaries have no hash."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    def __hash__(self) -> int:
        return id(self.definition)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self.definition is other.definition


@functools.lru_cache(maxsize=64)
def _plan_entries(
    plan_for_axes: Callable[[Definition, Mapping[str, int], Draws], Plan], key: _Identical
) -> frozenset[str]:
    """What the plans of a family have, for one Definition."""
    return frozenset(plan_for_axes(key.definition, {}, Draws(0, "cpu")))


@dataclass(frozen=True)
class Family:
    """Everything the harness must know of one family.

    Attributes:
        name: the key in schema/naming.json.
        op_type: the directory of its Definitions.
        twin: small values of const axes, for CPU tests.
        plans: hypothesis strategy of plans; draws axes and structure, never elements.
        plan_for_axes: (definition, axes given by a user, draws) -> a plan with these axes.
        make_inputs: (definition, plan, draws) -> valid inputs.
        oracle: (definition, inputs) -> what each output must be, in float64, computed another way.
        compare: policy of each output.
        kernels: the real implementations.
        corners: (request) -> plans that every verification runs before those that it draws: what random draws seldom
            meet. Each must have something to show that `plans` may miss.
        many_rows: rows of one more corner, on a CPU (see `harness.many_rows`); 0 for none.
        relations: (definition, inputs, outputs) -> one line for each way in which the outputs do not fit each other,
            where each alone may be right in several ways: ids that point to other rows than the weights beside them.
        checks: (definition at the sizes to run, what runs its reference) -> one line for each way in which the
            reference alone is wrong, where inputs and outputs do not tell: how a sampler uses the number that it draws.
        faults: ways to be wrong of a kernel of this family, beside those of any kernel (see `harness.faults`).
        unseen: why a verification does not reject a kernel with a fault, by pattern of the fault's name.
        unverified: why none of its kernels can be run for evidence; empty if they have run, or only await a GPU run.
    """

    name: str
    op_type: str
    twin: Mapping[str, int]
    plans: Callable[[PlanRequest], st.SearchStrategy[Plan]]
    plan_for_axes: Callable[[Definition, Mapping[str, int], Draws], Plan]
    make_inputs: Callable[[Definition, Plan, Draws], Inputs]
    oracle: Callable[[Definition, Inputs], dict[str, Expected]]
    compare: Mapping[str, Policy]
    kernels: tuple[Kernel, ...]
    corners: Callable[[PlanRequest], Sequence[Plan]] = lambda request: ()
    many_rows: int = 300
    relations: tuple[Relation, ...] = ()
    checks: tuple[Callable[[Definition, ReferenceRun], list[str]], ...] = ()
    faults: tuple[Fault, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)
    unverified: str = ""

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
        entries = _plan_entries(self.plan_for_axes, _Identical(definition))
        unknown, missing = sorted(plan.keys() - entries), sorted(entries - plan.keys())
        if unknown or missing:
            raise InputError(
                f"{definition.name}: a plan with unknown entries {unknown} and without {missing}; "
                f"plans of {self.name} have {sorted(entries)}"
            )
        inputs = self.make_inputs(definition, plan, Draws(seed, device))
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
        """What the oracle says of each output.

        Raises:
            FamilyError: it does not speak of exactly the Definition's outputs.
        """
        expected = self.oracle(definition, inputs)
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
