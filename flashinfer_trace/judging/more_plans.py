"""Cases of a judgment, with plans beyond those that verify references and known kernels: more requests and rows.

What a family draws is chosen for the time that it takes to verify hundreds of references. A judgement is of one kernel.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator

from flashinfer_trace.families.attention.cases import products_of_a_key
from flashinfer_trace.families.attention.paged import distinct_pages
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.cases import Case, cases
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.plans import NO_LIMIT, row_axis
from flashinfer_trace.verdict.tensors import torch_dtype

__all__ = ["judged_cases"]

#: How many short requests attention has at once, where plans have 16 at most, and corners on a CPU some 70: more than
#: the 256 that servers often decode at once, or than 128 on a CPU if one query has more than WIDE products with a key.
REQUESTS, FEWER_REQUESTS, WIDE = (257, 400), (129, 160), 2**16
#: The most queries that each of them has, and the most keys beside those of its queries.
FEW_QUERIES, FEW_KEYS = 2, 6
#: Keys of attention's long requests, at the edges of tiles of 64 and of pages; how many pages they share.
KEYS, SHARED = (191, 129, 256), 2
#: Their queries, and fewer where products of these with the keys are more than take some tenths of a second.
QUERIES, FEWER, PRODUCTS = (1, 70, 17), (1, 17, 2), 2**28
#: Rows of further cases on a CPU, beyond those that are drawn, of DRAWN_ROWS at most: whole tiles, and a number of rows
#: that is drawn. As many as have inputs and outputs of CPU_BYTES, and not more than CPU_WORK bytes of weights and rows
#: multiplied, which takes about a second.
TILES, DRAWN_ROWS, CPU_BYTES, CPU_WORK = (64, 128), 40, 48 * 2**20, 2**31
#: Rows of a further case on a GPU, where plans of some families have a dozen at most, and prefill has thousands; fewer
#: if inputs and outputs of so many have more than GPU_BYTES.
GPU_ROWS, GPU_BYTES = (1025, 2500), 2**28
#: Axes that count what rows are copied to, and, where rows do not list the best ones, keys: so many for each row.
COPIES, KEYS_A_ROW = 2, 4


def judged_cases(job: Job, seed: int, missing: Callable[[], int]) -> Iterator[Case]:
    """The cases of a judgment, with elements that nobody knows before; see `cases`."""
    numbers = random.Random(seed)
    return cases(job, seed, missing, numbers, _larger_plans(job, numbers))


def _larger_plans(job: Job, numbers: random.Random) -> list[Plan]:
    """Attention of many requests, and of long ones; numbers of rows that plans of the family have not."""
    corner = next((plan for plan in reversed(job.corners) if "kv_lens" in plan), None)
    if corner is None:
        return _plans_of_rows(job, numbers)
    return [_many_requests(job, corner, numbers), *([] if job.large else [_long_requests(job, corner)])]


def _many_requests(job: Job, corner: Plan, numbers: random.Random) -> Plan:
    """Hundreds of requests: a kernel may be right for as many as a block or a CUDA graph of a server holds."""
    wide = not job.large and products_of_a_key(job.sized) > WIDE
    count = numbers.randint(*(FEWER_REQUESTS if wide else REQUESTS))
    q_lens = [numbers.randint(1, FEW_QUERIES if "q_lens" in corner else 1) for _ in range(count)]
    return _with_lengths(job, corner, [queries + numbers.randint(0, FEW_KEYS) for queries in q_lens], q_lens)


def _long_requests(job: Job, corner: Plan) -> Plan:
    """For a CPU, three requests that are longer than those that are drawn there (up to 40 keys and 12 queries), share
    their first pages, and have many queries. If a cache has no keys of these queries, its own are at the edges."""
    q_lens = list(QUERIES)
    if sum(map(operator.mul, q_lens, KEYS)) * products_of_a_key(job.sized) > PRODUCTS:
        q_lens = list(FEWER)
    beside = q_lens if "num_slots" in corner else [0] * len(KEYS)
    return _with_lengths(job, corner, list(map(operator.add, KEYS, beside)), q_lens, SHARED)


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


def _plans_of_rows(job: Job, numbers: random.Random) -> list[Plan]:
    """Plans of more rows than a family draws; none for a kernel that limits more than its rows."""
    definition, limits = job.sized, dict(job.request.limits)
    axis = row_axis(definition)
    if not job.family.plan.many_rows or axis is None:
        return []
    low, high = limits.pop(axis, (0, NO_LIMIT))
    if job.request.plan_options is not None or any(most < NO_LIMIT for _, most in limits.values()):
        return []
    one, two = (_bytes(definition, axis, rows) for rows in (1, 2))
    a_row = max(1, two - one)
    if job.large:
        most = min(numbers.randint(*GPU_ROWS), high, GPU_BYTES // a_row)
        rows = [most]
    else:
        most = min(job.family.plan.many_rows, high, CPU_BYTES // a_row, CPU_WORK // max(1, one - a_row))
        rows = [*TILES, numbers.randint(DRAWN_ROWS + 1, most)] if most > DRAWN_ROWS else []
    chosen = [count for count in rows if max(low, DRAWN_ROWS + 1) <= count <= most]
    plan_for, draws = job.family.plan_for_axes, Draws(0, "cpu")
    return [plan_for(definition, {axis: count, **_beside(job, count)}, draws) for count in chosen]


def _beside(job: Job, rows: int) -> dict[str, int]:
    """What other variable axes count beside so many rows, where a plan would have few."""
    axes, const = job.sized.var_axes, job.sized.const_axes
    keys = "num_keys" in axes and "top_k" not in const and not job.large
    return {
        **({"num_copies": COPIES * rows} if "num_copies" in axes else {}),
        **({"num_keys": KEYS_A_ROW * rows} if keys else {}),
    }


def _bytes(definition: Definition, axis: str, rows: int) -> int:
    """Memory of the inputs and outputs with so many rows, estimated."""
    axes = {**dict.fromkeys(definition.var_axes, 1), axis: rows}
    shapes = {**definition.input_shapes(axes), **definition.output_shapes(axes)}
    specs = {**definition.inputs, **definition.outputs}
    return sum(math.prod(shape) * torch_dtype(specs[name].dtype).itemsize for name, shape in shapes.items() if shape)
