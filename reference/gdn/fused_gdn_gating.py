"""Gates of a gated delta net: the logarithm of the decay and the strength of the update.

g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) (Yang, Kautz and Hatamizadeh, "Gated Delta Networks",
ICLR 2025; Qwen3-Next). Both are computed and returned in float32.
"""

import torch

from ._shared import gates

NUM_V_HEADS = 32


def run(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log, dt_bias [num_v_heads]; a, b [num_tokens, num_v_heads]. Returns g and beta [num_tokens, num_v_heads]."""
    assert a.shape == b.shape and a.shape[1:] == A_log.shape == dt_bias.shape == (NUM_V_HEADS,)
    return gates(A_log, a + dt_bias.float(), b)
