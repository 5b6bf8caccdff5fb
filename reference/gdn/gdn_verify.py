"""Several draft tokens of each sequence through a gated delta net; the state after each of them is kept.

With the decay g = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), each value head does, token by token,

    S = g S + beta (v - g S k) k^T,    output = scale S q

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", ICLR 2025). Sequence i begins with the state of the slot
initial_state_indices[i]; sequences may share one. The pool of states stays as it is: once it is known how many tokens
are accepted, one of intermediate_states takes that slot. Value head h reads query and key head
h // (num_v_heads / num_q_heads). Queries and keys are used as they are; callers normalize them. A scale of 0 stands for
1 / sqrt(head_size). States are [d_v, d_k] (k-last). Everything is float32; the output is rounded once.
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
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [batch_size, seq_len, num_q_heads, d]; v [batch_size, seq_len, num_v_heads, d];
    initial_state [pool_size, num_v_heads, d, d]; initial_state_indices [batch_size]; A_log, dt_bias [num_v_heads];
    a, b [batch_size, seq_len, num_v_heads].

    Returns output [batch_size, seq_len, num_v_heads, d] and intermediate_states
    [batch_size, seq_len, num_v_heads, d, d].
    """
    rows, tokens = v.shape[:2]
    assert q.shape == (rows, tokens, NUM_Q_HEADS, HEAD_SIZE) and k.shape == (rows, tokens, NUM_K_HEADS, HEAD_SIZE)
    assert v.shape == (rows, tokens, NUM_V_HEADS, HEAD_SIZE) and a.shape == b.shape == v.shape[:3]
    assert initial_state.shape[1:] == (NUM_V_HEADS, HEAD_SIZE, HEAD_SIZE)
    assert A_log.shape == dt_bias.shape == (NUM_V_HEADS,)
    if scale == 0.0:
        scale = 1.0 / math.sqrt(HEAD_SIZE)
    log_decay, beta = gates(A_log, a + dt_bias, b)
    reads, states = [], [initial_state[initial_state_indices]]
    for token in range(tokens):
        queries, keys = (per_value_head(x[:, token], NUM_V_HEADS) for x in (q, k))
        read, state = delta_step(states[-1], queries * scale, keys, v[:, token], log_decay[:, token], beta[:, token])
        reads.append(read)
        states.append(state)
    return torch.stack(reads, dim=1).bfloat16(), torch.stack(states[1:], dim=1)
