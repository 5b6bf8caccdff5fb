"""The workloads of a Definition as evaluators take them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.export.sources import Source, source
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.inputs import Draws

__all__ = ["Case", "Unsuitable", "cases"]


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

    def draws(self, definition: Definition) -> Draws:
        """What the values of its formulas are drawn from: the same in every export."""
        return Draws(zlib.crc32(f"{definition.name} {self.name}".encode()), "cpu")


@dataclass(frozen=True)
class Unsuitable:
    """A workload that an evaluator cannot take, and why."""

    name: str
    reason: str


#: Sizes of a variable axis that nothing else decides: one token, a batch of decode, and a chunk of prefill.
_SIZES = (1, 64, 1024)
_ROWS = ("num_tokens", "batch_size", "m", "M", "seq_len", "num_rows", "total_rows", "num_copies")
_SEEDS = range(100)

#: Most bytes of the tensors of one workload.
_MOST_STORED = 16 << 20
#: What the sampling evaluator of flashinfer-bench 0.1.2 does, and how many rows it manages in its 300 seconds.
_DRAWS = 500_000
_MOST_ROWS = 4


def cases(definition: Definition, family: Family) -> Iterator[Case | Unsuitable]:
    """The workloads of a Definition, in order."""
    axis = next((axis for axis in _ROWS if axis in definition.var_axes), None)
    for axes in [{axis: size} for size in _SIZES] if axis else [{}]:
        yield _case(definition, family, "_".join(f"{name}{size}" for name, size in axes.items()) or "default", axes)


def _case(definition: Definition, family: Family, name: str, axes: Mapping[str, int]) -> Case | Unsuitable:
    reason = ""
    for seed in _SEEDS:
        try:
            actual, given = _given(definition, family, axes, seed)
        except InputError as error:
            return Unsuitable(name, str(error))
        shapes = definition.input_shapes(actual)
        inputs = {
            one: given[one] if found is None else found
            for one in definition.inputs
            for found in [source(definition, one, shapes[one])]
        }
        reason = _unsuitable(definition, inputs, actual) or ""
        if not reason:
            return Case(name, actual, inputs)
    return Unsuitable(name, reason)


def _given(
    definition: Definition, family: Family, axes: Mapping[str, int], seed: int
) -> tuple[Mapping[str, int], Mapping[str, Any]]:
    """All variable axes, and the inputs that the family has to give."""
    if set(axes) == set(definition.var_axes):
        shapes = definition.input_shapes(axes)
        if all(source(definition, name, shapes[name]) for name in definition.inputs):
            return axes, {}
    inputs = family.inputs_for_axes(definition, axes, seed, "cpu")
    return definition.bind_axes(inputs), inputs


def _unsuitable(definition: Definition, inputs: Mapping[str, Source], axes: Mapping[str, int]) -> str | None:
    """Why an evaluator cannot take these inputs, or None."""
    empty = [axis for axis, size in axes.items() if size == 0]
    if empty:
        return f"{empty[0]} is 0, and flashinfer-bench takes positive sizes only"
    if definition.op_type == "sampling" and axes["batch_size"] > _MOST_ROWS:
        return f"{_DRAWS} tokens are drawn for each row, one by one, so that more than {_MOST_ROWS} rows time out"
    stored = sum(given.nbytes for given in inputs.values() if isinstance(given, torch.Tensor))
    if stored > _MOST_STORED:
        return f"its tensors would take {stored >> 20} MiB, more than {_MOST_STORED >> 20}"
    if "lse" in definition.outputs and _has_blind_query(definition, inputs):
        return "a query sees no key, so that its lse is -inf, and the evaluators reject infinities"
    return None


def _has_blind_query(definition: Definition, inputs: Mapping[str, Any]) -> bool:
    """Whether a query may attend to no key."""
    if "sparse_indices" in inputs:
        return bool((inputs["sparse_indices"] < 0).all(dim=1).any())
    keys = inputs["kv_indptr"].diff()
    if "kv_indices" in inputs:
        last = inputs.get("kv_last_page_len", torch.ones_like(keys))
        keys = torch.where(keys > 0, (keys - 1) * definition.const_axes["page_size"] + last, 0)
    queries = inputs["qo_indptr"].diff() if "qo_indptr" in inputs else torch.ones_like(keys)
    return bool(((queries > 0) & (keys < queries)).any())
