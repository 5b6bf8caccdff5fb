"""One token of a gated delta net for each sequence, over a pool of states: queries, keys and values come in one row.

A row of mixed_qkv has the heads of queries, those of keys, and those of values. Queries and keys are divided by
sqrt(sum of squares + 1e-6). With the decay g = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), each value
head does

    S = g S + beta (v - g S k) k^T,    output = scale S q

on the state of its sequence's slot (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", ICLR 2025; SGLang's packed
decode of Qwen3-Next). Value head h reads query and key head h // (num_v_heads / num_k_heads). Slots that are not
negative are distinct. A negative one is padding: its output is 0, and it changes no state. Slots that no sequence names
stay. Everything is float32; the output is rounded once.
"""

import torch

from ._shared import delta_step, gates, per_value_head, unit

NUM_K_HEADS = 16
NUM_V_HEADS = 32
HEAD_SIZE = 128
QKV_SIZE = 8192


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
    """mixed_qkv [batch_size, qkv_size]; a, b [batch_size, num_v_heads]; A_log, dt_bias [num_v_heads]; state
    [pool_size, num_v_heads, d, d]; state_indices [batch_size].

    Returns output [batch_size, num_v_heads, d] and state_out, of the shape of state.
    """
    assert mixed_qkv.shape == (len(a), QKV_SIZE) and a.shape == b.shape
    assert a.shape[1:] == A_log.shape == dt_bias.shape == (NUM_V_HEADS,)
    assert state.shape[1:] == (NUM_V_HEADS, HEAD_SIZE, HEAD_SIZE)
    q, k, v = mixed_qkv.unflatten(1, (QKV_SIZE // HEAD_SIZE, HEAD_SIZE)).split(
        [NUM_K_HEADS, NUM_K_HEADS, NUM_V_HEADS], dim=1
    )
    log_decay, beta = gates(A_log, a + dt_bias.float(), b)
    queries, keys = (per_value_head(unit(x), NUM_V_HEADS) for x in (q, k))
    real = state_indices >= 0
    slots = state_indices[real]
    output, state_out = torch.zeros_like(v), state.clone()
    read, state_out[slots] = delta_step(
        state[slots], queries[real] * scale, keys[real], v[real], log_decay[real], beta[real]
    )
    output[real] = read.bfloat16()
    return output, state_out
