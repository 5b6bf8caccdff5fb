"""Which traffic a Definition has, the family's plan for it, and which kernels take it."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention.cases import distinct_pages
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.exact import ExactOperations
from flashinfer_trace.harness.family import Kernel, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.judging.traffic.profiles import Batch, Traffic

#: Axes that count tokens or rows; of a Definition the first one that it has.
TOKEN_AXES = ("num_tokens", "m", "M", "seq_len", "total_rows", "num_rows", "batch_size")
#: Their rows are those of the last token of each request: a step of prefill has as few as one of decode.
OF_REQUESTS = ("sampling", "renorm", "speculative")
#: DeepSeek-V3 chooses COPIES of its EXPERTS for each token. A Definition with fewer is one rank of COPIES, where a
#: token has one row on average; one with more also has those that all tokens share.
COPIES, EXPERTS = 8, 256
#: Families whose builders draw each token's choice among all slots by itself, which takes long for many tokens.
MOST_TOKENS = dict.fromkeys((f"dsa_sparse_attention{kind}" for kind in ("", "_fp8_cache", "_sinks")), 512)
#: Keys that the indexer has of the tokens before a chunk. With no more than top-k there is nothing to choose, and the
#: float64 oracle of a chunk with many times as many does not fit into the memory of a GPU.
CACHED_KEYS = 2048
#: Pages in use for each free one, as in a server that is not full.
FREE = 8


def fitting(definition: Definition, traffic: Mapping[str, list[Traffic]]) -> list[Traffic]:
    """The traffic that means something for a Definition."""
    family = family_of(definition)
    entries = family.plan_for_axes(definition, {}, Draws(0, "cpu")).keys()
    if "kv_lens" in entries:
        phase = "prefill" if "q_lens" in entries else "decode"
        return [each for each in traffic["requests"] if each.phase == phase]
    if "seq_lens" in entries:
        return [each for each in traffic["requests"] if each.phase == "prefill"]
    if "lengths" in entries:
        return [each for each in traffic["requests"] if each.phase == "decode"]
    most = MOST_TOKENS.get(family.name, 1 << 30)
    phases = ("decode",) if definition.op_type in OF_REQUESTS else ("decode", "prefill")
    if "k_start" in definition.inputs:  # in decode, keys lie in pages
        phases = ("prefill",)
    return [each for each in traffic["tokens"] if each.phase in phases and each.count <= most]


def planned(definition: Definition, traffic: Traffic, seed: int) -> Plan:
    """The family's plan for some traffic."""
    family = family_of(definition)
    lengths = Draws(seed, "cpu")

    def bits() -> int:
        return int(lengths.bits(1)) & 0xFFFFFFFF

    with ExactOperations():
        plan = family.plan_for_axes(definition, _axes(definition, traffic), Draws(seed, "cpu"))
    if "kv_lens" in plan:
        return _attention(definition, plan, traffic.batch(bits))
    if "seq_lens" in plan:
        return {**plan, "seq_lens": list(traffic.batch(bits).new)}
    if "lengths" in plan:
        own = traffic.batch(bits).lengths
        return {**plan, "lengths": own, **({"rows": [1] * len(own)} if "rows" in plan else {})}
    if "sparse_indices" in definition.inputs and traffic.phase == "decode":
        cache = "num_pages" if "num_pages" in plan else "num_slots"
        return {**plan, "choice": "own", cache: plan[cache] * traffic.count}
    return plan


def _axes(definition: Definition, traffic: Traffic) -> dict[str, int]:
    """The number of tokens, where the family's plan has it; lengths come afterwards."""
    if "k_start" in definition.inputs:
        return {"num_tokens": traffic.count, "num_keys": CACHED_KEYS + traffic.count}
    if {"len_indptr", "len_cu_seqlens", "mask_size", "num_keys"} & set(definition.var_axes):
        return {}
    axis = next(axis for axis in TOKEN_AXES if axis in definition.var_axes)
    copies = {"num_copies": COPIES * traffic.count} if "num_copies" in definition.var_axes else {}
    shared = definition.const_axes.get("num_experts", 0) - EXPERTS
    rows = COPIES + shared if axis == "total_rows" and shared >= 0 else 1
    return {axis: rows * traffic.count, **copies}


def _attention(definition: Definition, plan: Plan, batch: Batch) -> Plan:
    if "shared_prefix" not in plan:  # ragged keys are those of the new tokens; cached ones are merged in later
        return {**plan, "kv_lens": list(batch.new), "q_lens": list(batch.new)}
    plan = {**plan, "kv_lens": batch.lengths}
    if "q_lens" in plan:
        plan["q_lens"] = list(batch.new)
    if "num_slots" in plan:
        return {**plan, **_pages("num_slots", batch.cached, 1, batch.prefix)}
    return {**plan, **_pages("num_pages", batch.lengths, definition.const_axes["page_size"], batch.prefix)}


def _pages(entry: str, lengths: tuple[int, ...] | list[int], page_size: int, prefix: int) -> Plan:
    shared = prefix // page_size
    used = distinct_pages(lengths, page_size, shared)
    return {"shared_prefix": shared, entry: used + used // FREE + 1}


def unfit(kernel: Kernel, axes: Mapping[str, int]) -> str | None:
    """Why a kernel does not take a workload with these axes, or None."""
    for axis, (low, high) in kernel.limits.items():
        if not low <= axes.get(axis, low) <= high:
            return f"takes {axis} from {low} to {high}, and a workload has {axes[axis]}"
    options = kernel.plan_options
    if getattr(options, "bfloat16_cache", False):
        return "reads cosines and sines as bfloat16, and those of the workloads are float32"
    if not getattr(options, "first_expert", True):
        return "loses what expert 0 computed, and tokens of the workloads choose any expert"
    if not getattr(options, "exact", True):
        return "computes probabilities in bfloat16, which does not tell apart what the logits of the workloads do"
    if error := getattr(options, "score_error", 0.0):
        return f"computes scores with an error of {error:.1e}, and those of the workloads may be closer than that"
    length, multiple = axes.get("max_padded", 0), getattr(options, "multiple", 1)
    if length % multiple:
        return f"takes lists whose length is a multiple of {multiple}, and that of a workload is {length}"
    return None
