"""Grouped product of the experts of a mixture of experts, with nvfp4 tensors: fp4 (e2m1) with e4m3 block scales.

Rows are sorted by expert: expert e has the rows expert_offsets[e] .. expert_offsets[e + 1] - 1, and
output[i] = alphas[e] a[i] b[e]' for these. A byte has two fp4 codes, that of the even feature in the low four bits; of
a code, three bits choose the magnitude from 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the highest is the sign. BLOCK consecutive
features share one scale, an e4m3 number. alphas have the product of the global scales of both tensors. Products are
computed in float32 and rounded once.
"""

import torch

from ._shared import dequantize_fp4

NUM_EXPERTS = 32
NUM_OFFSETS = 33
N = 4096
K = 7168
K_BYTES = 3584
NUM_K_BLOCKS = 448
BLOCK = 16


def run(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alphas: torch.Tensor,
    expert_offsets: torch.Tensor,
) -> torch.Tensor:
    """a int8 [total_rows, k_bytes], b int8 [num_experts, n, k_bytes] -> output bfloat16 [total_rows, n]."""
    assert a.shape[1] == K_BYTES == K // 2
    assert a_scale.shape[1] == NUM_K_BLOCKS
    assert b.shape == (NUM_EXPERTS, N, K_BYTES)
    assert b_scale.shape == (NUM_EXPERTS, N, NUM_K_BLOCKS)
    assert alphas.shape == (NUM_EXPERTS,)
    assert expert_offsets.shape == (NUM_OFFSETS,)
    rows = dequantize_fp4(a, a_scale, BLOCK)
    output = rows.new_zeros(len(rows), N)
    ends = expert_offsets.tolist()
    # One expert at a time, and only those with rows: all of them in float32 would take up to 4 GB.
    for expert in range(NUM_EXPERTS):
        first, last = ends[expert], ends[expert + 1]
        if first < last:
            output[first:last] = rows[first:last] @ dequantize_fp4(b[expert], b_scale[expert], BLOCK).T * alphas[expert]
    return output.to(torch.bfloat16)
