"""RMSNorm of each head of queries, keys and values, as Gemma-4 has it before the rotary embedding.

Each head x becomes x / sqrt(mean(x^2) + EPS), times the weight of queries or of keys; values have no weight. Computed
in float32 and rounded once, at the end, to the dtype of the input. Where the sum of squares is beyond float32's range,
3.4e38, the output is 0.
"""

import torch

NUM_QO_HEADS = 16
NUM_KV_HEADS = 8
HEAD_DIM = 256
EPS = 1e-6


def normed(x: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, head_dim] -> the same in float32, normalized."""
    values = x.float()
    mean_square = torch.linalg.vector_norm(values, dim=2, keepdim=True).square() / HEAD_DIM
    return values * torch.rsqrt(mean_square + EPS)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [num_tokens, num_qo_heads, head_dim]; k and v [num_tokens, num_kv_heads, head_dim]; weights [head_dim].

    Returns q_out, k_out and v_out, with the shapes of q, k and v.
    """
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k.shape[1:] == v.shape[1:] == (NUM_KV_HEADS, HEAD_DIM)
    assert q_weight.shape[0] == k_weight.shape[0] == HEAD_DIM
    return (
        (normed(q) * q_weight).to(torch.bfloat16),
        (normed(k) * k_weight).to(torch.bfloat16),
        normed(v).to(torch.bfloat16),
    )
