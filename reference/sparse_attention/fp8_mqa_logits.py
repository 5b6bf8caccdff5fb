"""The scores by which DeepSeek's sparse attention chooses keys: the indexer's weighted sums over its heads, in fp8.

logits[t, j] = sum over heads h of weights[t, h] * max(q[t, h] . k_j, 0), where k_j = k[j] * k_scale[j], for the keys
k_start[t] <= j < k_end[t] of token t, and -inf for all others (DeepSeek-V3.2-Exp, "lightning indexer"). Queries and
keys are e4m3 codes; weights contain the scales of the queries. Keys that no token sees may be NaN. A scale is positive.
All arithmetic is in float32; heads are added up one by one.
"""

import math

import torch

NUM_HEADS = 64
HEAD_DIM = 128


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    k_start: torch.Tensor,
    k_end: torch.Tensor,
) -> torch.Tensor:
    """q [num_tokens, heads, dim], k [num_keys, dim], k_scale [num_keys], weights [num_tokens, heads].

    k_start and k_end are [num_tokens]. Returns logits float32 [num_tokens, num_keys].
    """
    assert q.shape[1:] == (NUM_HEADS, HEAD_DIM)
    assert k.shape[1] == HEAD_DIM
    assert weights.shape[1] == NUM_HEADS
    keys = k.float() * k_scale[:, None]
    logits = torch.zeros_like(weights[:, :1] * k_scale)
    for head in range(NUM_HEADS):
        logits += weights[:, head : head + 1] * (q[:, head].float() @ keys.T).clamp_min(0)
    key = torch.arange(logits.shape[1], device=q.device)
    seen = (key >= k_start[:, None]) & (key < k_end[:, None])
    return torch.where(seen, logits, -math.inf)
