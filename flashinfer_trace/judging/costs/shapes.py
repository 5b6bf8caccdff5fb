"""Costs at sizes whose inputs need much memory: only indices, lengths, offsets and routing are made in full."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer_trace.families import family_of
from flashinfer_trace.families.batch import Batch
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.judging.costs import Cost, work_of
from flashinfer_trace.judging.costs.work import cost
from flashinfer_trace.judging.user_inputs import checked_axes, explained, requested_inputs

#: Inputs up to this size are made as they are.
SMALL = 64 << 20
#: Inputs without features are made up to this size.
MOST = 8 << 30

#: Const axes that decide which rows, pages and experts are touched; all others are features.
STRUCTURE = frozenset(
    {
        *("block_size", "n_group", "num_draft_tokens", "num_experts", "num_fused_shared_experts"),
        *("num_local_experts", "num_offsets", "num_parents", "num_selected", "num_speculative_tokens", "num_steps"),
        *("one", "page_size", "routed_top_k", "rows_per_token", "top_k", "topk", "topk_group", "vocab_size"),
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
    requests = max(1, given.get("len_indptr", 0) - 1)
    _refuse_large(thin, given, {**dict.fromkeys(thin.var_axes, 1), "batch_size": requests, **given})
    with explained(thin, given):  # lengths of another seed need about as much
        plan = family_of(thin).plan_for_axes(thin, given, Draws(0, "cpu"))
    _refuse_large(thin, given, {**planned_axes(thin, plan), **given})
    inputs = requested_inputs(thin, given, seed, "cpu")
    actual = thin.bind_axes(inputs)
    if input_bytes(definition, actual) <= SMALL:
        inputs = requested_inputs(definition, given, seed, "cpu")
        actual = definition.bind_axes(inputs)
    return cost(definition, actual, work_of(definition, inputs, actual)), actual


def _refuse_large(thin: Definition, given: Mapping[str, int], axes: Mapping[str, int]) -> None:
    """Refuses the axes that a user gave if inputs with all of these `axes` are too large."""
    least = input_bytes(thin, axes)
    if least > MOST:
        raise InputError(
            f"{thin.name}: axes {dict(given)} need {least >> 30} GiB of indices and rows, and a cost is found from "
            f"{MOST >> 30} GiB at most; give smaller sizes"
        )


def planned_axes(definition: Definition, plan: Plan) -> dict[str, int]:
    """The values that inputs of a family's plan give the variable axes; 1 for those that decide little."""
    sizes = {**definition.const_axes, **plan}
    if definition.op_type == "batch":
        sizes |= batch_axes(Batch(definition, plan, Draws(0, "cpu")))
    lengths, rows = sizes.get("lengths", sizes.get("kv_lens", [])), sizes.get("rows", [])
    tokens, drafts = sizes.get("num_tokens", sizes.get("seq_len", 0)), sizes.get("num_draft_tokens", 0)
    sequences = sizes.get("seq_lens", [])
    derived = {
        "batch_size": rows if isinstance(rows, int) else len(rows or lengths),
        "mask_size": drafts * (sum(lengths) + drafts * len(lengths)),
        "max_seq_len": max(lengths, default=0),
        "num_keys": max(lengths, default=0),
        "num_rows": tokens * sizes.get("top_k", 1),
        "num_slots": tokens + sizes.get("spare", 0),
        "num_tokens": sum(sequences) if sequences else len(lengths),
        **dict.fromkeys(("len_cu_seqlens", "len_query_start_loc"), len(sequences) + 1),
        "num_seqs": len(sequences),
        "total_seq_len": sum(sequences),
        "total_kv": sum(lengths),
        "total_q": sum(sizes.get("q_lens", [])),
    }
    return {axis: sizes.get(axis, derived.get(axis, 1)) for axis in definition.var_axes}


def batch_axes(batch: Batch) -> dict[str, int]:
    """Sizes of a batch's metadata: a plan has only the least of each."""
    ends = [start + length for start, length in zip(batch.starts, batch.all, strict=True)]
    needed = {
        "batch_size": len(batch.new),
        "len_indptr": len(batch.new) + 1,
        "max_context": max(ends, default=1),
        "max_pages": -(-max(batch.all, default=0) // batch.page_size),
        "num_kv_indices": sum(batch.new),
        "num_prefix_tokens": sum(batch.old),
        "num_reqs": len(batch.new),
        "num_tokens": sum(batch.new),
    }
    return {axis: max(size, batch.plan.get(axis, 0)) for axis, size in needed.items()}
