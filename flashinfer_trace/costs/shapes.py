"""Costs at sizes whose inputs need much memory: only indices, lengths, offsets and routing are made in full."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer_trace.costs import Cost, work_of
from flashinfer_trace.costs.work import cost
from flashinfer_trace.definition import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.real_size import input_bytes

__all__ = ["cost_at", "thin", "without_features"]

#: Inputs up to this size are made as they are.
SMALL = 64 << 20

#: Const axes that decide which rows, pages and experts are touched; all others are features.
STRUCTURE = frozenset(
    {
        *("block_size", "n_group", "num_draft_tokens", "num_experts", "num_fused_shared_experts"),
        *("num_local_experts", "num_offsets", "num_parents", "num_selected", "num_speculative_tokens", "num_steps"),
        *("one", "page_size", "rows_per_token", "top_k", "topk", "topk_group", "vocab_size"),
    }
)


def thin(definition: Definition) -> Definition:
    """The Definition with as few features as its family's twin has, if its inputs are large."""
    return definition if input_bytes(definition) <= SMALL else without_features(definition)


def without_features(definition: Definition) -> Definition:
    """The Definition with as few features as its family's twin has, and with its own structure."""
    twin = family_of(definition).twin
    return definition.with_const_axes({axis: size for axis, size in twin.items() if axis not in STRUCTURE})


def cost_at(definition: Definition, axes: Mapping[str, int], seed: int = 0) -> tuple[Cost, dict[str, int]]:
    """The cost at these values of variable axes, and the values of all of them; the family chooses the others.

    Raises:
        InputError: an axis is unknown, or no valid inputs have the given value.
        CostError: the Definition's family has no cost.
    """
    inputs = family_of(definition).inputs_for_axes(thin(definition), axes, seed, "cpu")
    actual = thin(definition).bind_axes(inputs)
    return cost(definition, actual, work_of(definition, inputs, actual)), actual
