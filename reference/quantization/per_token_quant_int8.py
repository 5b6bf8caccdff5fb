"""Dynamic quantization to int8 with one scale per token.

scale = max(max |x|, EPS) / 127 over the token's features, in float32. code = x / scale rounded to the nearest integer,
halves away from zero; codes are in -127..127. The quotient is 127 x over the maximum, which is exact where it is an
integer. It is computed in float64, because 127 x may be beyond float32.
"""

import torch

HIDDEN_SIZE = 4096
INT8_MAX = 127.0
EPS = 1e-10


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, hidden_size] -> codes, same shape, int8, and scales [num_tokens] float32."""
    assert x.shape[1] == HIDDEN_SIZE
    values = x.float()
    largest = values.abs().amax(dim=1).clamp_min(EPS)
    quotients = values.double() * INT8_MAX / largest[:, None]
    # The conversion to an integer drops the fraction.
    return (quotients + torch.sign(quotients) / 2).to(torch.int8), largest / INT8_MAX
