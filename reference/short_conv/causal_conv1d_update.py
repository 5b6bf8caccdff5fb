"""One token of a short causal convolution for each sequence, over a pool of the last tokens.

Each feature has a filter of its own: y = sum over j of weight[j] token[j], where token[WIDTH - 1] is the new one and
the others are the state, the oldest first; the output is silu(y) (the depthwise convolution before linear attention and
state space models). The state then drops its oldest token and takes in the new one. Slots that are not negative are
distinct. A negative one is padding: its row comes out as it went in, because kernels write outputs over inputs, and it
changes no state. Slots that no sequence names stay. Everything is float32; the output is rounded once.
"""

import torch

CONV_DIM = 8192
WIDTH = 4
STATE_LEN = 3


def run(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, conv_state_indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [batch_size, conv_dim]; conv_state [num_states, conv_dim, state_len]; weight [conv_dim, width];
    conv_state_indices [batch_size].

    Returns output, of the shape of x, and conv_state_out, of the shape of conv_state.
    """
    assert x.shape[1:] == (CONV_DIM,) and weight.shape == (CONV_DIM, WIDTH)
    assert conv_state.shape[1:] == (CONV_DIM, STATE_LEN)
    real = conv_state_indices >= 0
    slots = conv_state_indices[real]
    tokens = torch.cat((conv_state[slots], x[real].unsqueeze(2)), dim=2)
    output, conv_state_out = x.clone(), conv_state.clone()
    output[real] = torch.nn.functional.silu((tokens.float() * weight).sum(dim=2)).bfloat16()
    conv_state_out[slots] = tokens[:, :, 1:]
    return output, conv_state_out
