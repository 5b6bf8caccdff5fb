"""All tokens of each sequence through a gated delta net, from a state that is given to one that is returned.

With the decay g = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), each value head does, token by token,

    S = g S + beta (v - g S k) k^T,    output = scale S q

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", ICLR 2025). Sequence i has the tokens from cu_seqlens[i] to
cu_seqlens[i + 1]; one without tokens keeps its state. Value head h reads query and key head
h // (num_v_heads / num_q_heads). Queries and keys are used as they are; callers normalize them. A scale of 0 stands for
1 / sqrt(head_size). States are [d_v, d_k] (k-last). Gates are float32, and states float64 until they are returned:
kernels compute chunks of tokens at once instead, which rounds the state less often than float32 would at each token.
"""

import math

import torch

from ._shared import delta_step, gates, per_value_head

NUM_Q_HEADS = 16
NUM_K_HEADS = 16
NUM_V_HEADS = 32
HEAD_SIZE = 128


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [total_seq_len, num_q_heads, d]; v [total_seq_len, num_v_heads, d]; state [num_seqs, num_v_heads, d, d];
    A_log, dt_bias [num_v_heads]; a, b [total_seq_len, num_v_heads]; cu_seqlens [num_seqs + 1].

    Returns output [total_seq_len, num_v_heads, d] and new_state, of the shape of state.
    """
    tokens = len(v)
    assert q.shape == (tokens, NUM_Q_HEADS, HEAD_SIZE) and k.shape == (tokens, NUM_K_HEADS, HEAD_SIZE)
    assert v.shape == (tokens, NUM_V_HEADS, HEAD_SIZE) and a.shape == b.shape == v.shape[:2]
    assert state.shape == (len(cu_seqlens) - 1, NUM_V_HEADS, HEAD_SIZE, HEAD_SIZE)
    assert A_log.shape == dt_bias.shape == (NUM_V_HEADS,)
    if scale == 0.0:
        scale = 1.0 / math.sqrt(HEAD_SIZE)
    log_decay, beta = gates(A_log, a + dt_bias, b)
    queries, keys = (per_value_head(x, NUM_V_HEADS) for x in (q, k))
    queries, keys, values, new_state, log_decay, beta = (x.double() for x in (queries, keys, v, state, log_decay, beta))
    output = torch.zeros_like(v)
    lengths = cu_seqlens.diff().tolist()
    for position in range(max(lengths, default=0)):
        here = [sequence for sequence, length in enumerate(lengths) if position < length]
        token = cu_seqlens[here] + position
        read, new_state[here] = delta_step(
            new_state[here], queries[token] * scale, keys[token], values[token], log_decay[token], beta[token]
        )
        output[token] = read.bfloat16()
    return output, new_state.float()
