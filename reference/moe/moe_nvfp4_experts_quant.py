"""Quantizes rows that are sorted by expert to nvfp4: fp4 (e2m1) codes with one e4m3 scale for each BLOCK features.

Expert e has the rows expert_offsets[e] .. expert_offsets[e + 1] - 1, and the global scale g = input_global_scale[e].
The scale of a block is g * max |x| / 6, rounded to e4m3 (to nearest, ties to even, at most 448). Its codes are x * g /
scale, rounded to the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (to nearest, ties to the even code). A block whose scale
is zero has zeros. A byte has two codes, that of the even feature in the low four bits; the highest bit of a code is the
sign of its feature, also where the code is zero.

Scales are listed row by row; kernels write them in tiles of 128 rows and 4 blocks, and pad each expert to whole tiles.
"""

import torch

NUM_EXPERTS = 32
NUM_OFFSETS = 33
K = 7168
K_BYTES = 3584
NUM_K_BLOCKS = 448
BLOCK = 16


def run(
    input: torch.Tensor, input_global_scale: torch.Tensor, expert_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """input bfloat16 [total_rows, k] -> codes int8 [total_rows, k_bytes], scales float8_e4m3fn [..., num_k_blocks]."""
    assert input.shape[1] == K == 2 * K_BYTES
    assert input_global_scale.shape == (NUM_EXPERTS,)
    assert expert_offsets.shape == (NUM_OFFSETS,)
    expert = torch.searchsorted(expert_offsets[1:], torch.arange(input.shape[0], device=input.device), right=True)
    factor = input_global_scale[expert].view(-1, 1, 1)
    blocks = input.float().view(-1, NUM_K_BLOCKS, BLOCK)
    scales = (factor * (blocks.abs().amax(dim=2, keepdim=True) / 6.0)).clamp_max(448.0).to(torch.float8_e4m3fn)
    used = scales.float()
    values = torch.where(used > 0, blocks * (factor / used), 0.0).abs().clamp_max(6.0)
    # The codes as a function of the magnitude: their distance is 0.5 up to 2, 1 up to 4, and 2 up to 6.
    codes = torch.round(torch.where(values < 2, values * 2, torch.where(values < 4, values + 2, values / 2 + 4)))
    pairs = (codes + 8 * blocks.signbit()).view(-1, K_BYTES, 2)
    return (pairs[:, :, 0] + 16 * pairs[:, :, 1]).to(torch.uint8).view(torch.int8), scales.squeeze(2)
