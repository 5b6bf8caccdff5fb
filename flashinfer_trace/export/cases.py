"""The workloads of a Definition as evaluators take them: where each input comes from.

flashinfer-bench draws tensors itself: normal values, fp8 codes up to 2, integers up to 1024, and any bytes for int8.
What those are valid for is left to it, so that an export stays small. What has structure (offsets, pages, positions,
routes, scales, probabilities) comes from the family, is stored, and is the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.families.quantised import CODE_SIGMA
from flashinfer_trace.harness.family import Family, Inputs

__all__ = ["Case", "Random", "Source", "Unsuitable", "cases"]


@dataclass(frozen=True)
class Random:
    """An input that an evaluator draws: any values of its dtype are valid."""


#: Where an input comes from: a number or a tensor that is given, or `Random`.
Source = Random | torch.Tensor | bool | int | float


@dataclass(frozen=True)
class Case:
    """One workload.

    Attributes:
        name: unique within the Definition.
        axes: values of every variable axis, each positive.
        inputs: by name, in the Definition's order.
    """

    name: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Source]


@dataclass(frozen=True)
class Unsuitable:
    """A workload that an evaluator cannot take, and why."""

    name: str
    reason: str


#: 16-bit and 8-bit inputs that have structure: scales, zero points, sums, and scores without ties.
_STRUCTURED = frozenset({"a_scales", "a_sums", "b_scale", "routing_logits", "scales", "w_scales", "w_szeros", "zeros"})
#: float32 inputs that may be anything: matrices, weights, and logarithms of sums.
_ANY_FLOAT32 = frozenset({"A", "B", "bias", "input", "s_a", "s_b", "sinks", "topk_weights", "weight"})
#: Codes that a family draws deviate by `CODE_SIGMA`, those of flashinfer-bench by this.
_RANDOM_SIGMA = 0.94
#: fp8 codes -> their scales, which grow as much as the codes shrink, so that results stay far above its tolerance.
_SCALES = {"A": "A_scale", "B": "B_scale", "a": "a_scale", "b": "b_scale"}

#: Sizes of a variable axis that nothing else decides: one token, a batch of decode, and a chunk of prefill.
_SIZES = (1, 64, 1024)
_SAMPLED_ROWS = (1, 2)
_ROWS = ("num_tokens", "batch_size", "m", "M", "seq_len", "num_rows", "total_rows", "num_copies")
_SEEDS = range(100)


def cases(definition: Definition, family: Family) -> Iterator[Case | Unsuitable]:
    """The workloads of a Definition, in order."""
    for axes in _axes(definition):
        name = "_".join(f"{axis}{size}" for axis, size in axes.items())
        yield _case(definition, family, name, axes)


def _axes(definition: Definition) -> Iterator[dict[str, int]]:
    axis = next((axis for axis in _ROWS if axis in definition.var_axes), None)
    if axis is None:
        yield {}
        return
    # The sampling evaluator draws half a million times for each row, one token after the other.
    for size in _SAMPLED_ROWS if definition.op_type == "sampling" else _SIZES:
        yield {axis: size}


def _case(definition: Definition, family: Family, name: str, axes: Mapping[str, int]) -> Case | Unsuitable:
    reason = "no inputs have these axes"
    for seed in _SEEDS:
        try:
            inputs, actual = _drawn(definition, family, axes, seed)
        except InputError as error:
            return Unsuitable(name, str(error))
        found = _unsuitable(definition, inputs, actual)
        if found is None:
            return Case(name, actual, inputs)
        reason = found
    return Unsuitable(name, reason)


def _drawn(
    definition: Definition, family: Family, axes: Mapping[str, int], seed: int
) -> tuple[dict[str, Source], dict[str, int]]:
    """Sources of the inputs, and all variable axes."""
    random = {name for name in definition.inputs if is_random(definition, name)}
    if random == set(definition.inputs) and set(axes) == set(definition.var_axes):
        return {name: Random() for name in definition.inputs}, dict(axes)
    inputs = family.inputs_for_axes(definition, axes, seed, "cpu")
    actual = definition.bind_axes(inputs)
    return sources(definition, inputs), actual


def is_random(definition: Definition, name: str) -> bool:
    """Whether an evaluator may draw an input: all that it may draw is valid."""
    spec = definition.inputs[name]
    if spec.shape is None:
        return False
    if spec.dtype == "float32":
        return name in _ANY_FLOAT32 and definition.op_type != "moe" or name in ("input", "topk_weights")
    if spec.dtype == "int8":
        return len(spec.shape) > 1 and name not in _STRUCTURED
    return spec.dtype.startswith(("bfloat", "float")) and name not in _STRUCTURED


def sources(definition: Definition, inputs: Inputs) -> dict[str, Source]:
    """Where the inputs of a workload come from, given valid ones."""
    found: dict[str, Source] = {
        name: Random() if is_random(definition, name) else inputs[name] for name in definition.inputs
    }
    for codes, scale in _SCALES.items():
        if scale in found and definition.inputs[codes].dtype.startswith("float8"):
            found[scale] = inputs[scale] * (CODE_SIGMA / _RANDOM_SIGMA)
    return found


def _unsuitable(definition: Definition, inputs: Mapping[str, Source], axes: Mapping[str, int]) -> str | None:
    """Why an evaluator cannot take these inputs, or None."""
    empty = [axis for axis, size in axes.items() if size == 0]
    if empty:
        return f"{empty[0]} is 0, and flashinfer-bench takes positive sizes only"
    if "lse" in definition.outputs and _has_blind_query(definition, inputs):
        return "a query sees no key, its lse is -inf, and the default evaluator rejects infinities"
    return None


def _has_blind_query(definition: Definition, inputs: Mapping[str, Any]) -> bool:
    """Whether a query may attend to no key."""
    if "sparse_indices" in inputs:
        return bool((inputs["sparse_indices"] < 0).all(dim=1).any())
    keys = inputs["kv_indptr"].diff()
    if "kv_indices" in inputs:
        page_size = definition.const_axes["page_size"]
        last = inputs.get("kv_last_page_len", torch.ones_like(keys))
        keys = torch.where(keys > 0, (keys - 1) * page_size + last, 0)
    queries = inputs["qo_indptr"].diff() if "qo_indptr" in inputs else torch.ones_like(keys)
    return bool(((queries > 0) & (keys < queries)).any())


def stored_bytes(case: Case) -> int:
    """Memory of the tensors that an export stores."""
    return sum(
        math.prod(one.shape) * one.element_size() for one in case.inputs.values() if isinstance(one, torch.Tensor)
    )
