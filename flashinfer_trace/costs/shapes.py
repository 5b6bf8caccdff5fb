"""Costs at sizes whose inputs need much memory: only indices, lengths, offsets and routing are made in full."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashinfer_trace.costs import Cost, work_of
from flashinfer_trace.costs.work import cost
from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.inputs import torch_dtype
from flashinfer_trace.requested import checked_axes, requested_inputs

__all__ = ["cost_at", "without_features"]

#: Inputs up to this size are made as they are.
SMALL = 64 << 20
#: Inputs without features are made up to this size.
MOST = 8 << 30

#: Const axes that decide which rows, pages and experts are touched; all others are features.
STRUCTURE = frozenset(
    {
        *("block_size", "n_group", "num_draft_tokens", "num_experts", "num_fused_shared_experts"),
        *("num_local_experts", "num_offsets", "num_parents", "num_selected", "num_speculative_tokens", "num_steps"),
        *("one", "page_size", "rows_per_token", "top_k", "topk", "topk_group", "vocab_size"),
    }
)


def without_features(definition: Definition) -> Definition:
    """The Definition with as few features as its family's twin has, and with its own structure."""
    twin = family_of(definition).twin
    return definition.with_const_axes({axis: size for axis, size in twin.items() if axis not in STRUCTURE})


def cost_at(definition: Definition, axes: Mapping[str, int], seed: int = 0) -> tuple[Cost, dict[str, int]]:
    """The cost at these values of variable axes, and the values of all of them; the family chooses the others.

    Up to SMALL it is that of the inputs that `make_inputs` makes. Larger ones are never made: where a family draws
    features before routing, the same seed gives another routing then.

    Raises:
        InputError: an axis or the seed is not in its range, an axis is unknown, no valid inputs have the given value,
            or even inputs without features do not fit into memory.
        CostError: the Definition's family has no cost.
    """
    thin = without_features(definition)
    given = checked_axes(thin, axes)
    least = input_bytes(thin, {**dict.fromkeys(thin.var_axes, 1), **given})
    if least > MOST:
        raise InputError(
            f"{definition.name}: axes {given} need {least >> 30} GiB of indices and rows, and a cost is found from "
            f"{MOST >> 30} GiB at most; give smaller sizes"
        )
    inputs = requested_inputs(thin, given, seed, "cpu")
    actual = thin.bind_axes(inputs)
    if input_bytes(definition, actual) <= SMALL:
        inputs = requested_inputs(definition, given, seed, "cpu")
        actual = definition.bind_axes(inputs)
    return cost(definition, actual, work_of(definition, inputs, actual)), actual


def input_bytes(definition: Definition, axes: Mapping[str, int]) -> int:
    """Memory of the inputs at these values of the variable axes."""
    return sum(
        math.prod(shape) * torch_dtype(definition.inputs[name].dtype).itemsize
        for name, shape in definition.input_shapes(axes).items()
        if shape
    )
