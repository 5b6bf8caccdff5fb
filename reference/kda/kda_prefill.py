"""All tokens of each sequence through Kimi delta attention, from a state that is given to one that is returned.

Each feature of a key has a decay of its own, g = exp(-exp(A_log) softplus(a + dt_bias)); with beta = sigmoid(b), each
head does, token by token,

    S = S diag(g),    S = S + beta (v - S k) k^T,    output = scale S q

(Kimi Team, "Kimi Linear", 2025). Sequence i has the tokens from cu_seqlens[i] to cu_seqlens[i + 1]; one without tokens
keeps its state. Queries and keys are used as they are; callers normalize them. States are [d_v, d_k]. Gates are
float32, and states float64 until they are returned: kernels compute chunks of tokens at once instead, which rounds the
state less often than float32 would at each token.
"""

import torch

NUM_Q_HEADS = 32
NUM_K_HEADS = 32
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
    """q [total_seq_len, num_q_heads, d]; k [total_seq_len, num_k_heads, d]; v, a [total_seq_len, num_v_heads, d]; state
    [num_seqs, num_v_heads, d, d]; A_log [num_v_heads]; dt_bias [num_v_heads, d]; b [total_seq_len, num_v_heads];
    cu_seqlens [num_seqs + 1].

    Returns output [total_seq_len, num_v_heads, d] and new_state, of the shape of state.
    """
    assert NUM_Q_HEADS == NUM_K_HEADS == NUM_V_HEADS
    assert q.shape == k.shape == v.shape == a.shape == (len(b), NUM_V_HEADS, HEAD_SIZE)
    assert state.shape == (len(cu_seqlens) - 1, NUM_V_HEADS, HEAD_SIZE, HEAD_SIZE)
    assert dt_bias.shape == (NUM_V_HEADS, HEAD_SIZE) and b.shape[1:] == A_log.shape == (NUM_V_HEADS,)
    log_decay = -torch.exp(A_log)[:, None] * torch.nn.functional.softplus(a + dt_bias)
    queries, keys, values, new_state, log_decay, beta = (
        x.double() for x in (q, k, v, state, log_decay, torch.sigmoid(b.float()))
    )
    output, decay = torch.zeros_like(v), torch.exp(log_decay)
    lengths = cu_seqlens.diff().tolist()
    for position in range(max(lengths, default=0)):
        here = [sequence for sequence, length in enumerate(lengths) if position < length]
        token = cu_seqlens[here] + position
        key = keys[token]
        kept = new_state[here] * decay[token][:, :, None, :]
        change = beta[token][..., None] * (values[token] - torch.einsum("nhvk,nhk->nhv", kept, key))
        kept = kept + change[..., None] * key[:, :, None, :]
        output[token] = torch.einsum("nhvk,nhk->nhv", kept, queries[token] * scale).bfloat16()
        new_state[here] = kept
    return output, new_state.float()
