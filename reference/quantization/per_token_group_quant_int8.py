"""Dynamic quantization to int8 with one scale for each group of consecutive features of a token.

scale = max(max |x|, EPS) / 127 over the group, in float32. code = x / scale without its fraction: it is truncated
toward zero, as the kernels do, and not rounded to nearest. Codes are in -127..127. The quotient is 127 x over the
maximum, which is exact where it is an integer; x over the rounded scale can turn the largest element's 127 into 126. It
is computed in float64, because 127 x may be beyond float32.
"""

import torch

HIDDEN_SIZE = 7168
GROUP_SIZE = 128
NUM_GROUPS = 56
INT8_MAX = 127.0
EPS = 1e-10


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, hidden_size] -> codes, same shape, int8, and scales [num_tokens, num_groups] float32."""
    assert x.shape[1] == HIDDEN_SIZE
    groups = x.float().unflatten(1, (NUM_GROUPS, GROUP_SIZE))
    largest = groups.abs().amax(dim=2).clamp_min(EPS)
    quotients = groups.double() * INT8_MAX / largest[:, :, None]
    # The conversion to an integer drops the fraction.
    return quotients.flatten(1).to(torch.int8), largest / INT8_MAX
