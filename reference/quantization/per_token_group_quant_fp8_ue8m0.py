"""Dynamic quantisation to fp8 (e4m3) with a power of two as the scale of each group of a token's features.

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
BIAS = 127


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, hidden_size] -> codes, same shape, float8_e4m3fn, and scales [num_tokens, num_words] int32."""
    assert x.shape[1] == HIDDEN_SIZE
    groups = x.float().view(-1, NUM_GROUPS, GROUP_SIZE)
    mantissa, exponent = torch.frexp(groups.abs().amax(dim=2).clamp_min(EPS) / E4M3_MAX)
    # frexp's mantissa is in 0.5..1: the exponent is the one wanted, but for a power of two itself.
    exponent = exponent - (mantissa == 0.5).int()
    codes = torch.ldexp(groups, -exponent[:, :, None]).view(x.shape).to(torch.float8_e4m3fn)
    shifts = torch.arange(0, 32, 8, device=x.device)
    words = ((exponent + BIAS).view(-1, NUM_WORDS, 4) << shifts).sum(dim=2)
    return codes, words.to(torch.int32)
