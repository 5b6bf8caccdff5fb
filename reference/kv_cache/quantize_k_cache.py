"""The row of each new token for DeepSeek's packed fp8 cache: quantizes the compressed key, copies the rotated part.

GROUP_SIZE consecutive features of k_nope share a scale: scale = max |x| / 448 over the group, in float32, and
code = x / scale rounded to the nearest e4m3 number, ties to even. Scales have no minimum: a group of zeros has the
scale 0 and codes 0. Any other group has a magnitude of at least 448 * 2^-126, so its scale is a normal number.

A row of the cache is codes, scales and k_rope_out one after the other, 656 bytes for 512 and 64 features (FlashMLA's
format for DeepSeek-V3.2-Exp). Kernels write the three parts into the memory of rows.
"""

import torch

HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
GROUP_SIZE = 128
NUM_GROUPS = 4
E4M3_MAX = 448.0


def run(k_nope: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_nope [num_tokens, head_dim_ckv], k_rope [num_tokens, head_dim_kpe].

    Returns codes, shaped as k_nope, float8_e4m3fn; scales [num_tokens, num_groups] float32; and k_rope_out, as k_rope.
    """
    assert k_nope.shape[1] == HEAD_DIM_CKV
    assert k_rope.shape[1] == HEAD_DIM_KPE
    groups = k_nope.float().unflatten(1, (NUM_GROUPS, GROUP_SIZE))
    scales = groups.abs().amax(dim=2) / E4M3_MAX
    quotients = torch.where(scales[:, :, None] > 0, groups / scales[:, :, None], 0.0)
    return quotients.flatten(1).to(torch.float8_e4m3fn), scales, k_rope.clone()
