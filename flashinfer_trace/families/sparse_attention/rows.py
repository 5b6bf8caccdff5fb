"""Plans of the indexer's top-k, and the inputs made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr, sizes

#: ``ties``: nine values; ``close``: all in 1 to 1.2; ``minute``: below float16's range; ``equal``: one value a row.
VALUES = ("normal", "large", "ties", "close", "minute", "equal")
#: Those that put many scores into one bin of the kernels, and how many such scores a row may have there.
CROWDED, ROOM = ("close", "minute"), 4096
#: Keys of a long row, of a corner only, and where its keys begin among those of all sequences, at least.
LONG, FAR = 140_000, 1 << 17
STARTS = ("zero", "random", "packed")
#: Larger than any score: a column that is not one of the row's keys, but is taken for one, is listed.
OUTSIDE = 1e9


@dataclass(frozen=True)
class Rows:
    """The inputs that a kernel accepts.

    Attributes:
        crowded: rows with more than ROOM scores that have the upper bits of their float16 form in common.
        decode: only one row a sequence, which starts at 0.
        idle: more sequences than rows; without it, some may still have no row.
    """

    crowded: bool = True
    decode: bool = False
    idle: bool = True


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    """Lengths around top_k and up to 16 times it; rows are dealt to sequences."""
    options = request.options_of(Rows)
    top_k = request.definition.const_axes["top_k"]
    low, high = request.range("num_tokens", 0, 16, 32)
    longest = top_k * (16 if request.large else 6)
    length = st.one_of(sizes(0, 2 * top_k), sizes(0, longest), st.just(longest))
    rows = st.integers(1, 1) if options.decode else st.integers(0, 6)
    return st.fixed_dictionaries(
        {
            "lengths": st.lists(length, min_size=low, max_size=high),
            "rows": st.lists(rows, min_size=1, max_size=high),
            "starts": st.just("zero") if options.decode else st.sampled_from(STARTS),
            "values": st.sampled_from(VALUES),
            "slack": st.integers(0, 3),
        }
    ).map(lambda plan: fitted(plan, options))


def fitted(plan: Plan, options: Rows) -> Plan:
    """The plan with as many rows dealt to sequences as it has, and with lengths that the kernel takes."""
    lengths = [min(length, ROOM) for length in plan["lengths"]] if plan["values"] in CROWDED else plan["lengths"]
    return {
        **plan,
        "lengths": plan["lengths"] if options.crowded else lengths,
        "rows": dealt(plan["rows"], len(lengths), options),
    }


def dealt(rows: list[int], total: int, options: Rows) -> list[int]:
    """How many rows each sequence has: those given, until `total` are dealt; the last sequence has the rest."""
    if options.decode:
        return [1] * total
    found: list[int] = []
    for count in rows if options.idle else rows[: max(0, total - 1)]:
        found.append(min(count, total - sum(found)))
    return [*found, total - sum(found)]


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    count = axes.get("num_tokens", 4)
    keys = axes.get("num_keys", axes.get("max_seq_len", 4 * definition.const_axes["top_k"]))
    sequences = axes.get("batch_size", axes.get("len_indptr", 2) - 1)
    share = [count // sequences] * sequences if sequences else []
    rows = [count - sum(share[1:]), *share[1:]] if share else []
    return {
        "lengths": [keys] * count,
        "rows": rows,
        "starts": "zero",
        "values": "normal",
        "slack": 0 if count else keys,
    }


def corners(request: PlanRequest) -> list[Plan]:
    """Rows of exactly top_k keys, one fewer and one more; ties and equal scores in a longer one; many rows. On a CPU,
    also scores that float16 and masks of -1e30 do not tell apart, whose last key is in the last column, and a row of
    more keys than 16 bits can number."""
    options = request.options_of(Rows)
    top_k = request.definition.const_axes["top_k"]
    around = [top_k - 1, top_k, top_k + 1, 3 * top_k]
    plan = {"lengths": around, "rows": [1, 0, 2, 1], "starts": "zero", "values": "normal", "slack": 1}
    found = [{**plan, "values": values} for values in ("normal", "ties", "equal", "close")]
    if not options.decode:
        found += [{**plan, "starts": start} for start in ("random", "packed")]
    if not request.large:
        found += [{**plan, "values": "lowest", "slack": 0}, {**plan, "lengths": [LONG], "rows": [1], "slack": 0}]
    return [fitted(each, options) for each in found]


def draw_scores(values: str, shape: tuple[int, int], draws: Draws) -> torch.Tensor:
    if values == "equal":
        return draws.normal([shape[0], 1]).expand(shape).contiguous()
    if values == "ties":
        return draws.values(shape, torch.float32, "integers")
    if values == "lowest":
        return draws.uniform(shape, -1.001e38, -1e38)
    if values == "close":
        return draws.uniform(shape, 1.0, 1.2)
    return draws.values(shape, torch.float32, values)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    device, lengths, count = draws.device, plan["lengths"], len(plan["lengths"])
    span = 3 * definition.const_axes["top_k"] if plan["starts"] == "random" else 0
    starts = draws.host_integers(count, 0, span)
    if plan["starts"] == "packed":
        # As in prefill: the keys of one sequence after the other, and all rows of a sequence start together.
        starts = [start for start, rows in zip(packed(plan), plan["rows"], strict=True) for _ in range(rows)]
    columns = max((start + length for start, length in zip(starts, lengths, strict=True)), default=0) + plan["slack"]

    def tensor(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    first, own = tensor(starts), tensor(lengths)
    column = torch.arange(columns, device=device)
    key = (column >= first[:, None]) & (column < (first + own)[:, None])
    scores = draw_scores(plan["values"], (count, columns), draws)
    inputs: dict[str, Any] = {
        "scores": torch.where(key, scores, OUTSIDE),
        "lengths": own,
        "topk_indices_offset": draws.integers([count], 0, 1000, torch.int32) + (FAR if LONG in lengths else 0),
        "cu_seqlens_q": indptr(plan["rows"], device),
        "row_starts": first,
    }
    if "page_table" in definition.inputs:
        inputs["page_table"] = page_table(len(plan["rows"]), max(lengths, default=0) + plan["slack"], draws)
    return {name: inputs[name] for name in definition.inputs}


def packed(plan: Plan) -> list[int]:
    """Where the keys of each sequence begin: after the longest row of each sequence before."""
    starts, row = [0], 0
    for rows in plan["rows"]:
        starts.append(starts[-1] + max(plan["lengths"][row : row + rows], default=0))
        row += rows
    return starts[:-1]


def page_table(sequences: int, width: int, draws: Draws) -> torch.Tensor:
    """int32 [sequences, width]: distinct slots of a cache of twice as many, in any order; sequences share slots."""
    pool = 2 * width
    rows = [draws.permutation(pool)[:width] for _ in range(sequences)]
    return torch.stack(rows).to(torch.int32) if rows else torch.zeros(0, width, dtype=torch.int32, device=draws.device)
