"""One token of Kimi delta attention for each sequence, over a pool of states: queries, keys and values in one row.

A row of mixed_qkv has the heads of queries, those of keys, and those of values. Queries and keys are divided by
sqrt(sum of squares + 1e-6). Each feature of a key has a decay of its own, g = exp(-exp(A_log) softplus(a + dt_bias));
with beta = sigmoid(b), each value head does

    S = S diag(g),    S = S + beta (v - S k) k^T,    output = scale S q

on the state of its sequence's slot (Kimi Team, "Kimi Linear", 2025; SGLang's packed decode). Value head h reads query
and key head h // (num_v_heads / num_k_heads). Slots that are not negative are distinct. A negative one is padding: its
output is 0, and it changes no state. Slots that no sequence names stay. Everything is float32; the output is rounded
once.
"""

import torch

NUM_K_HEADS = 32
NUM_V_HEADS = 32
HEAD_SIZE = 128
QKV_SIZE = 12288


def run(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """mixed_qkv [batch_size, qkv_size]; a [batch_size, num_v_heads, d]; b [batch_size, num_v_heads]; A_log
    [num_v_heads]; dt_bias [num_v_heads, d]; state [pool_size, num_v_heads, d, d]; state_indices [batch_size].

    Returns output [batch_size, num_v_heads, d] and state_out, of the shape of state.
    """
    assert mixed_qkv.shape == (len(a), QKV_SIZE) and b.shape == a.shape[:2] and A_log.shape == (NUM_V_HEADS,)
    assert a.shape[1:] == dt_bias.shape == (NUM_V_HEADS, HEAD_SIZE)
    assert state.shape[1:] == (NUM_V_HEADS, HEAD_SIZE, HEAD_SIZE)
    real = state_indices >= 0
    slots = state_indices[real]
    heads = mixed_qkv[real].unflatten(1, (QKV_SIZE // HEAD_SIZE, HEAD_SIZE)).float()
    q, k, v = heads.split([NUM_K_HEADS, NUM_K_HEADS, NUM_V_HEADS], dim=1)
    q, k = (
        (x / torch.sqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)).repeat_interleave(
            NUM_V_HEADS // NUM_K_HEADS, dim=1
        )
        for x in (q, k)
    )
    decay = torch.exp(-torch.exp(A_log)[:, None] * torch.nn.functional.softplus(a[real] + dt_bias))
    kept = state[slots] * decay[:, :, None, :]
    change = torch.sigmoid(b[real].float())[..., None] * (v - torch.einsum("nhvk,nhk->nhv", kept, k))
    kept = kept + change[..., None] * k[:, :, None, :]
    output, state_out = mixed_qkv.new_zeros(a.shape), state.clone()
    output[real] = torch.einsum("nhvk,nhk->nhv", kept, q * scale).bfloat16()
    state_out[slots] = kept
    return output, state_out
