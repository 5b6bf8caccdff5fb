"""SwiGLU's gated activation, quantized to fp8 (e4m3) with one scale for each group of consecutive features of a token.

y = silu(gate) * up, where gate is the first half of a row and up the second one, and silu(x) = x / (1 + exp(-x)).
Then scale = max(max |y|, EPS) / 448 over each group of y, and code = y / scale rounded to the nearest e4m3 number, ties
to even; codes times scale approximate y. All of it in float32; y is not rounded in between. Experts of DeepSeek-V3
quantize the activations of their second product in this way.
"""

import torch

INTERMEDIATE_SIZE = 2048
GATE_UP_SIZE = 4096
GROUP_SIZE = 128
NUM_GROUPS = 16
E4M3_MAX = 448.0
EPS = 1e-10


def run(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up bfloat16 [num_tokens, gate_up_size] -> codes float8_e4m3fn and scales float32.

    Codes are [num_tokens, intermediate_size], scales [num_tokens, num_groups].
    """
    assert gate_up.shape[1] == GATE_UP_SIZE
    gate, up = gate_up.float().chunk(2, dim=1)
    groups = (gate * torch.sigmoid(gate) * up).unflatten(1, (NUM_GROUPS, GROUP_SIZE))
    scales = groups.abs().amax(dim=2).clamp_min(EPS) / E4M3_MAX
    return (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn), scales
