"""Grouped product of the experts of a mixture of experts, with block-scaled fp8 (e4m3) tensors.

Rows are sorted by expert: expert e has the rows expert_offsets[e] .. expert_offsets[e + 1] - 1, and
output[i] = a[i] b[e]' for these. a has one scale for each BLOCK consecutive features of a row, b one for each
BLOCK x BLOCK weights. Products are computed in float32 and rounded once.
"""

import torch

from ._shared import dequantize

NUM_EXPERTS = 32
NUM_OFFSETS = 33
N = 4096
K = 7168
NUM_N_BLOCKS = 32
NUM_K_BLOCKS = 56
BLOCK = 128


def run(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, expert_offsets: torch.Tensor
) -> torch.Tensor:
    """a float8_e4m3fn [total_rows, k], b float8_e4m3fn [num_experts, n, k] -> output bfloat16 [total_rows, n]."""
    assert a.shape[1] == K
    assert a_scale.shape[1] == NUM_K_BLOCKS
    assert b.shape == (NUM_EXPERTS, N, K)
    assert b_scale.shape == (NUM_EXPERTS, NUM_N_BLOCKS, NUM_K_BLOCKS)
    assert expert_offsets.shape == (NUM_OFFSETS,)
    rows = (a.float().view(-1, NUM_K_BLOCKS, BLOCK) * a_scale.unsqueeze(2)).flatten(1)
    output = rows.new_zeros(len(rows), N)
    ends = expert_offsets.tolist()
    # One expert at a time, and only those with rows: all of them in float32 would take up to 4 GB.
    for expert in range(NUM_EXPERTS):
        first, last = ends[expert], ends[expert + 1]
        if first < last:
            output[first:last] = rows[first:last] @ dequantize(b[expert], b_scale[expert], BLOCK).T
    return output.to(torch.bfloat16)
