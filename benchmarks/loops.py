"""The straightforward way to compute each family: a Python loop over rows, requests or tokens.

These are baselines for benchmarks/references.py, written in the obvious way. tests/test_benchmarks.py compares
them with the same oracles as the references, so that a ratio never compares two different functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 128


def rmsnorm(hidden_states: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    rows = [x / torch.sqrt((x * x).mean() + eps) * weight.float() for x in hidden_states.float()]
    return torch.stack(rows).to(hidden_states.dtype) if rows else torch.empty_like(hidden_states)


def fused_add_rmsnorm(
    hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    total = hidden_states.float() + residual.float()
    return rmsnorm(total, weight, eps).to(hidden_states.dtype), total.to(residual.dtype)


def layernorm(hidden_states: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    rows = [(x - x.mean()) / torch.sqrt(x.var(correction=0) + eps) * weight + bias for x in hidden_states.float()]
    return torch.stack(rows).to(hidden_states.dtype) if rows else torch.empty_like(hidden_states)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    rows = []
    for row in gate_up.float():
        gate, up = row.chunk(2)
        rows.append(gate * torch.erfc(-gate / math.sqrt(2)) / 2 * up)
    return torch.stack(rows).to(gate_up.dtype) if rows else gate_up[:, : gate_up.shape[1] // 2]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows = []
    for row in gate_up.float():
        gate, up = row.chunk(2)
        rows.append(gate / (1 + torch.exp(-gate)) * up)
    return torch.stack(rows).to(gate_up.dtype) if rows else gate_up[:, : gate_up.shape[1] // 2]


def rope(half_split: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """One token at a time, with a rotation matrix for each pair of features."""

    def rotate(head: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = len(cos)
        if half_split:
            first, second = slice(0, half), slice(half, 2 * half)
        else:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        rotated = head.clone()
        turn = torch.stack((torch.stack((cos, -sin)), torch.stack((sin, cos))))
        pair = torch.einsum("xyi,...yi->...xi", turn, torch.stack((head[..., first], head[..., second]), dim=-2))
        rotated[..., first], rotated[..., second] = pair[..., 0, :], pair[..., 1, :]
        return rotated

    def run(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for states in (q, k):
            rows = [
                rotate(x.float(), *cos_sin_cache[p].chunk(2)) for x, p in zip(states, positions.tolist(), strict=True)
            ]
            outputs.append(torch.stack(rows).to(states.dtype) if rows else torch.empty_like(states))
        return outputs[0], outputs[1]

    return run


def gemm(a: Tensor, b: Tensor) -> Tensor:
    weights = b.float()
    rows = [weights @ row for row in a.float()]
    return torch.stack(rows).to(a.dtype) if rows else a.new_empty(0, b.shape[0])


def mla_prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """One query and one head at a time."""
    *last_page_len, sm_scale = rest
    output = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf, device=q_nope.device)
    for b in range(len(qo_indptr) - 1):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        if not len(pages):
            continue
        unused = ckv_cache.shape[1] - int(last_page_len[0][b]) if last_page_len else 0
        kv_len = len(pages) * ckv_cache.shape[1] - unused
        ckv = ckv_cache[pages].flatten(0, 1)[:kv_len].float()
        kpe = kpe_cache[pages].flatten(0, 1)[:kv_len].float()
        start, stop = int(qo_indptr[b]), int(qo_indptr[b + 1])
        for i in range(start, stop):
            seen = kv_len - (stop - i) + 1
            for head in range(q_nope.shape[1]) if seen > 0 else ():
                logits = ckv[:seen] @ q_nope[i, head].float() + kpe[:seen] @ q_pe[i, head].float()
                logits = logits * sm_scale
                lse[i, head] = torch.logsumexp(logits, 0) / math.log(2)
                output[i, head] = (torch.softmax(logits, 0) @ ckv[:seen]).to(output.dtype)
    return output, lse


def mla_decode(q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    one_query_each = torch.arange(q_nope.shape[0] + 1)
    return mla_prefill(q_nope, q_pe, ckv_cache, kpe_cache, one_query_each, *rest)


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """One query and one head at a time, with the key-value head that it shares."""
    output = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    group = q.shape[1] // k.shape[1]
    for b in range(len(qo_indptr) - 1):
        start, stop = int(qo_indptr[b]), int(qo_indptr[b + 1])
        own = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        keys, values = k[own].float(), v[own].float()
        for i in range(start, stop):
            seen = len(keys) - (stop - i) + 1
            for head in range(q.shape[1]) if seen > 0 else ():
                logits = keys[:seen, head // group] @ q[i, head].float() * sm_scale
                lse[i, head] = torch.logsumexp(logits, 0) / math.log(2)
                output[i, head] = (torch.softmax(logits, 0) @ values[:seen, head // group]).to(output.dtype)
    return output, lse


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Gathers the pages first."""
    *last_page_len, sm_scale = rest
    page_size = k_cache.shape[1]
    tokens, lengths = [], [0]
    for b in range(len(kv_indptr) - 1):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        unused = page_size - int(last_page_len[0][b]) if last_page_len and len(pages) else 0
        own = [int(page) * page_size + offset for page in pages for offset in range(page_size)]
        tokens += own[: len(own) - unused]
        lengths.append(len(tokens))
    keys, values = (cache.flatten(0, 1)[torch.tensor(tokens, dtype=torch.int64)] for cache in (k_cache, v_cache))
    return ragged_attention(q, keys, values, qo_indptr, torch.tensor(lengths), sm_scale)


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return paged_prefill(q, k_cache, v_cache, torch.arange(q.shape[0] + 1), *rest)


