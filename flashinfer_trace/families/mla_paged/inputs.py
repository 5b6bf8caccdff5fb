"""Inputs and oracle of latent attention over a paged cache.

It is attention with one key-value head, which all query heads share: the key of a token is its compressed part and its
rotary part, 512 + 64 features at real sizes, and its value is the compressed part alone.
"""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.families.attention.cases import (
    add_peaks,
    give_signs,
    index_inputs,
    page_table,
    paged_memory,
    query_lengths,
    query_scale,
    softmax_scale,
    spoil_unused,
    value_scale,
)
from flashinfer_trace.families.attention.oracle import Memory, expected_outputs, in_pieces
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import Expected

#: The usual scale is 1/sqrt(128 + 64), from the head dimension before absorption, whatever the size of the twin.
SCALED_DIM = 128 + 64
#: Split-KV kernels cut the keys of a request at multiples of this (or of a multiple of it).
SMALLEST_CHUNK = 32


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    inputs = all_inputs(definition, plan, draws)
    return {name: inputs[name] for name in definition.inputs}


def all_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    device, axes = draws.device, definition.const_axes
    heads, ckv_dim, kpe_dim = (axes[axis] for axis in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    q_lens, kind, sm_scale = query_lengths(plan), plan["logits"], softmax_scale(SCALED_DIM, plan["scale"])
    table = page_table(definition, plan, draws)
    cache = draws.normal((table.num_pages, table.page_size, ckv_dim + kpe_dim), torch.bfloat16, value_scale(kind))
    if kind == "positive":
        cache.abs_()
    queries = draws.normal([sum(q_lens), heads, ckv_dim + kpe_dim], scale=query_scale(kind))
    give_signs(kind, queries, cache)
    tokens = cache.flatten(0, 1).unsqueeze(1)
    add_peaks(kind, queries, tokens, q_lens, plan["kv_lens"], sm_scale, draws, table.slots)
    spoil_unused(cache, table.used(device), plan["unused"])
    queries = queries.to(torch.bfloat16)
    return {
        "q_nope": queries[..., :ckv_dim].contiguous(),
        "q_pe": queries[..., ckv_dim:].contiguous(),
        "ckv_cache": cache[..., :ckv_dim].contiguous(),
        "kpe_cache": cache[..., ckv_dim:].contiguous(),
        "sm_scale": sm_scale,
        **index_inputs(table, plan, device),
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    own, causal = memory(inputs, definition.const_axes["page_size"]), "qo_indptr" in inputs
    return expected_outputs(queries_of(inputs), own, inputs["sm_scale"], causal, planned_chunks)


def queries_of(inputs: Inputs) -> torch.Tensor:
    """Queries over the concatenated key: bfloat16 [queries, heads, head_dim_ckv + head_dim_kpe]."""
    return torch.cat([inputs["q_nope"], inputs["q_pe"]], dim=-1)


def memory(inputs: Inputs, page_size: int) -> Memory:
    keys = torch.cat([inputs["ckv_cache"], inputs["kpe_cache"]], dim=-1).flatten(0, 1).unsqueeze(1)
    return paged_memory(inputs, keys, inputs["ckv_cache"].flatten(0, 1).unsqueeze(1), page_size)


def planned_chunks(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of |partial output| and of its square over chunks of keys, each maximized over the possible chunk lengths.
    flashinfer's MLAPlan splits the keys of a request into chunks of 32, 64, 128, 192 or a multiple of 256 tokens,
    depending on the load of the GPU; each partial output is stored in bf16. Keys that fit in one chunk are not split,
    so both sums are zero. `Split` describes the arguments."""
    shape, most = (len(p), p.shape[1], values.shape[2]), values.shape[1]
    if most <= SMALLEST_CHUNK:
        nothing = p.new_zeros(shape)
        return nothing, nothing
    limits, pieces, members = chunks_of(most, p.device)
    weights, by_piece = in_pieces(p, values, SMALLEST_CHUNK)
    outputs = pieces @ weights.bmm(by_piece).view(len(p), -1, shape[1] * shape[2])
    cut = (counts[:, None] > limits).view(len(counts), 1, -1, 1)
    by_tile = len(counts), -1, len(limits), shape[1] * shape[2]
    absolute, squared = (
        (members @ each).view(by_tile).mul_(cut).amax(dim=2).view(shape) for each in (outputs.abs(), outputs.square())
    )
    return absolute, squared


@functools.lru_cache(maxsize=128)
def chunks_of(keys: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How so many keys may be split into chunks, all of one length [lengths]; whether a chunk has a piece [chunks,
    pieces], and whether it is of that length [lengths, chunks], both 0 or 1, float64."""
    limits = [limit for limit in (32, 64, 128, 192, *range(256, keys, 256)) if limit < keys]
    pieces = -(-keys // SMALLEST_CHUNK)
    starts = [(limit, start) for limit in limits for start in range(0, pieces, limit // SMALLEST_CHUNK)]
    length, first = torch.tensor(starts).T
    ahead = torch.arange(pieces) - first[:, None]
    has_piece = (ahead >= 0) & (ahead < length[:, None] // SMALLEST_CHUNK)
    own_limits = torch.tensor(limits)
    members = own_limits[:, None] == length
    return own_limits.to(device), has_piece.double().to(device), members.double().to(device)
