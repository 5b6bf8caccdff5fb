"""Metadata of a batch: positions, tables of slots, and pages that the allocator gives out. Integers, exact.

All kernels launch a program for each request, so none takes an empty batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, KernelCall, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr, sizes
from flashinfer_trace.harness.plans import Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import Exact, Expected

LAUNCHABLE = {"batch_size": (1, 1 << 16)}
#: The most tokens of a request and the most requests, on a CPU and on a GPU.
LONGEST, REQUESTS = (40, 2000), (6, 64)
#: More tokens than 16 bits count, and more requests than a block has threads.
LONG, MANY = 70_000, 1100
#: Cached tokens before new ones: any number, none, or whole pages.
PREFIXES = ("any", "none", "pages")
#: Pages whose slots are beyond 32 bits, in corners.
FAR = 1 << 31
#: Axes of lists that a kernel fills up to the last token.
BUFFERS = ("num_tokens", "num_kv_indices")
SLOTS = Exact("slots, pages and positions are exact")


def page_size(definition: Definition) -> int:
    return definition.const_axes.get("page_size", 16)


def lengths_of(fewest: int, request: PlanRequest) -> st.SearchStrategy[list[int]]:
    low, high = request.range("batch_size", 0, *REQUESTS)
    return st.lists(sizes(fewest, LONGEST[request.large]), min_size=low, max_size=high)


def usual_requests(axes: Mapping[str, int]) -> int:
    return axes.get("batch_size", axes.get("len_indptr", 5) - 1)


def usual_tokens(definition: Definition, axes: Mapping[str, int]) -> int:
    return 37 * usual_requests(axes)


def usual_lengths(definition: Definition, axes: Mapping[str, int]) -> list[int]:
    count = usual_requests(axes)
    total = axes.get("num_tokens", axes.get("num_kv_indices", usual_tokens(definition, axes)))
    equal = total // (2 * max(1, count))
    ends = [
        (total - equal * count) * index * (index + 1) // (count * (count + 1)) for index in range(count + 1) if count
    ]
    return [equal + end - start for start, end in itertools.pairwise(ends)]


def corners(
    entry: str, fewest: int, counts: tuple[str, ...], others: Mapping[str, Any], request: PlanRequest
) -> list[Plan]:
    size = page_size(request.definition)
    around = [max(fewest, length) for length in (1, size - 1, size, size + 1, 0, 3 * size + 1, 2 * size)]
    plans = [around, [3, LONG, 1, 600], [fewest + index % 4 for index in range(MANY)], [1]]
    room = dict.fromkeys(counts, 9 * size)
    return (
        [{entry: lengths} for lengths in plans]
        + [{entry: around, **room}]
        + [{entry: around, name: choice} for name, choices in others.items() for choice in choices]
    )


def plan(entry: str, fewest: int, counts: tuple[str, ...], choices: Mapping[str, tuple[str, ...]]) -> RowPlans:
    drawn = Drawn(functools.partial(lengths_of, fewest), usual_lengths)
    return RowPlans(
        {name: Count(20, 100, usual=usual_tokens if name in BUFFERS else 0, corner=0) for name in counts},
        {entry: drawn, **choices},
        special=functools.partial(corners, entry, fewest, counts, choices),
        many_rows=0,
    )


class Batch:
    """The requests of a plan, and inputs made of them.

    Attributes:
        old, new, all: cached and new tokens of each request, and both; in decode all are new.
        starts: the first visible token of each.
    """

    def __init__(self, definition: Definition, plan: Plan, draws: Draws) -> None:
        self.plan, self.draws, self.page_size = plan, draws, page_size(definition)
        lengths: list[int] = plan["seq_lens"] if "seq_lens" in plan else plan["lengths"]
        order, kind = draws.permutation(len(lengths)).tolist(), plan.get("prefix", "none")
        step = self.page_size if kind == "pages" else 1
        most = 0 if kind == "none" else (40 if len(lengths) < MANY else 3) * self.page_size
        # Only their order is drawn: the sizes of inputs follow from the plan alone.
        self.new = [lengths[index] for index in order]
        self.old = [(index * 7919 + 97) % (most + 1) // step * step for index in order]
        self.all = [old + new for old, new in zip(self.old, self.new, strict=True)]
        self.starts = [index * 5 % 9 if plan.get("start") == "window" else 0 for index in order]

    def tensor(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.draws.device)

    def slots(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self.draws.integers(shape, 1, (1 << 30) - 1, dtype)

    def table(self) -> torch.Tensor:
        ends = (start + length for start, length in zip(self.starts, self.all, strict=True))
        columns = max([*ends, self.plan["max_context"], 1])
        return self.slots(max(len(self.new), self.plan["num_reqs"]), columns, dtype=torch.int32)

    def rows(self) -> torch.Tensor:
        return self.draws.permutation(max(len(self.new), self.plan["num_reqs"]))[: len(self.new)]

    def last(self) -> torch.Tensor:
        """The slot of the last token before the new ones, -1 if there is none; in decode there is one new token."""
        before = self.old if "seq_lens" in self.plan else [length - 1 for length in self.all]
        pages = self.draws.host_integers(len(before), 0, 1 << 20)
        size = self.page_size
        found = zip(pages, before, strict=True)
        return self.tensor([page * size + (length - 1) % size if length else -1 for page, length in found])

    def free(self) -> torch.Tensor:
        """Distinct pages in any order, as many as are needed and some more."""
        before = self.old if "seq_lens" in self.plan else [length - 1 for length in self.all]
        needed = sum(
            -(-length // self.page_size) + old // -self.page_size for length, old in zip(self.all, before, strict=True)
        )
        return self.draws.permutation(max(needed, self.plan["num_free"])) + (FAR if self.plan["pages"] == "far" else 1)

    def buffer(self, axis: str) -> torch.Tensor:
        """Entries of a list before it is written: as many as there are tokens, and some more."""
        dtype = torch.int32 if axis == "num_kv_indices" else torch.int64
        return self.slots(max(sum(self.new), self.plan[axis]), dtype=dtype)

    def pages(self) -> torch.Tensor:
        longest = -(-max([*self.all, 0]) // self.page_size)
        return self.slots(len(self.new), max(longest, self.plan["max_pages"]), dtype=torch.int32)


#: How each input is made.
INPUTS: dict[str, Callable[[Batch], Any]] = {
    "extend_prefix_lens": lambda batch: batch.tensor(batch.old, torch.int32),
    "extend_seq_lens": lambda batch: batch.tensor(batch.new, torch.int32),
    "prefix_lens": lambda batch: batch.tensor(batch.old if "seq_lens" in batch.plan else batch.all),
    "seq_lens": lambda batch: batch.tensor(batch.all),
    "paged_kernel_lens": lambda batch: batch.tensor(batch.all, torch.int32),
    "req_to_token": Batch.table,
    "req_pool_indices": Batch.rows,
    "kv_indptr": lambda batch: indptr(batch.all, batch.draws.device),
    "kv_start_idx": lambda batch: batch.tensor(batch.starts, torch.int32),
    "kv_indices": lambda batch: batch.pages() if "max_pages" in batch.plan else batch.buffer("num_kv_indices"),
    "positions": lambda batch: batch.buffer("num_tokens"),
    "out_indices": lambda batch: batch.buffer("num_tokens"),
    "last_loc": Batch.last,
    "free_pages": Batch.free,
    "prefix_indices": lambda batch: batch.slots(sum(batch.old)),
    "out_cache_loc": lambda batch: batch.slots(sum(batch.new)),
}


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    batch = Batch(definition, plan, draws)
    return {name: INPUTS[name](batch) for name in definition.inputs}


# Expected results: request by request, in Python.


def lists(inputs: Inputs, *names: str) -> Iterator[list[Any]]:
    return (inputs[name].tolist() for name in names)


def compute_position(definition: Definition, inputs: Inputs) -> dict[str, list[Any]]:
    old, new = lists(inputs, "extend_prefix_lens", "extend_seq_lens")
    positions: list[int] = []
    starts = []
    for first, count in zip(old, new, strict=True):
        starts.append(len(positions))
        positions += range(first, first + count)
    return {"positions_out": positions + inputs["positions"].tolist()[len(positions) :], "extend_start_loc": starts}


def clamp_position(definition: Definition, inputs: Inputs) -> dict[str, list[Any]]:
    return {"positions": [length - 1 if length > 0 else 0 for length in inputs["seq_lens"].tolist()]}


def get_last_loc(definition: Definition, inputs: Inputs) -> dict[str, list[Any]]:
    table, rows, lens = lists(inputs, "req_to_token", "req_pool_indices", "prefix_lens")
    found = zip(rows, lens, strict=True)
    return {"last_loc": [table[row][count - 1] if count else -1 for row, count in found]}


def create_flashinfer_kv_indices(definition: Definition, inputs: Inputs) -> dict[str, list[Any]]:
    table, rows, offsets, starts = lists(inputs, "req_to_token", "req_pool_indices", "kv_indptr", "kv_start_idx")
    found = []
    for request, (row, start) in enumerate(zip(rows, starts, strict=True)):
        found += table[row][start : start + offsets[request + 1] - offsets[request]]
    return {"kv_indices_out": found + inputs["kv_indices"].tolist()[len(found) :]}


def create_flashmla_kv_indices(definition: Definition, inputs: Inputs) -> dict[str, list[Any]]:
    names = ("req_to_token", "req_pool_indices", "paged_kernel_lens", "kv_indices")
    table, rows, lens, found = lists(inputs, *names)
    size = definition.const_axes["page_size"]
    for pages, row, length in zip(found, rows, lens, strict=True):
        own = [slot // size for slot in table[row][:length:size]]
        pages[: len(own)] = own
    return {"kv_indices_out": found}


def write_req_to_token_pool(definition: Definition, inputs: Inputs) -> dict[str, list[Any]]:
    names = ("req_to_token", "req_pool_indices", "prefix_lens", "seq_lens", "prefix_indices", "out_cache_loc")
    table, rows, old, lens, prefixes, slots = lists(inputs, *names)
    for row, cached, length in zip(rows, old, lens, strict=True):
        new = length - cached
        table[row][:length] = prefixes[:cached] + slots[:new]
        prefixes, slots = prefixes[cached:], slots[new:]
    return {"req_to_token_out": table}


def allocated(definition: Definition, inputs: Inputs) -> dict[str, list[Any]]:
    """Token by token: after the last slot, or at the start of the next free page."""
    lens, last, free = lists(inputs, "seq_lens", "last_loc", "free_pages")
    before = inputs["prefix_lens"].tolist() if "prefix_lens" in inputs else [length - 1 for length in lens]
    size, pages, found = definition.const_axes["page_size"], iter(free), []
    for slot, first, end in zip(last, before, lens, strict=True):
        for position in range(first, end):
            slot = slot + 1 if position % size else next(pages) * size
            found.append(slot)
    if "out_indices" not in inputs:
        return {"out_indices": found}
    return {"out_indices_out": found + inputs["out_indices"].tolist()[len(found) :]}


def expected(
    lists_of: Callable[[Definition, Inputs], dict[str, list[Any]]], definition: Definition, inputs: Inputs
) -> dict[str, Expected]:
    device = next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))
    shapes = definition.output_shapes(definition.bind_axes(inputs))
    return {
        name: Expected(torch.tensor(values, dtype=torch.int64, device=device).view(shapes[name] or ()))
        for name, values in lists_of(definition, inputs).items()
    }


# The kernels


def run_compute_position(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As its wrapper launches it, which makes room for exactly the new tokens."""
    from sglang.kernels.ops.attention.position import compute_position_kernel

    old, new, positions = inputs.values()
    compute_position_kernel[(len(new),)](positions, outputs["extend_start_loc"], old, new, has_prefix=True)
    return {**outputs, "positions_out": positions}


