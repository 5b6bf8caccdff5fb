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
    values = torch.stack([low, high], dim=2).float().view(N, NUM_K_BLOCKS, BLOCK)
    return (values * scales.float().unsqueeze(2)).flatten(1)


def run(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, expert_offsets: torch.Tensor
) -> torch.Tensor:
    """a float8_e4m3fn [total_rows, k], b int8 [num_experts, n, k_bytes] -> output bfloat16 [total_rows, n]."""
    assert a.shape == (a.shape[0], K)
    assert a_scale.shape == (ONE,)
    assert b.shape == (NUM_EXPERTS, N, K_BYTES)
    assert b_scale.shape == (NUM_EXPERTS, N, NUM_K_BLOCKS)
    assert expert_offsets.shape == (NUM_OFFSETS,)
    rows = a.float() * a_scale
    # One expert at a time, and only those with rows: all of them in float32 would take up to 4 GB.
    products = [
        part @ unpacked(b[expert], b_scale[expert]).T
        for expert, part in enumerate(rows.split(expert_offsets.long().diff().tolist()))
        if len(part)
    ]
    return torch.cat([rows.new_zeros(0, N), *products]).to(torch.bfloat16)
