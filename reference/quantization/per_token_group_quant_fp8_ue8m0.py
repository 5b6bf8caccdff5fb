"""Dynamic quantization to fp8 (e4m3) with a power of two as the scale of each group of a token's features.

scale = the smallest power of two that is at least max(max |x|, EPS) / 448 over the group, and code = x / scale rounded
to the nearest e4m3 number, ties to even. A scale is stored as its exponent plus 127 in a byte (ue8m0). Four consecutive
groups share an int32, the first of them in its lowest byte, as Blackwell's tensor cores read them.
"""

import torch

HIDDEN_SIZE = 7168
GROUP_SIZE = 128
NUM_GROUPS = 56
NUM_WORDS = 14
E4M3_MAX = 448.0
EPS = 1e-10
#: Added to the bits of a float32, this carries into the exponent unless the number is a power of two.
MANTISSA = 0x7FFFFF


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, hidden_size] -> codes, same shape, float8_e4m3fn, and scales [num_tokens, num_words] int32."""
    assert x.shape[1] == HIDDEN_SIZE
    groups = x.float().unflatten(1, (NUM_GROUPS, GROUP_SIZE))
    scales = groups.abs().amax(dim=2).clamp_min(EPS) / E4M3_MAX
    exponents = (scales.view(torch.int32) + MANTISSA) >> 23
    powers = (exponents << 23).view(torch.float32)
    codes = (groups / powers[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    shifts = torch.tensor([0, 8, 16, 24], device=x.device)
    return codes, (exponents.unflatten(1, (NUM_WORDS, 4)) << shifts).sum(dim=2).to(torch.int32)
