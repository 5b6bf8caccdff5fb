"""Cases of hundreds of rows and of one row on a CPU, for every family whose rows are counted by one axis.

Plans draw dozens of rows at most, and one row only by chance, which is what decoding for a single user has. A kernel
that is right up to its first tile of rows, or up to position 4095, is right in every case that is drawn there.
Families of attention, whose requests have lengths, have corners of their own (`families.attention.cases`).
"""

from __future__ import annotations

import math

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.family import Family, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, torch_dtype

__all__ = ["BEYOND_1024", "ROW_AXES", "many_rows", "one_row"]

#: The `many_rows` of families whose rows are cheap: a kernel may be right up to a block or a grid of 1024.
BEYOND_1024 = 1100

#: Axes that count tokens or rows; of a Definition the first one that it has.
ROW_AXES = ("num_tokens", "m", "M", "seq_len", "total_rows", "num_rows", "batch_size")
#: Axis of a cache -> how many positions or slots it has: more than the 4096 that are drawn, and than 16 bits count.
POSITIONS = dict.fromkeys(("max_seq_len", "num_slots"), 70_000)
#: Fewer rows than this show no more than what is drawn.
FEWEST = 100
#: The memory of inputs up to which a case takes about 0.2 seconds.
BYTES = 10 * 2**20
#: What other variable axes count, where the memory is estimated.
OTHERS = 8
#: A limit from which on it is none.
UNLIMITED = 1 << 20


def one_row(family: Family, request: PlanRequest) -> list[Plan]:
    """One plan of one row, or of one request with one query; none on a GPU, for a kernel, or where plans have lengths
    of queries."""
    definition = request.definition
    axis = next((axis for axis in ROW_AXES if axis in definition.var_axes), None)
    if request.large or request.limits or request.plan_options is not None:
        return []
    if not family.many_rows or axis is None or "qo_indptr" in definition.inputs:
        return []
    return [family.plan_for_axes(definition, {axis: 1}, Draws(0, "cpu"))]


def many_rows(family: Family, request: PlanRequest) -> list[Plan]:
    """One plan of `family.many_rows` rows, or of as many as fit into `BYTES`; none on a GPU, where plans draw more.

    None either for a kernel with options or with limits of other axes, which the plan may not keep, and where requests
    are given by offsets.
    """
    definition = request.definition
    axes = definition.var_axes
    axis = next((axis for axis in ROW_AXES if axis in axes), None)
    if request.large or not family.many_rows or axis is None or "len_indptr" in axes:
        return []
    low, high = request.limits.get(axis, (0, UNLIMITED))
    others = [most for name, (_, most) in request.limits.items() if name != axis]
    if request.plan_options is not None or any(most < UNLIMITED for most in others):
        return []
    one, two = (input_bytes(definition, axis, rows) for rows in (1, 2))
    rows = min(family.many_rows, high, (BYTES - one) // max(1, two - one))
    if rows < max(FEWEST, low):
        return []
    beside = {**POSITIONS, "num_copies": 2 * rows}
    given = {axis: rows, **{name: count for name, count in beside.items() if name in axes}}
    return [family.plan_for_axes(definition, given, Draws(0, "cpu"))]


def input_bytes(definition: Definition, axis: str, rows: int) -> int:
    """Memory of the inputs with so many rows, estimated."""
    shapes = definition.input_shapes({**dict.fromkeys(definition.var_axes, OTHERS), axis: rows})
    return sum(
        math.prod(shape) * torch_dtype(definition.inputs[name].dtype).itemsize
        for name, shape in shapes.items()
        if shape
    )