def kept(row: Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None) -> Tensor:
    """The row, with the entries that the filters drop set to zero; not renormalized."""
    if top_k is not None:
        threshold = torch.sort(row, descending=True).values[min(max(top_k, 1), len(row)) - 1]
        row = torch.where(row >= threshold, row, 0.0)
    if top_p is not None:
        descending = torch.sort(row.double() / row.double().sum() if top_k else row.double(), descending=True).values
        reached = min(int((descending.cumsum(0) < top_p).sum()), len(row) - 1)
        threshold = torch.sort(row, descending=True).values[reached]
        row = torch.where(row >= threshold, row, 0.0)
    if min_p is not None:
        row = torch.where(row >= row.max() * min_p, row, 0.0)
    return row


def sampler(*filters: str) -> Callable[..., Tensor]:
    def run(probs: Tensor, *limits: Tensor) -> Tensor:
        rows = [kept(row, **dict(zip(filters, own, strict=True))) for row, *own in zip(probs, *limits, strict=True)]
        tokens = [torch.multinomial(row, 1)[0] for row in rows]
        return torch.stack(tokens) if tokens else probs.new_empty(0, dtype=torch.int64)

    return run


def renormalizer(name: str) -> Callable[..., Tensor]:
    def run(probs: Tensor, limits: Tensor) -> Tensor:
        rows = [kept(row, **{name: limit}) for row, limit in zip(probs, limits, strict=True)]
        return torch.stack([(row.double() / row.double().sum()).float() for row in rows]) if rows else probs.clone()

    return run


def moe(
    routing_logits: Tensor,
    routing_bias: Tensor,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
    top_k: int = 8,
    groups: int = 8,
    kept_groups: int = 4,
) -> Tensor:
    """One token and one of its experts at a time; weights are dequantized again each time."""
    output = torch.zeros(hidden_states.shape, device=hidden_states.device)
    for t, logits in enumerate(routing_logits):
        scores = torch.sigmoid(logits)
        choice = (scores + routing_bias.float()).view(groups, -1)
        best = torch.topk(choice.topk(2, 1).values.sum(1), kept_groups).indices
        allowed = torch.full_like(choice, -math.inf)
        allowed[best] = choice[best]
        experts = torch.topk(allowed.flatten(), top_k).indices
        weights = scores[experts] / scores[experts].sum() * routed_scaling_factor
        x = hidden_states[t].float() * hidden_states_scale[:, t].repeat_interleave(BLOCK)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            e = expert - int(local_expert_offset)
            if 0 <= e < len(gemm1_weights):
                gemm1 = dequantize(gemm1_weights[e], gemm1_weights_scale[e])
                output[t] += weight * mlp(x, gemm1, dequantize(gemm2_weights[e], gemm2_weights_scale[e]))
    return output.to(torch.bfloat16)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def mlp(x: Tensor, gemm1: Tensor, gemm2: Tensor) -> Tensor:
    up, gate = (gemm1 @ x).chunk(2)
    return gemm2 @ (gate * torch.sigmoid(gate) * up)


def best_experts(logits: Tensor, norm_topk_prob: bool, top_k: int = 8) -> tuple[list[int], Tensor]:
    """The experts of one token, best first and the lower index first among equals, and their weights."""
    values = logits.double().tolist()
    experts = sorted(range(len(values)), key=lambda expert: -values[expert])[:top_k]
    weights = torch.softmax(logits.double(), 0)[experts]
    return experts, weights / weights.sum() if norm_topk_prob else weights


