"""One token of Mamba2's state space model for each sequence, over a pool of states.

With the step dt = softplus(dt + dt_bias), each state decays and takes in the token, and C reads it:

    S = exp(A dt) S + dt x B^T,    output = S C + D x

(Dao and Gu, "Transformers are SSMs", ICML 2024; the selective state update of Nemotron-H). Consecutive heads share B
and C. Slots that are not negative are distinct. A negative one is padding: its output is 0, and it changes no state.
Slots that no sequence names stay. Everything is float32; output and state are rounded once, each from the float32
state.
"""

import torch

NHEADS = 128
HEAD_DIM = 64
DSTATE = 128
NGROUPS = 8
#: Otherwise float32.
BF16_STATE = True


def run(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """state [state_cache_size, nheads, head_dim, dstate]; x, dt [batch_size, nheads, head_dim]; A [nheads, head_dim,
    dstate]; B, C [batch_size, ngroups, dstate]; D, dt_bias [nheads, head_dim]; state_batch_indices [batch_size].

    Returns output, of the shape of x, and new_state, of the shape of state.
    """
    assert state.shape[1:] == A.shape == (NHEADS, HEAD_DIM, DSTATE)
    assert x.shape[1:] == D.shape == dt_bias.shape == (NHEADS, HEAD_DIM) and dt.shape == x.shape
    assert B.shape == C.shape == (len(x), NGROUPS, DSTATE)
    real = state_batch_indices >= 0
    slots, features = state_batch_indices[real], x[real].float()
    step = torch.nn.functional.softplus(dt[real] + dt_bias.float()).unsqueeze(-1)
    writes, reads = (each[real].repeat_interleave(NHEADS // NGROUPS, dim=1).unsqueeze(2) for each in (B, C))
    states = state[slots] * torch.exp(A * step) + step * features.unsqueeze(-1) * writes
    output, new_state = torch.zeros_like(x), state.clone()
    output[real] = ((states * reads).sum(dim=-1) + D * features).bfloat16()
    new_state[slots] = states.bfloat16() if BF16_STATE else states
    return output, new_state
