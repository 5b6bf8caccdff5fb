"""Keys of chosen slots of DeepSeek's packed fp8 cache in bfloat16, for attention that reads no fp8.

A row of the cache is a token: HEAD_DIM_CKV codes in e4m3, NUM_GROUPS float32 scales, and HEAD_DIM_KPE rotary features
in bfloat16, BYTES_PER_TOKEN bytes in all (FlashMLA's format for DeepSeek-V3.2-Exp). GROUP_SIZE consecutive codes share
a scale: a compressed feature is code * scale, in float32, rounded to bfloat16; rotary features are copied.

Row i of the keys is that of slots[i]: none is negative, and several may be equal. Slots that are not chosen are never
read, so they may hold NaN.
"""

import torch

HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
GROUP_SIZE = 128
NUM_GROUPS = 4
BYTES_PER_TOKEN = 656


def run(kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """kv_cache [num_slots, bytes_per_token] float8_e4m3fn, slots [num_tokens] -> keys [num_tokens, head_dim_key]."""
    assert kv_cache.shape[1] == BYTES_PER_TOKEN
    # Rows of bytes: not every fp8 operation can gather.
    rows = kv_cache.view(torch.uint8)[slots]
    end = BYTES_PER_TOKEN - 2 * HEAD_DIM_KPE
    codes = rows[:, :HEAD_DIM_CKV].view(kv_cache.dtype).float().unflatten(1, (NUM_GROUPS, GROUP_SIZE))
    scales = rows[:, HEAD_DIM_CKV:end].view(torch.float32)
    ckv = (codes * scales.unsqueeze(2)).flatten(1).to(torch.bfloat16)
    return torch.cat((ckv, rows[:, end:].view(torch.bfloat16)), dim=1)
