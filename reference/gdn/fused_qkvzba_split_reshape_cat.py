"""Splits the two projections of a gated delta net into what comes after them: copies, bit for bit (Qwen3-Next).

Both projections have their features key head by key head. Those of mixed_qkvz are the query and the key of the head,
the values of its NUM_V_HEADS / NUM_K_HEADS value heads, and their output gates z; those of mixed_ba are b of these
value heads, and then a. mixed_qkv has the queries of all heads, then the keys, then the values, as the short
convolution takes them.
"""

import torch

NUM_K_HEADS = 4
NUM_V_HEADS = 8
HEAD_SIZE = 128
QKVZ_SIZE = 3072
BA_SIZE = 16
QKV_SIZE = 2048


def run(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed_qkvz [num_tokens, qkvz_size]; mixed_ba [num_tokens, ba_size].

    Returns mixed_qkv [num_tokens, qkv_size]; z [num_tokens, num_v_heads, head_size]; b, a [num_tokens, num_v_heads].
    """
    assert mixed_qkvz.shape[1] == QKVZ_SIZE
    assert mixed_ba.shape[1] == BA_SIZE
    values = NUM_V_HEADS // NUM_K_HEADS * HEAD_SIZE
    heads = mixed_qkvz.unflatten(1, (NUM_K_HEADS, QKVZ_SIZE // NUM_K_HEADS))
    q, k, v, z = (each.flatten(1) for each in heads.split([HEAD_SIZE, HEAD_SIZE, values, values], dim=2))
    gates = mixed_ba.unflatten(1, (NUM_K_HEADS, 2, NUM_V_HEADS // NUM_K_HEADS))
    b, a = (each.flatten(1) for each in gates.unbind(2))
    return torch.cat((q, k, v), dim=1), z.unflatten(1, (NUM_V_HEADS, HEAD_SIZE)), b, a
