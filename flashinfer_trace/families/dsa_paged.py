"""DeepSeek sparse attention: latent attention to the slots that an indexer chose for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashinfer_trace.families.attention.cases import (
    EDGES,
    LOGIT_KINDS,
    PEAKED,
    SCALES,
    UNUSED_KINDS,
    add_peaks,
    give_signs,
    query_scale,
    softmax_scale,
    spoil_unused,
    usual_scale,
    value_scale,
)
from flashinfer_trace.families.attention.oracle import Memory, any_chunks, expected_outputs
from flashinfer_trace.families.attention.policies import LSE, OUTPUT, Rounding, kernel_policies
from flashinfer_trace.families.mla_paged.inputs import SCALED_DIM
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Expected

#: ``all``: every token chooses topk slots; ``any``: any number of them; ``some``: some tokens choose nothing;
#: ``one``: each chooses one. In traffic also ``own``: each token is of another request, and chooses topk slots of that
#: request's pages.
CHOICES = ("all", "any", "some", "one")
#: Numbers that mean no slot: -1, which kernels accept, or any other negative number.
NOTHING = (-1, -(2**30))
#: Tokens of a corner, and how many slots they choose at most, all together: that takes less than a second.
TOKENS, CHOSEN = 300, 2**16
#: Heads of one block of the kernel: SGLang pads them to this many.
BLOCK_HEADS = 64


@dataclass(frozen=True)
class SparseOptions:
    """Choices that plans can draw for a kernel: tokens that choose nothing, and other negative numbers than -1."""

    keyless: bool = True
    any_negative: bool = True


def usual_pages(definition: Definition, axes: Mapping[str, int]) -> int:
    return -(-2 * definition.const_axes["topk"] // definition.const_axes["page_size"])


def choices_of(request: PlanRequest) -> list[str]:
    return [kind for kind in CHOICES if kind != "some" or request.options_of(SparseOptions).keyless]


def no_slots(request: PlanRequest) -> tuple[int, ...]:
    return NOTHING if request.options_of(SparseOptions).any_negative else NOTHING[:1]


def corners(request: PlanRequest) -> list[Plan]:
    """A slot in any place, and keys beyond float16's range, at unusual scales. On a CPU also tokens that choose
    nothing, logits beyond float32's range, for which it is not known what kernels round, and more tokens than a block
    of a reference at the twin's sizes."""
    few = {"choice": "any", "nothing": no_slots(request)[-1]}
    one = {**few, "num_tokens": 8, "choice": "one", "scale": SCALES[2]}
    beyond = {**few, "logits": "beyond_float16", "scale": SCALES[1]}
    if request.large:
        return [one, beyond]
    without = [{**few, "choice": "some"}] if "some" in choices_of(request) else []
    pages = max(1, min(9, CHOSEN // (TOKENS * request.definition.const_axes["page_size"])))
    tokens = {**few, "num_tokens": TOKENS, "num_pages": pages, "logits": EDGES, "scale": SCALES[1]}
    return [one, *without, {**few, "logits": "vast"}, tokens, beyond]


PLAN = RowPlans(
    {"num_tokens": Count(12, 100, corner=5), "num_pages": Count(12, 200, least=1, usual=usual_pages, corner=9)},
    {"choice": choices_of, "logits": LOGIT_KINDS, "unused": UNUSED_KINDS, "nothing": no_slots, "scale": SCALES},
    special=corners,
    many_rows=0,  # a corner has as many tokens as take less than a second
)


def chosen_slots(plan: Plan, slots: int, topk: int, draws: Draws) -> torch.Tensor:
    """int32 [num_tokens, topk]: different slots of each token, in any order and place; `nothing` elsewhere."""
    page_size, pages = slots // plan["num_pages"], torch.arange(plan["num_pages"], device=draws.device)
    of_token = pages.expand(plan["num_tokens"], -1)
    if plan["choice"] == "own":
        of_token = draws.permutation(plan["num_pages"]).view(plan["num_tokens"], -1)
    places = (of_token.unsqueeze(2) * page_size + torch.arange(page_size, device=draws.device)).flatten(1)
    rows, most = [], min(places.shape[1], topk)
    for token, own in enumerate(places):
        count = {"all": most, "own": most, "one": min(1, most)}.get(plan["choice"], -1)
        if count < 0:
            count = draws.host_integers(1, min(1, most), most)[0]
        if plan["choice"] == "some" and token % 2:
            count = 0
        row = torch.full((topk,), plan["nothing"], dtype=torch.int64, device=draws.device)
        row[draws.permutation(topk)[:count]] = own[draws.permutation(len(own))[:count]]
        rows.append(row)
    found = torch.stack(rows) if rows else torch.zeros(0, topk, dtype=torch.int64, device=draws.device)
    return found.to(torch.int32)


def drawn(
    plan: Plan, draws: Draws, heads: int, dim: int, slots: int, indices: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal queries [num_tokens, heads, dim] and keys [slots, dim] of the planned kind; slots that nobody chooses are
    NaN or stale."""
    kind = plan["logits"]
    cache = draws.normal((slots, 1, dim), torch.bfloat16, value_scale(kind))
    if kind == "positive":
        cache.abs_()
    q = draws.normal([plan["num_tokens"], heads, dim], scale=query_scale(kind))
    give_signs(kind, q, cache)
    if kind in PEAKED:
        counts = (indices >= 0).sum(dim=1).tolist()
        add_peaks(kind, q, cache, [1] * len(counts), counts, sm_scale, draws, indices[indices >= 0].long().cpu())
    used = torch.zeros(slots, 1, dtype=torch.bool, device=draws.device)
    used[indices[indices >= 0].long()] = True
    spoil_unused(cache, used, plan["unused"])
    return q.to(torch.bfloat16), cache.squeeze(1)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, sm_scale = definition.const_axes, softmax_scale(SCALED_DIM, plan["scale"])
    heads, ckv, kpe, page_size = (axes[axis] for axis in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe", "page_size"))
    slots = plan["num_pages"] * page_size
    indices = chosen_slots(plan, slots, axes["topk"], draws)
    q, keys = drawn(plan, draws, heads, ckv + kpe, slots, indices, sm_scale)
    cache = keys.view(plan["num_pages"], page_size, ckv + kpe)
    return {
        "q_nope": q[..., :ckv].contiguous(),
        "q_pe": q[..., ckv:].contiguous(),
        "ckv_cache": cache[..., :ckv].contiguous(),
        "kpe_cache": cache[..., ckv:].contiguous(),
        "sparse_indices": indices,
        "sm_scale": sm_scale,
    }


def keys_of(inputs: Inputs) -> torch.Tensor:
    return torch.cat((inputs["ckv_cache"], inputs["kpe_cache"]), dim=-1).flatten(0, 1).unsqueeze(1)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    memory = chosen_memory(inputs["sparse_indices"], keys_of(inputs), inputs["ckv_cache"].flatten(0, 1).unsqueeze(1))
    queries = torch.cat((inputs["q_nope"], inputs["q_pe"]), dim=-1)
    return expected_outputs(queries, memory, inputs["sm_scale"], False, any_chunks())


def chosen_memory(sparse_indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Memory:
    indices = sparse_indices.long()
    front = indices.gather(1, (indices < 0).int().argsort(dim=1, stable=True))
    counts = (indices >= 0).sum(dim=1).tolist()
    offsets = list(range(len(indices) + 1))
    return Memory(keys, values, offsets, counts, lambda request, position: front[request, position])


def run_flash_mla(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it: heads are padded by zeros to a whole block, and the lse has base 2."""
    from flash_mla import flash_mla_sparse_fwd

    axes = definition.const_axes
    heads = axes["num_qo_heads"]
    queries = torch.cat((inputs["q_nope"], inputs["q_pe"]), dim=-1)
    padded = torch.nn.functional.pad(queries, (0, 0, 0, -heads % BLOCK_HEADS))
    indices = inputs["sparse_indices"].unsqueeze(1)
    scale, latent = float(inputs["sm_scale"]), axes["head_dim_ckv"]
    found = flash_mla_sparse_fwd(padded, keys_of(inputs), indices, scale, latent, use_legacy=True, return_log2_lse=True)
    return {"output": found[0][:, :heads].contiguous(), "lse": found[2][:, :heads].contiguous()}


FAMILIES = (
    Family(
        name="dsa_sparse_attention",
        op_type="dsa_paged",
        twin={"num_qo_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16, "page_size": 2, "topk": 10},
        plan=PLAN,
        make_inputs=make_inputs,
        strided=("q_nope", "q_pe"),
        isolated=("q_nope", "q_pe"),
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=(
            Kernel(
                "flash_mla.flash_mla_sparse_fwd",
                run_flash_mla,
                limits={"num_tokens": (1, 1 << 20), "num_pages": (1, 1 << 30)},
                plan_options=SparseOptions(keyless=False, any_negative=False),
                # Whether it sums weights before or after it rounds them is not known: the bound allows both.
                compare=kernel_policies(Rounding(weights=True, sum=True, partial=0)),
            ),
        ),
        faults=(usual_scale(SCALED_DIM),),
    ),
)
