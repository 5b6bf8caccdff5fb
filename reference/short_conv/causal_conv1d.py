"""All tokens of each sequence through a short causal convolution, over a pool of the last tokens.

Each feature has a filter of its own: y_t = sum over j of weight[j] token[t - WIDTH + 1 + j], and the output is silu(y)
(the depthwise convolution before linear attention and state space models). Tokens before the first of a sequence are
those of its state, the oldest first, or 0 where it has no initial state. Its last tokens become the state. Sequence i
has the tokens from query_start_loc[i] to query_start_loc[i + 1], one at least, and the state in slot cache_indices[i];
slots are distinct. Slots that no sequence names stay. Everything is float32; the output is rounded once.
"""

import torch

CONV_DIM = 8192
WIDTH = 4
STATE_LEN = 3


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, conv_dim]; weight [conv_dim, width]; conv_states [num_states, conv_dim, state_len];
    query_start_loc [num_seqs + 1]; cache_indices, has_initial_state [num_seqs].

    Returns output, of the shape of x, and conv_states_out, of the shape of conv_states.
    """
    assert x.shape[1:] == (CONV_DIM,) and weight.shape == (CONV_DIM, WIDTH)
    assert conv_states.shape[1:] == (CONV_DIM, STATE_LEN)
    output, conv_states_out = torch.zeros_like(x), conv_states.clone()
    for sequence, slot in enumerate(cache_indices.tolist()):
        first, end = query_start_loc[sequence : sequence + 2].tolist()
        before = torch.where(has_initial_state[sequence], conv_states[slot], 0)
        tokens = torch.cat((before, x[first:end].T), dim=1)
        filtered = (tokens.unfold(1, WIDTH, 1).float() * weight[:, None]).sum(dim=2)
        output[first:end] = torch.nn.functional.silu(filtered).T
        conv_states_out[slot] = tokens[:, -STATE_LEN:]
    return output, conv_states_out
