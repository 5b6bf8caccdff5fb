"""Dynamic quantization to fp8 (e4m3) with one scale for each group of consecutive features of a token.

scale = max(max |x|, EPS) / 448 over the group, in float32, and code = x / scale rounded to the nearest e4m3 number,
ties to even; codes times scale approximate x. 448 is the largest e4m3 number, so no code overflows. DeepSeek-V3
quantizes the activations of its block-scaled products in this way.
"""

import torch

HIDDEN_SIZE = 7168
GROUP_SIZE = 128
NUM_GROUPS = 56
E4M3_MAX = 448.0
EPS = 1e-10


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, hidden_size] -> codes, same shape, float8_e4m3fn, and scales [num_tokens, num_groups] float32."""
    assert x.shape[1] == HIDDEN_SIZE
    groups = x.float().unflatten(1, (NUM_GROUPS, GROUP_SIZE))
    scales = groups.abs().amax(dim=2).clamp_min(EPS) / E4M3_MAX
    return (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn), scales
