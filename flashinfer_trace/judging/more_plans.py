"""Cases of a judgment, with plans beyond those that verify references and known kernels: more requests and rows.

A family's draws are sized for verifying hundreds of references. A judgment has time for more: it has one kernel.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator

from flashinfer_trace.families.attention.cases import EDGES, distinct_pages, products_of_a_key
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.cases import Case, cases
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.layouts import LAYOUT
from flashinfer_trace.harness.plans import BEYOND_1024, NO_LIMIT, row_axis
from flashinfer_trace.verdict.tensors import torch_dtype

#: How many short requests attention has at once, where plans have 16 at most, and corners on a CPU some 70: more than
#: the 256 that servers often decode at once, or than 128 on a CPU if one query has more than WIDE products with a key.
REQUESTS, FEWER_REQUESTS, WIDE = (257, 400), (129, 160), 2**16
#: The most queries that each of them has, and the most keys in addition to those of its queries.
FEW_QUERIES, FEW_KEYS = 2, 6
#: Keys of attention's long requests, at the edges of tiles of 64 and of pages, and beyond 1,024; how many pages they
#: share. Their logits are those of `EDGES`.
KEYS, SHARED = (191, 347, 256, 129, 1026), 2
#: Their queries: one request has two tiles of 128 and a rest, after 37 keys of its own.
QUERIES = (1, 310, 17, 3, 2)
#: Requests with one query each: more of them are long, because each meets a few edges only; all edges with six heads.
MORE_KEYS = (1200, 1300, 2100, 1500, 1100)
#: Those on a GPU: a chunk of a prompt, with fewer keys where the products are more than take a second.
GPU_KEYS, GPU_QUERIES, GPU_PRODUCTS = (191, 16384, 256, 9001, 1026), (1, 2000, 17, 3, 2), 2**40
FEWER_GPU_KEYS = (191, 2300, 256, 9001, 1026)
#: Rows of further cases, beyond those that are drawn on a CPU, of DRAWN_ROWS at most: a number in FEW_ROWS, whole
#: tiles, one of THRESHOLDS, at which libraries change kernels, BEYOND, and a number that is drawn.
DRAWN_ROWS, FEW_ROWS, TILES, BEYOND = 40, (41, 63), (64, 128, 256, 512, 1024), 2100
THRESHOLDS = (96, 160, 192, 224, 384)
#: On a CPU: as many as have inputs and outputs of CPU_BYTES, and not more than CPU_WORK bytes of weights and rows
#: multiplied, which takes about a second; all of them together CASES times as much.
CPU_BYTES, CPU_WORK, CASES = 48 * 2**20, 2**31, 2
#: Rows of a further case on a GPU: as many as prefill has, or FEWER_GPU_ROWS if nobody knows how much a row takes.
#: Fewer if inputs and outputs have more than GPU_BYTES, or weights and rows multiplied more than GPU_WORK bytes, but
#: LEAST_GPU_ROWS if only those are more.
GPU_ROWS, FEWER_GPU_ROWS, LEAST_GPU_ROWS = (8192, 8320), (1025, 2500), 1025
GPU_BYTES, GPU_WORK = 2**30, 2**40
#: Axes that count what rows are copied to, and, where rows do not list the best ones, keys: so many for each row.
COPIES, KEYS_A_ROW = 2, 4


def judged_cases(job: Job, seed: int, missing: Callable[[], int]) -> Iterator[Case]:
    """The cases of a judgment, with elements that nobody knows before; see `cases`."""
    numbers = random.Random(seed)
    return cases(job, seed, missing, numbers, _larger_plans(job, numbers))


def longer_plans(job: Job) -> list[Plan]:
    """A few plans for sizes at which a case takes about a second: rows as they are served, then the first corners."""
    definition, axis = job.sized, row_axis(job.sized)
    served = job.family.plan_for_axes(definition, {axis: DRAWN_ROWS} if axis else {}, Draws(0, "cpu"))
    return [served, *job.corners[:1]]


def _larger_plans(job: Job, numbers: random.Random) -> list[Plan]:
    """Attention of many requests, and of long ones; numbers of rows that plans of the family have not."""
    corner = next((plan for plan in reversed(job.corners) if "kv_lens" in plan), None)
    if corner is None:
        return _plans_of_rows(job, numbers)
    return [_many_requests(job, corner, numbers), _long_requests(job, corner)]


def _many_requests(job: Job, corner: Plan, numbers: random.Random) -> Plan:
    """Hundreds of requests: a kernel may be right for as many as a block or a CUDA graph of a server holds."""
    wide = not job.large and products_of_a_key(job.sized) > WIDE
    count = numbers.randint(*(FEWER_REQUESTS if wide else REQUESTS))
    q_lens = [numbers.randint(1, FEW_QUERIES if "q_lens" in corner else 1) for _ in range(count)]
    return _with_lengths(job, corner, [queries + numbers.randint(0, FEW_KEYS) for queries in q_lens], q_lens)


def _long_requests(job: Job, corner: Plan) -> Plan:
    """Requests that are longer than those that are drawn, share their first pages, and have many queries; peaks are at
    the last keys and at edges of tiles. If a cache has no keys of these queries, its own are at the edges."""
    keys, queries = (GPU_KEYS, GPU_QUERIES) if job.large else (KEYS, QUERIES)
    kv_lens, q_lens = list(keys), list(queries)
    if job.large and sum(map(operator.mul, keys, queries)) * products_of_a_key(job.sized) > GPU_PRODUCTS:
        kv_lens = list(FEWER_GPU_KEYS)
    if "q_lens" not in corner:
        kv_lens = [*keys, *MORE_KEYS]
        q_lens = [1] * len(kv_lens)
    beside = q_lens if "num_slots" in corner else [0] * len(kv_lens)
    return {**_with_lengths(job, corner, list(map(operator.add, kv_lens, beside)), q_lens, SHARED), "logits": EDGES}


def _with_lengths(job: Job, corner: Plan, kv_lens: list[int], q_lens: list[int], shared: int = 0) -> Plan:
    """The plan of a corner with normal logits and requests of other lengths, which have their first `shared` pages in
    common."""
    usual = {entry: value for entry, value in corner.items() if entry != LAYOUT}
    plan = {**usual, "kv_lens": kv_lens, "logits": "normal"}
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
    if axis is None or not (job.family.plan.many_rows or job.large):
        return []
    low, high = limits.pop(axis, (0, NO_LIMIT))
    if job.request.plan_options is not None or any(most < NO_LIMIT for _, most in limits.values()):
        return []
    one, two = (_bytes(definition, axis, rows) for rows in (1, 2))
    a_row = max(1, two - one)
    weights = max(1, one - a_row)
    many = job.family.plan.many_rows
    # Otherwise rows may have a state, or keys, that the estimate misses.
    known = {axis, "padded_m", "num_copies"} if job.large else {axis}
    alone = known >= set(definition.var_axes) or many >= BEYOND_1024
    if job.large:
        experts = definition.const_axes.get("num_experts", 1)
        weights = max(1, weights * min(definition.const_axes.get("top_k", experts), experts) // experts)
        rows_of_gpu = numbers.randint(*(GPU_ROWS if alone else FEWER_GPU_ROWS))
        most = min(rows_of_gpu, max(LEAST_GPU_ROWS, GPU_WORK // weights), GPU_BYTES // a_row, high)
        rows = [most, numbers.randint(*FEW_ROWS), *numbers.sample((*TILES, *THRESHOLDS), 2)]
    else:
        most = min(max(BEYOND, many) if alone else many, high, CPU_BYTES // a_row, CPU_WORK // weights)
        threshold = numbers.choice([count for count in THRESHOLDS if count <= most] or THRESHOLDS)
        own = [numbers.randint(DRAWN_ROWS + 1, most)] if most > DRAWN_ROWS else []
        rows = [TILES[0], *own, numbers.randint(*FEW_ROWS), *TILES[1:], threshold, BEYOND]
    left = len(rows) * most if job.large else CASES * CPU_WORK // weights
    chosen = []
    for count in rows:
        if max(low, DRAWN_ROWS + 1) <= count <= min(most, left):
            chosen.append(count)
            left -= count
    plan_for, draws = job.family.plan_for_axes, Draws(0, "cpu")
    return [plan_for(definition, {axis: count, **_beside(job, count)}, draws) for count in chosen]


def _beside(job: Job, rows: int) -> dict[str, int]:
    """The values of the other variable axes next to so many rows, where a plan would have few."""
    axes, const = job.sized.var_axes, job.sized.const_axes
    keys = "num_keys" in axes and "top_k" not in const and not job.large
    return {
        **({"num_copies": COPIES * rows} if "num_copies" in axes else {}),
        **({"num_keys": KEYS_A_ROW * rows} if keys else {}),
    }


def _bytes(definition: Definition, axis: str, rows: int) -> int:
    axes = {**dict.fromkeys(definition.var_axes, 1), axis: rows}
    shapes = {**definition.input_shapes(axes), **definition.output_shapes(axes)}
    specs = {**definition.inputs, **definition.outputs}
    return sum(math.prod(shape) * torch_dtype(specs[name].dtype).itemsize for name, shape in shapes.items() if shape)
