"""Gemma's RMSNorm of queries and keys, then rotary position embedding, of queries that come with their gates.

Each head of q_gate has the features of a query, then those of its gate, which are copied to gate_out bit for bit. A
head x of queries or keys becomes x / sqrt(mean(x^2) + EPS) * (1 + weight). In its first ROTARY_DIM features, feature i
of the first half and feature i of the second half form a pair (x, y). The i-th angle of the token's position turns it
into (x cos - y sin, y cos + x sin); the other features stay. Row p of the cache holds the ROTARY_DIM / 2 cosines of
position p, then its sines. Computed in float32 and rounded once, at the end. Where the sum of squares is beyond
float32's range, 3.4e38, the output is 0.
"""

import torch

from ._shared import gemma_normed, neox_rotated

NUM_QO_HEADS = 16
NUM_KV_HEADS = 4
HEAD_SIZE = 256
Q_GATE_SIZE = 512
ROTARY_DIM = 64
EPS = 1e-6


def run(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_gate [num_tokens, num_qo_heads, q_gate_size], k [num_tokens, num_kv_heads, head_size] -> three outputs.

    cos_sin_cache [max_seq_len, rotary_dim] float32; positions [num_tokens] int64, each below max_seq_len.
    """
    assert q_gate.shape[1:] == (NUM_QO_HEADS, Q_GATE_SIZE)
    assert k.shape[1:] == (NUM_KV_HEADS, HEAD_SIZE)
    assert q_weight.shape[0] == k_weight.shape[0] == HEAD_SIZE
    assert cos_sin_cache.shape[1] == ROTARY_DIM
    q, gate = q_gate.split(HEAD_SIZE, dim=2)
    turns = cos_sin_cache[positions].unsqueeze(1)
    return (
        neox_rotated(gemma_normed(q, q_weight, EPS), turns).to(torch.bfloat16),
        neox_rotated(gemma_normed(k, k_weight, EPS), turns).to(torch.bfloat16),
        gate.contiguous(),
    )
