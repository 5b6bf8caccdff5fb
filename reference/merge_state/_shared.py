"""The function that the merge_state references share."""

import torch


def merge(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, log_of_base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two attention states into one: outputs v [seq_len, num_heads, head_dim], lse s [seq_len, num_heads].

    log_of_base is the natural logarithm of the base of s. Weights and lse are computed in float64 (they are few
    compared with the values), so chains of merges add no errors. Returns v in the dtype of v_a and s in float32.
    """
    a, b = s_a.double(), s_b.double()
    # The maximum of a row without keys on both sides is -inf; subtracting 0 instead keeps its weights at exp(-inf) = 0.
    maximum = torch.maximum(a, b).nan_to_num(neginf=0.0)
    weight_a, weight_b = torch.exp((a - maximum) * log_of_base), torch.exp((b - maximum) * log_of_base)
    total = weight_a + weight_b
    s_merged = maximum + torch.log(total) / log_of_base
    # Where nothing has weight, both weights are 0 whatever they are divided by, and log(0) makes the lse -inf.
    divisor = torch.where(total > 0, total, 1.0)
    share_a, share_b = ((weight / divisor).float().unsqueeze(-1) for weight in (weight_a, weight_b))
    v_merged = share_a * v_a.float() + share_b * v_b.float()
    return v_merged.to(v_a.dtype), s_merged.float()
