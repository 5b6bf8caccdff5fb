"""Inputs whose offsets do not fit in 32 bits: the rows of a case, or the pages of its cache, are behind many others.

A plan has the entry ``layout: far``. Its inputs are those of the dense plan, and so is what is expected of them; what a
kernel is called with is made of them (`sandbox.far_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.plans import row_axis
from flashinfer_trace.sandbox.far_rows import FarRows

#: Elements before the first row of a case: an offset is beyond a signed number of 32 bits.
FAR_ELEMENTS = 1 << 31
#: Axes of caches, and of rows that others point to -> inputs that hold places in them.
PLACES: Mapping[str, tuple[str, ...]] = {
    "num_pages": ("kv_indices", "page_table", "sparse_indices", "out_cache_loc"),
    "num_slots": ("kv_indices", "indices", "loc", "out_loc", "slots"),
    "num_rows": ("permutation", "src2dst", "dst2src_map"),
    "pool_size": ("state_indices", "initial_state_indices"),
    "state_cache_size": ("state_batch_indices",),
    "num_states": ("conv_state_indices", "cache_indices"),
}
#: Index inputs that count tokens of pages.
OF_TOKENS = ("sparse_indices", "out_cache_loc")
#: Offsets of groups of rows, the first of which gains the rows before all others.
GROUPS = "expert_offsets"
#: Keys of ragged requests, their offsets, and those of queries. One more request comes first, with one query.
KEYS, KEY_OFFSETS, QUERY_OFFSETS = "total_kv", "kv_indptr", "qo_indptr"
#: Variable axes of tables that rows look up.
LOOKED_UP = {"max_seq_len"}
#: More rows than any program has at once, outside of caches: narrower ones have no such case.
MOST_ROWS, ROWS = 1 << 20, "num_rows"


def far_axis(definition: Definition) -> str | None:
    """The axis that has many others before a case's own: that of a cache, or of keys of ragged requests; or of rows, if
    nothing else counts them. None if there is none: whole layers of experts take more memory."""
    axes, const = definition.var_axes, definition.const_axes
    caches = [axis for axis in PLACES if axis in axes and any(name in definition.inputs for name in PLACES[axis])]
    caches += [KEYS] if KEYS in axes and KEY_OFFSETS in definition.inputs else []
    row = row_axis(definition)
    by_row = all((spec.shape or ("",))[0] == row for spec in definition.outputs.values())
    alone = by_row and {row, *LOOKED_UP} >= set(axes) and "num_local_experts" not in const
    axis = caches[0] if caches else row if alone else None
    shapes = [spec.shape or () for spec in (*definition.inputs.values(), *definition.outputs.values())]
    return axis if axis is not None and all(axis not in shape[1:] for shape in shapes) else None


def rows_before(definition: Definition) -> int:
    """The minimum number of rows before a case's own; 0 without such a case."""
    axis = far_axis(definition)
    if axis is None:
        return 0
    one = dict.fromkeys(definition.var_axes, 1)
    shapes = {**definition.input_shapes(one), **definition.output_shapes(one)}
    specs = {**definition.inputs, **definition.outputs}
    widest = max(math.prod(shapes[name] or ()) for name, spec in specs.items() if spec.shape and spec.shape[0] == axis)
    rows = -(-FAR_ELEMENTS // widest)
    return rows if axis in {*PLACES, KEYS} - {ROWS} or rows <= MOST_ROWS else 0


def far_rows(definition: Definition) -> FarRows:
    """Which tensors have rows before those of a case, if `rows_before` is not 0."""
    axis, rows = far_axis(definition), rows_before(definition)
    assert axis is not None
    inputs, outputs = (
        {name: rows for name, spec in specs.items() if spec.shape and spec.shape[0] == axis}
        for specs in (definition.inputs, definition.outputs)
    )
    if axis == KEYS:
        queries = {name for name, spec in definition.inputs.items() if spec.shape and spec.shape[0] == "total_q"}
        first = dict.fromkeys(queries, 1)
        answered = dict.fromkeys(definition.outputs, 1)
        return FarRows({**inputs, **first}, answered, requests={KEY_OFFSETS: rows, QUERY_OFFSETS: 1})
    offsets = {GROUPS: rows} if GROUPS in definition.inputs else {}
    page = definition.const_axes.get("page_size", 1)
    named = [name for name in PLACES.get(axis, ()) if name in definition.inputs]
    return FarRows(inputs, outputs, {name: rows * (page if name in OF_TOKENS else 1) for name in named}, offsets)
