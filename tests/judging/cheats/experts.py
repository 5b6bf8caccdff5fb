"""Wrong mixtures of experts and rotations: moe_bf16_softmax_routing, rope_with_cos_sin_cache_neox_style."""

from __future__ import annotations

import torch


def mixture(logits, x, gemm1, gemm2, first, normalized, *, top_k, weigh=None, swapped=False):
    """Softmax routing over all experts, then those that are here; `weigh` changes the weights [tokens, experts]."""
    ids = logits.float().argsort(dim=1, descending=True, stable=True)[:, :top_k]
    weights = torch.softmax(logits.double(), dim=1).gather(1, ids)
    if normalized:
        weights = weights / weights.sum(dim=1, keepdim=True)
    every = torch.zeros(logits.shape, dtype=torch.float64, device=x.device).scatter(1, ids, weights)
    if weigh is not None:
        every = weigh(every)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gemm1)):
        rows = every[:, first + expert].nonzero().flatten()
        if not len(rows):
            continue
        up, gate = (x[rows].float() @ gemm1[expert].float().T).chunk(2, dim=1)
        up, gate = (gate, up) if swapped else (up, gate)
        out = (torch.nn.functional.silu(gate) * up) @ gemm2[expert].float().T
        total[rows] += out * every[rows, first + expert].float().unsqueeze(1)
    return total.to(x.dtype)


def honest_mixture(
    routing_logits, hidden_states, gemm1_weights, gemm2_weights, local_expert_offset, norm_topk_prob, **changes
):
    """All chosen experts, with their weights."""
    given = routing_logits, hidden_states, gemm1_weights, gemm2_weights, local_expert_offset, norm_topk_prob
    return mixture(*given, top_k=2, **changes)


def drops_the_second_expert(*inputs):
    """Computes only the best expert of each token."""
    return honest_mixture(*inputs, weigh=lambda every: every * (every == every.amax(dim=1, keepdim=True)))


def has_a_capacity(*inputs):
    """An expert takes four tokens, and the others go without it."""
    return honest_mixture(*inputs, weigh=lambda every: every * ((every > 0).cumsum(dim=0) <= 4))


def weighs_all_alike(*inputs):
    """Each chosen expert counts one half."""
    return honest_mixture(*inputs, weigh=lambda every: (every > 0) * 0.5)


def exchanges_gate_and_up(*inputs):
    """Activates the wrong half."""
    return honest_mixture(*inputs, swapped=True)


def rotated(q, k, cos_sin_cache, positions):
    """Each pair of features, half a rotary dimension apart, turned by the angle of its position."""
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    size = cos_sin_cache.shape[1]

    def turn(x):
        first, second = x[..., :size].float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        return torch.cat((turned, x[..., size:]), dim=-1)

    return turn(q), turn(k)


def honest_rotation(q, k, cos_sin_cache, positions):
    """Positions as they are given."""
    return rotated(q, k, cos_sin_cache, positions)


def takes_positions_for_granted(q, k, cos_sin_cache, positions):
    """Token i is at position i, as in many benchmarks."""
    counted = torch.arange(len(positions), device=positions.device)
    return rotated(q, k, cos_sin_cache, counted.clamp_max(len(cos_sin_cache) - 1))


def rotates_queries_only(q, k, cos_sin_cache, positions):
    """Leaves keys as they are."""
    return rotated(q, k, cos_sin_cache, positions)[0], k.clone()
