"""Grouped product of the experts of a mixture of experts: activations in fp8 (e4m3), weights in int4.

Rows are sorted by expert: expert e has the rows expert_offsets[e] .. expert_offsets[e + 1] - 1, and
output[i] = a_scale a[i] w[e]' for these. a_scale is one scale for all activations. A byte of b has two weights, signed
numbers of -8 .. 7 in two's complement: the low four bits are that of the even feature, the high ones that of the next.
w = int4 * scale, with one scale for BLOCK consecutive features of an output column. Products are computed in float32
and rounded once.
"""

import torch

NUM_EXPERTS = 32
NUM_OFFSETS = 33
N = 4096
K = 7168
K_BYTES = 3584
NUM_K_BLOCKS = 56
ONE = 1
BLOCK = 128


def unpacked(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 [n, k_bytes] and scales [n, num_k_blocks] -> float32 weights [n, k]."""
    # A shift of a signed byte repeats its sign.
    low, high = (codes << 4) >> 4, codes >> 4
    values = torch.stack([low, high], dim=2).view(N, NUM_K_BLOCKS, BLOCK)
    return (values * scales.float().unsqueeze(2)).flatten(1)


def run(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, expert_offsets: torch.Tensor
) -> torch.Tensor:
    """a float8_e4m3fn [total_rows, k], b int8 [num_experts, n, k_bytes] -> output bfloat16 [total_rows, n]."""
    assert a.shape[1] == K
    assert a_scale.shape == (ONE,)
    assert b.shape == (NUM_EXPERTS, N, K_BYTES)
    assert b_scale.shape == (NUM_EXPERTS, N, NUM_K_BLOCKS)
    assert expert_offsets.shape == (NUM_OFFSETS,)
    rows = a.float() * a_scale
    output = rows.new_zeros(len(rows), N)
    ends = expert_offsets.tolist()
    # One expert at a time, and only those with rows: all of them in float32 would take up to 4 GB.
    for expert in range(NUM_EXPERTS):
        first, last = ends[expert], ends[expert + 1]
        if first < last:
            output[first:last] = rows[first:last] @ unpacked(b[expert], b_scale[expert]).T
    return output.to(torch.bfloat16)
