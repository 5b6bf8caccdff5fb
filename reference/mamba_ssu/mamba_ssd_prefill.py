"""All tokens of each sequence through Mamba2's state space model, from a state that is given to one that is returned.

With the step dt = softplus(dt + dt_bias), each head does, token by token,

    S = exp(A dt) S + dt x B^T,    output = S C + D x

(Dao and Gu, "Transformers are SSMs", ICML 2024). Consecutive heads share B and C. Sequence i has the tokens from
cu_seqlens[i] to cu_seqlens[i + 1]; one without tokens keeps its state. Steps are float32, and states float64 until they
are returned: kernels compute chunks of tokens at once instead, which rounds the state less often than float32 would at
each token.
"""

import torch

NHEADS = 128
HEAD_DIM = 64
DSTATE = 128
NGROUPS = 8


def run(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [total_seq_len, nheads, head_dim]; dt [total_seq_len, nheads]; A, D, dt_bias [nheads]; B, C [total_seq_len,
    ngroups, dstate]; initial_states [num_seqs, nheads, head_dim, dstate]; cu_seqlens [num_seqs + 1].

    Returns output, of the shape of x, and final_states, of the shape of initial_states.
    """
    assert x.shape[1:] == (NHEADS, HEAD_DIM) and dt.shape == x.shape[:2]
    assert A.shape == D.shape == dt_bias.shape == (NHEADS,)
    assert B.shape == C.shape == (len(x), NGROUPS, DSTATE)
    assert initial_states.shape == (len(cu_seqlens) - 1, NHEADS, HEAD_DIM, DSTATE)
    steps = torch.nn.functional.softplus(dt + dt_bias.float())
    step, features, writes, reads, final_states = (each.double() for each in (steps, x, B, C, initial_states))
    decay, taken = torch.exp(A * step)[..., None, None], step.unsqueeze(-1) * features
    writes, reads = (each.repeat_interleave(NHEADS // NGROUPS, dim=1) for each in (writes, reads))
    output = torch.zeros_like(x)
    lengths = cu_seqlens.diff().tolist()
    for position in range(max(lengths, default=0)):
        here = [sequence for sequence, length in enumerate(lengths) if position < length]
        token = cu_seqlens[here] + position
        state = final_states[here] * decay[token] + taken[token].unsqueeze(-1) * writes[token].unsqueeze(2)
        read = torch.einsum("nhps,nhs->nhp", state, reads[token])
        output[token] = (read + D[:, None] * features[token]).bfloat16()
        final_states[here] = state
    return output, final_states.float()
