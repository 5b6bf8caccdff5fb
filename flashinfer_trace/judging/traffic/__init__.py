"""Workloads: inputs of named traffic that anyone regenerates bit by bit, on a CPU or a GPU.

    >>> for workload in workloads("rmsnorm_h7168"):
    ...     inputs = workload.inputs("cuda")

docs/workloads.md says what they are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.validation.schemas import first_problem
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.harness.exact import ExactOperations
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.inputs import Draws, HollowDraws
from flashinfer_trace.judging.costs import Cost, work_of
from flashinfer_trace.judging.costs.shapes import without_features
from flashinfer_trace.judging.costs.work import cost, tensor_bytes
from flashinfer_trace.judging.traffic.plans import fitting, planned
from flashinfer_trace.judging.traffic.profiles import Traffic, load_traffic
from flashinfer_trace.judging.user_inputs import device_name

#: Most memory of the inputs and outputs that grow with the traffic; the weights are not counted.
MOST_BYTES = 2 << 30
#: The last variant of a workload: its 31 bits lie above those of the seed of the workload.
MOST_VARIANT = 2**31 - 1


class WorkloadError(ValueError):
    """A workload that is not what its file says. The message names the file, the workload and the fix."""


@dataclass(frozen=True)
class Workload:
    """Inputs of a Definition under named traffic.

    Attributes:
        seed: of the random words; with the traffic it gives every bit.
        traffic: what the lengths are drawn from.
        digests: SHA-256 of each input, as a file in workloads/ (`path`) has them; empty where none is recorded.
    """

    definition: Definition
    name: str
    axes: Mapping[str, int]
    seed: int
    traffic: Traffic = field(repr=False)
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    path: Path | None = field(default=None, repr=False)

    @property
    def quick(self) -> bool:
        return self.traffic.quick

    @functools.cached_property
    def plan(self) -> Plan:
        return planned(self.definition, self.traffic, self.seed)

    def inputs(self, device: str | torch.device = "cpu", variant: int = 0) -> dict[str, Any]:
        """The inputs by name: tensors, and numbers for scalars. Those of variant 0 are compared with the digests.

        Args:
            device: where they are made; the bits are the same everywhere.
            variant: other elements, pages and routing for the same lengths; from 0 to 2**31 - 1.

        Raises:
            WorkloadError: they are not those of the file, or do not have its axes.
            InputError: the device or the variant does not exist, or the inputs do not fit the Definition.
        """
        device_name(device)
        if isinstance(variant, bool) or not isinstance(variant, int) or not 0 <= variant <= MOST_VARIANT:
            raise InputError(
                f"{self.definition.name}: workload {self.name}: variant {variant!r}; variants are whole numbers from 0 "
                f"to {MOST_VARIANT}"
            )
        found, axes = _inputs(self.definition, self.plan, self.seed + (variant << 32), device)
        self._check_axes(axes)
        if self.digests and variant == 0:
            self._check(digests(found))
        return found

    def cost(self) -> Cost:
        """The Definition's cost at these inputs; their features are not made for that.

        Raises:
            CostError: the Definition's family has no cost.
            WorkloadError: the file says other axes than those of the inputs.
        """
        inputs = self.structure()
        self._check_axes(without_features(self.definition).bind_axes(inputs))
        return cost(self.definition, self.axes, work_of(self.definition, inputs, self.axes))

    def structure(self, elements: bool = True) -> dict[str, Any]:
        """The inputs at the sizes of the family's twin: those that do not depend on these are the same, bit by bit.

        Args:
            elements: whether floating-point tensors are drawn; otherwise they are zero, and so is what is made of them.
        """
        thin = without_features(self.definition)
        draws = (Draws if elements else HollowDraws)(_elements(self.seed), "cpu")
        with ExactOperations() if elements else contextlib.nullcontext():
            return family_of(self.definition).make_inputs(thin, self.plan, draws)

    def _check_axes(self, actual: Mapping[str, int]) -> None:
        if actual != self.axes:
            raise self._error(f"its axes are {dict(actual)}, and the file says {dict(self.axes)}")

    def _check(self, actual: Mapping[str, str]) -> None:
        names = {*actual, *self.digests}
        wrong = sorted(name for name in names if actual.get(name) != self.digests.get(name))
        if wrong:
            first = wrong[0]
            raise self._error(
                f"the inputs {wrong} are others than those that were recorded: {first} has the digest "
                f"{actual.get(first)}, the file says {self.digests.get(first)}"
            )

    def _error(self, what: str) -> WorkloadError:
        return WorkloadError(
            f"{self.path or self.definition.name}: workload {self.name}: {what}; if the traffic or the family's inputs "
            f"were changed on purpose, record it again in a checkout: python -m tools.record_workloads "
            f"{self.definition.name}"
        )


def workloads(definition: Definition | str) -> tuple[Workload, ...]:
    """The workloads of a Definition: all traffic that means something for it and fits into MOST_BYTES.

    Those in its file have digests; others are drawn now.

    Raises:
        DatasetError: the Definition does not exist.
        InputError: `definition` is not one.
        TrafficError, WorkloadError: a file in workloads/ cannot be read.
    """
    loaded = store.definition_of(definition)
    path = path_of(loaded, loaded.root or store.find_root())
    return drawn(loaded, _recorded(loaded, path) if path.is_file() else {})


def drawn(definition: Definition, recorded: Mapping[str, Workload] | None = None) -> tuple[Workload, ...]:
    """The workloads of a Definition, whatever its file says: those that are given by name, others without digests."""
    traffic = fitting(definition, load_traffic(definition.root or store.find_root()))
    found = ((recorded or {}).get(each.name) or _drawn(definition, each) for each in traffic)
    return tuple(each for each in found if _variable_bytes(definition, each.axes) <= MOST_BYTES)


def path_of(definition: Definition, root: Path) -> Path:
    return root / "workloads" / definition.op_type / f"{definition.name}.json"


def _recorded(definition: Definition, path: Path) -> dict[str, Workload]:
    traffic = {each.name: each for each in fitting(definition, load_traffic(path.parents[2]))}
    try:
        data = load_object(path)
        if problem := first_problem("workloads", data, store.find_root()):
            raise ValueError(problem)
        if data["definition"] != definition.name:
            raise ValueError(f"it is for {data['definition'][:100]}; its name must be that of its Definition")
        for name, entry in data["workloads"].items():
            if name not in traffic:
                known = ", ".join(traffic)
                raise ValueError(f"workloads.{name[:100]}: it is not traffic of this Definition, which has {known}")
            if entry["axes"].keys() != set(definition.var_axes):
                raise ValueError(f"workloads.{name}: axes are not {', '.join(definition.var_axes)}")
            if entry["inputs"] and entry["inputs"].keys() != definition.inputs.keys():
                raise ValueError(f"workloads.{name}: inputs are not {', '.join(definition.inputs)}, or none")
    except ValueError as error:
        fix = f"record it again in a checkout: python -m tools.record_workloads {definition.name}"
        raise WorkloadError(f"{path}: {str(error)[:500]}; schema/workloads.schema.json describes it; {fix}") from error
    return {
        name: Workload(definition, name, one["axes"], one["seed"], traffic[name], one["inputs"], path)
        for name, one in data["workloads"].items()
    }


def _drawn(definition: Definition, traffic: Traffic) -> Workload:
    seed = _seed(definition.name, traffic.name)
    thin = without_features(definition)
    hollow = family_of(definition).make_inputs(thin, planned(definition, traffic, seed), HollowDraws(seed, "cpu"))
    return Workload(definition, traffic.name, thin.bind_axes(hollow), seed, traffic)


def _seed(definition: str, traffic: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{definition} {traffic}".encode()).digest()[:4], "little") >> 1


def _variable_bytes(definition: Definition, axes: Mapping[str, int]) -> int:
    """Memory of the tensors that grow with the traffic."""
    specs = {**definition.inputs, **definition.outputs}
    shapes = {**definition.input_shapes(axes), **definition.output_shapes(axes)}
    grow = [name for name, spec in specs.items() if set(spec.shape or ()) & set(axes)]
    return tensor_bytes(specs, {name: shapes[name] for name in grow})


def _elements(seed: int) -> int:
    """The seed of the inputs: the first draws of the plan must not come again."""
    return seed | 1 << 63


def _inputs(
    definition: Definition, plan: Plan, seed: int, device: str | torch.device
) -> tuple[dict[str, Any], dict[str, int]]:
    with ExactOperations():
        found = family_of(definition).make_inputs(definition, plan, Draws(_elements(seed), device))
    for value in found.values():
        # A NaN has many forms, and which of them a conversion gives depends on the device.
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1:
            value.masked_fill_(value.isnan(), math.nan)
    return found, definition.check_inputs(found)


def digest(value: Any) -> str:
    """SHA-256 of the dtype, the shape and the bytes of a tensor (little-endian, in C order), or of a number."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(f"{type(value).__name__} {value!r}".encode()).hexdigest()
    found = hashlib.sha256(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} ".encode())
    found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def digests(inputs: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(value) for name, value in inputs.items()}
