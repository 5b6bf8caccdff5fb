"""Plans of a judgement beyond those that verify references and known kernels: more requests and rows.

What a family draws is chosen for the time that it takes to verify hundreds of references. A submission has one.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Mapping
from dataclasses import replace

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.attention.cases import products_of_a_key
from flashinfer_trace.families.attention.paged import distinct_pages
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.inputs import Draws, torch_dtype
from flashinfer_trace.harness.many_rows import ROW_AXES, UNLIMITED, many_rows
from flashinfer_trace.harness.verify import Job

__all__ = ["further_plans"]

#: How many short requests attention has at once, where plans have 16 at most, and corners on a CPU some 70: more than
#: the 256 that servers often decode at once, or than 128 on a CPU if one query has more than WIDE products with a key.
REQUESTS, FEWER_REQUESTS, WIDE = (257, 400), (129, 160), 2**16
#: The most queries that each of them has, and the most keys beside those of its queries.
FEW_QUERIES, FEW_KEYS = 2, 6
#: A few times as many keys have attention's long requests; how many slots they share.
KEYS, SHARED = 64, 2
#: Their queries, and fewer where products of these with the keys are more than take some tenths of a second.
QUERIES, FEWER, PRODUCTS = [1, 70, 17], [1, 17, 2], 2**28
#: Rows of further cases on a CPU, between those that are drawn, of DRAWN_ROWS at most, and the corner of many rows:
#: whole tiles, and a number of rows that is drawn.
TILES, DRAWN_ROWS = (64, 128), 40
#: Rows of a further case on a GPU, where plans of some families have a dozen at most, and prefill has thousands; fewer
#: if inputs and outputs of so many have more than GPU_BYTES.
GPU_ROWS, GPU_BYTES = (1025, 2500), 2**28


def further_plans(job: Job, numbers: random.Random) -> list[Plan]:
    """Attention of many requests, and of long ones; numbers of rows that plans of the family have not."""
    return [*_requests(job, numbers), *(_rows_on_a_gpu(job, numbers) if job.large else _rows_between(job, numbers))]


def _requests(job: Job, numbers: random.Random) -> list[Plan]:
    """Attention of many requests, and of long ones; none of other kernels."""
    corner = next((plan for plan in reversed(job.corners) if "kv_lens" in plan), None)
    return [] if corner is None else [_many_requests(job, corner, numbers), *_long_requests(job, corner)]


def _many_requests(job: Job, corner: Plan, numbers: random.Random) -> Plan:
    """Hundreds of requests: a kernel may be right for as many as a block or a CUDA graph of a server holds."""
    wide = not job.large and products_of_a_key(job.sized) > WIDE
    count = numbers.randint(*(FEWER_REQUESTS if wide else REQUESTS))
    q_lens = [numbers.randint(1, FEW_QUERIES if "q_lens" in corner else 1) for _ in range(count)]
    return _with_lengths(job, corner, [queries + numbers.randint(0, FEW_KEYS) for queries in q_lens], q_lens)


def _long_requests(job: Job, corner: Plan) -> list[Plan]:
    """On a CPU, three requests that are longer than those that are drawn there (up to 40 keys and 12 queries), share
    their first slots, and have many queries; none if a corner of the family has requests that share pages, as those
    with pages of several tokens have."""
    if job.large or any(plan.get("shared_prefix") for plan in job.corners):
        return []
    kv_lens, q_lens = [3 * KEYS + 5, 2 * KEYS + 1, 4 * KEYS], QUERIES
    if sum(map(operator.mul, q_lens, kv_lens)) * products_of_a_key(job.sized) > PRODUCTS:
        q_lens = FEWER
    return [_with_lengths(job, corner, kv_lens, q_lens, SHARED)]


def _with_lengths(job: Job, corner: Plan, kv_lens: list[int], q_lens: list[int], shared: int = 0) -> Plan:
    """The plan of a corner with normal logits and requests of other lengths, which have their first `shared` pages in
    common."""
    plan = {**corner, "kv_lens": kv_lens, "logits": "normal"}
    plan |= {"q_lens": q_lens} if "q_lens" in plan else {}
    page_size = job.sized.const_axes.get("page_size", 1)
    cached = list(map(operator.sub, kv_lens, q_lens))
    for entry, lengths in (("num_pages", kv_lens), ("num_slots", cached)):
        if entry in plan:
            plan |= {"shared_prefix": shared, entry: distinct_pages(lengths, page_size, shared) + 1}
    return plan


def _rows_between(job: Job, numbers: random.Random) -> list[Plan]:
    """On a CPU, plans of numbers of rows that are neither drawn there nor those of a corner; none for a family without
    the corner of many rows."""
    found = []
    for axes in many_rows(replace(job.family, plan_for_axes=_axes), job.request):
        axis = next(axis for axis in ROW_AXES if axis in axes)
        low, _ = job.request.limits.get(axis, (0, axes[axis]))
        rows = [one for one in (*TILES, numbers.randint(DRAWN_ROWS + 1, axes[axis])) if low <= one]
        found += [job.family.plan_for_axes(job.sized, {axis: one}, Draws(0, "cpu")) for one in rows]
    return found


def _axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    """For a plan, the values of axes that it would be for."""
    return dict(axes)


def _rows_on_a_gpu(job: Job, numbers: random.Random) -> list[Plan]:
    """On a GPU, one plan of more rows than many families draw; none for a kernel that limits more than its rows."""
    definition, limits = job.sized, dict(job.request.limits)
    axis = next((axis for axis in ROW_AXES if axis in definition.var_axes), None)
    if not job.family.many_rows or axis is None or "len_indptr" in definition.var_axes:
        return []
    _, high = limits.pop(axis, (0, UNLIMITED))
    if job.request.plan_options is not None or any(most < UNLIMITED for _, most in limits.values()):
        return []
    one, two = (_bytes(definition, axis, rows) for rows in (1, 2))
    rows = min(numbers.randint(*GPU_ROWS), high, GPU_BYTES // max(1, two - one))
    beside = {"num_copies": 2 * rows} if "num_copies" in definition.var_axes else {}
    return [job.family.plan_for_axes(definition, {axis: rows, **beside}, Draws(0, "cpu"))] if rows > DRAWN_ROWS else []


def _bytes(definition: Definition, axis: str, rows: int) -> int:
    """Memory of the inputs and outputs with so many rows, estimated."""
    axes = {**dict.fromkeys(definition.var_axes, 1), axis: rows}
    shapes = {**definition.input_shapes(axes), **definition.output_shapes(axes)}
    specs = {**definition.inputs, **definition.outputs}
    return sum(math.prod(shape) * torch_dtype(specs[name].dtype).itemsize for name, shape in shapes.items() if shape)
