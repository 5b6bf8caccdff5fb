"""RMSNorm of each head of queries and keys, with an epsilon of
[[EPS == 1e-6: 1e-6: Qwen3's]][[EPS == 1e-5: 1e-5: GLM-4.5's]] norm before the rotary embedding.

Each head x becomes x / sqrt(mean(x^2) + [[EPS == 1e-6: 1e-6]][[EPS == 1e-5: 1e-5]]) times
the weight of queries or of keys (Zhang and Sennrich, 2019).
Computed in float32 and rounded once, at the end, to the dtype of the input. Where the sum of squares is beyond
float32's range, 3.4e38, the output is 0.
"""

import torch

NUM_QO_HEADS = 32
NUM_KV_HEADS = 4
HEAD_DIM = 128
EPS = 1e-6


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, head_dim], weight [head_dim]."""
    values = x.float()
    mean_square = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square() / HEAD_DIM
    return (values * torch.rsqrt(mean_square + EPS) * weight).to(x.dtype)


def run(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [num_tokens, num_qo_heads, head_dim], k [num_tokens, num_kv_heads, head_dim], weights [head_dim].

    Returns q_out and k_out, with the shapes of q and k.
    """
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k.shape[1:] == (NUM_KV_HEADS, HEAD_DIM)
    assert q_weight.shape[0] == k_weight.shape[0] == HEAD_DIM
    return normalized(q, q_weight), normalized(k, k_weight)