def run_kv_indices(blocks: int, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton

    table, rows, offsets, starts, found = inputs.values()
    grid = (len(rows), blocks) if blocks else (len(rows),)
    arguments = (table, rows, offsets.diff(), offsets, starts, found, table.shape[1])
    create_flashinfer_kv_indices_triton[grid](*arguments, TOKEN_BLOCK_PARALLEL=blocks > 0)
    return {"kv_indices_out": found}


def run_flashmla(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention import kv_indices

    table, rows, lens, pages = inputs.values()
    size = definition.const_axes["page_size"]
    grid = (len(rows), kv_indices.get_num_kv_index_blocks_flashmla(pages.shape[1], size))
    arguments = (table, rows, lens, None, pages, table.shape[1], pages.shape[1])
    kv_indices.create_flashmla_kv_indices_triton[grid](*arguments, PAGED_SIZE=size)
    return {"kv_indices_out": pages}


def run_write(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it: with the address of each request's prefix."""
    from sglang.kernels.ops.memory.common import write_req_to_token_pool_triton

    table, rows, prefixes, old, lens, slots = inputs.values()
    addresses = prefixes.data_ptr() + 8 * (old.cumsum(0) - old)
    write_req_to_token_pool_triton[(len(rows),)](
        table, rows, addresses.view(torch.uint64), old, lens, lens - old, slots, table.shape[1]
    )
    return {"req_to_token_out": table}


def run_allocator(name: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.memory import allocator

    count = len(inputs["seq_lens"])
    found = {**outputs, **inputs}["out_indices"]
    read = (value for key, value in inputs.items() if key != "out_indices")
    getattr(allocator, name)[(count,)](*read, found, 1 << (count - 1).bit_length(), definition.const_axes["page_size"])
    return dict.fromkeys(outputs, found)


def launched(path: str, call: KernelCall, variant: str = "", in_place: tuple[str, ...] = ()) -> Kernel:
    return Kernel(f"sglang.kernels.ops.{path}", call, variant, limits=LAUNCHABLE, in_place=in_place)


COMMON = "sglang.kernels.ops.memory.common"
KV_INDICES = "attention.kv_indices.create_flashinfer_kv_indices_triton"
EXTEND, PAGES = {"prefix": PREFIXES}, {"pages": ("near", "far")}
TABLE, PAGED = ("num_reqs", "max_context"), {"page_size": 4}
batch = functools.partial(Family, op_type="batch", make_inputs=make_inputs)

FAMILIES = (
    batch(
        name="compute_position",
        twin={},
        plan=plan("seq_lens", 0, ("num_tokens",), EXTEND),
        oracle=functools.partial(expected, compute_position),
        compare={"positions_out": SLOTS, "extend_start_loc": SLOTS},
        kernels=(
            launched("attention.position.compute_position_kernel", run_compute_position, in_place=("positions",)),
        ),
    ),
    batch(
        name="clamp_position",
        twin={},
        plan=plan("lengths", 0, (), {}),
        oracle=functools.partial(expected, clamp_position),
        compare={"positions": SLOTS},
        kernels=(
            calling("sglang.kernels.ops.attention.clamp_position.clamp_position_cuda", "seq_lens", limits=LAUNCHABLE),
        ),
    ),
    batch(
        name="get_last_loc",
        twin={},
        plan=plan("lengths", 0, TABLE, {}),
        oracle=functools.partial(expected, get_last_loc),
        compare={"last_loc": SLOTS},
        kernels=tuple(
            calling(f"{COMMON}.{name}", "req_to_token req_pool_indices prefix_lens", limits=LAUNCHABLE)
            for name in ("get_last_loc_triton", "get_last_loc_triton_safe")
        ),
    ),
    batch(
        name="create_flashinfer_kv_indices",
        twin={},
        plan=plan("lengths", 0, (*TABLE, "num_kv_indices"), {"start": ("first", "window")}),
        oracle=functools.partial(expected, create_flashinfer_kv_indices),
        compare={"kv_indices_out": SLOTS},
        kernels=(
            launched(KV_INDICES, functools.partial(run_kv_indices, 0), in_place=("kv_indices",)),
            launched(KV_INDICES, functools.partial(run_kv_indices, 4), "blocks of tokens in parallel", ("kv_indices",)),
        ),
    ),
    batch(
        name="create_flashmla_kv_indices",
        twin=PAGED,
        plan=plan("lengths", 0, (*TABLE, "max_pages"), {}),
        oracle=functools.partial(expected, create_flashmla_kv_indices),
        compare={"kv_indices_out": SLOTS},
        kernels=(
            launched("attention.kv_indices.create_flashmla_kv_indices_triton", run_flashmla, in_place=("kv_indices",)),
        ),
    ),
    batch(
        name="write_req_to_token_pool",
        twin={},
        plan=plan("seq_lens", 0, TABLE, EXTEND),
        oracle=functools.partial(expected, write_req_to_token_pool),
        compare={"req_to_token_out": SLOTS},
        kernels=(launched("memory.common.write_req_to_token_pool_triton", run_write, in_place=("req_to_token",)),),
    ),
    batch(
        name="alloc_extend",
        twin=PAGED,
        plan=plan("seq_lens", 0, ("num_free", "num_tokens"), {**EXTEND, **PAGES}),
        oracle=functools.partial(expected, allocated),
        compare={"out_indices_out": SLOTS},
        kernels=(
            launched(
                "memory.allocator.alloc_extend_kernel",
                functools.partial(run_allocator, "alloc_extend_kernel"),
                in_place=("out_indices",),
            ),
        ),
    ),
    batch(
        name="alloc_decode",
        twin=PAGED,
        plan=plan("lengths", 1, ("num_free",), PAGES),
        oracle=functools.partial(expected, allocated),
        compare={"out_indices": SLOTS},
        kernels=(
            launched("memory.allocator.alloc_decode_kernel", functools.partial(run_allocator, "alloc_decode_kernel")),
        ),
    ),
)