def topk_softmax(routing_logits: Tensor, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    chosen = [best_experts(logits, norm_topk_prob) for logits in routing_logits]
    ids = torch.tensor([experts for experts, _ in chosen], dtype=torch.int32, device=routing_logits.device)
    return torch.stack([weights for _, weights in chosen]).float(), ids


def softmax_moe(
    routing_logits: Tensor,
    x: Tensor,
    gemm1: Callable[[int], Tensor],
    gemm2: Callable[[int], Tensor],
    local_experts: range,
    norm_topk_prob: bool,
) -> Tensor:
    """One token and one of its experts at a time."""
    output = torch.zeros_like(x)
    for t, logits in enumerate(routing_logits):
        for expert, weight in zip(*best_experts(logits, norm_topk_prob), strict=True):
            if expert in local_experts:
                e = local_experts.index(expert)
                output[t] += weight.float() * mlp(x[t], gemm1(e), gemm2(e))
    return output.to(torch.bfloat16)


def bf16_softmax_moe(
    routing_logits: Tensor,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    local_expert_offset: int,
    norm_topk_prob: bool,
) -> Tensor:
    here = range(local_expert_offset, local_expert_offset + len(gemm1_weights))
    weights = (lambda e: gemm1_weights[e].float(), lambda e: gemm2_weights[e].float())
    return softmax_moe(routing_logits, hidden_states.float(), *weights, here, norm_topk_prob)


def fp8_softmax_moe(
    routing_logits: Tensor,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    local_expert_offset: int,
    norm_topk_prob: bool,
) -> Tensor:
    x = hidden_states.float() * hidden_states_scale.T.repeat_interleave(BLOCK, 1)
    here = range(local_expert_offset, local_expert_offset + len(gemm1_weights))
    weights = (
        lambda e: dequantize(gemm1_weights[e], gemm1_weights_scale[e]),
        lambda e: dequantize(gemm2_weights[e], gemm2_weights_scale[e]),
    )
    return softmax_moe(routing_logits, x, *weights, here, norm_topk_prob)


def merge_state(base: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """One head of one token at a time."""

    def run(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
        values, lse = torch.zeros_like(v_a), torch.full_like(s_a, -math.inf)
        for index in torch.ones_like(s_a).nonzero().tolist():
            place = tuple(index)
            a, b = (float(s[place]) * math.log(base) for s in (s_a, s_b))
            if max(a, b) == -math.inf:
                continue
            total = max(a, b) + math.log(math.exp(a - max(a, b)) + math.exp(b - max(a, b)))
            merged = math.exp(a - total) * v_a[place].float() + math.exp(b - total) * v_b[place].float()
            values[place], lse[place] = merged.to(v_a.dtype), total / math.log(base)
        return values, lse

    return run


LOOPS: dict[str, Callable[..., Any]] = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": lambda *inputs: fused_add_rmsnorm(*inputs)[0],
    "fused_add_rmsnorm_residual_out": fused_add_rmsnorm,
    "rmsnorm_eps1e5": functools.partial(rmsnorm, eps=1e-5),
    "fused_add_rmsnorm_eps1e5": lambda *inputs: fused_add_rmsnorm(*inputs, eps=1e-5)[0],
    "fused_add_rmsnorm_residual_out_eps1e5": functools.partial(fused_add_rmsnorm, eps=1e-5),
    "layernorm": layernorm,
    "layernorm_eps1e5": functools.partial(layernorm, eps=1e-5),
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "rope_with_cos_sin_cache_neox_style": rope(half_split=True),
    "rope_with_cos_sin_cache_neox_style_any_heads": rope(half_split=True),
    "rope_with_cos_sin_cache_gptj_style": rope(half_split=False),
    "gemm": gemm,
    "gemm_bf16": gemm,
    "mla_paged_decode": mla_decode,
    "mla_paged_decode_ps1": mla_decode,
    "mla_paged_prefill_causal": mla_prefill,
    "mla_paged_prefill_causal_ps1": mla_prefill,
    "gqa_paged_decode": paged_decode,
    "gqa_paged_decode_ps1": paged_decode,
    "gqa_paged_prefill_causal": paged_prefill,
    "gqa_paged_prefill_causal_ps1": paged_prefill,
    "gqa_ragged_prefill_causal": ragged_attention,
    "mla_ragged_prefill_causal": ragged_attention,
    "top_k_sampling_from_probs": sampler("top_k"),
    "top_p_sampling_from_probs": sampler("top_p"),
    "top_k_top_p_sampling_from_probs": sampler("top_k", "top_p"),
    "min_p_sampling_from_probs": sampler("min_p"),
    "top_k_renorm_probs": renormalizer("top_k"),
    "top_p_renorm_probs": renormalizer("top_p"),
    "merge_state": merge_state(2.0),
    "merge_state_base_e": merge_state(math.e),
    "moe_fp8_block_scale_ds_routing": moe,
    "moe_topk_softmax": topk_softmax,
    "moe_bf16_softmax_routing": bf16_softmax_moe,
    "moe_fp8_block_scale_softmax_routing": fp8_softmax_moe,
}
