"""One token of a gated delta net for each sequence, with the state given and returned (k-last: [.., d_v, d_k]).

With the decay g = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), each value head does

    S = g S + beta (v - g S k) k^T,    output = scale S q

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", ICLR 2025). Value head h reads query and key head
h // (num_v_heads / num_q_heads). Queries and keys are used as they are; callers normalize them. A scale of 0 stands for
1 / sqrt(head_size). Everything is float32; the output is rounded once.
"""

import math

import torch

from ._shared import delta_step, gates, per_value_head

SEQ_LEN = 1
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
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [batch_size, 1, num_q_heads, d]; v [batch_size, 1, num_v_heads, d]; state [batch_size, num_v_heads, d, d];
    A_log, dt_bias [num_v_heads]; a, b [batch_size, 1, num_v_heads].

    Returns output [batch_size, 1, num_v_heads, d] and new_state, of the shape of state.
    """
    rows = len(state)
    assert state.shape == (rows, NUM_V_HEADS, HEAD_SIZE, HEAD_SIZE)
    assert q.shape == (rows, SEQ_LEN, NUM_Q_HEADS, HEAD_SIZE) and k.shape == (rows, SEQ_LEN, NUM_K_HEADS, HEAD_SIZE)
    assert v.shape == (rows, SEQ_LEN, NUM_V_HEADS, HEAD_SIZE) and a.shape == b.shape == v.shape[:3]
    assert A_log.shape == dt_bias.shape == (NUM_V_HEADS,)
    if scale == 0.0:
        scale = 1.0 / math.sqrt(HEAD_SIZE)
    log_decay, beta = gates(A_log, (a + dt_bias).squeeze(1), b.squeeze(1))
    queries, keys = (per_value_head(x.squeeze(1), NUM_V_HEADS) for x in (q, k))
    output, new_state = delta_step(state, queries * scale, keys, v.squeeze(1), log_decay, beta)
    return output.unsqueeze(1).bfloat16(), new_state
