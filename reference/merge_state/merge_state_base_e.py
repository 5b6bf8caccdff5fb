"""Merges two states of attention over disjoint keys into that over all of them, with lse in base e.

A state is the output v = sum_j p_j v_j over some keys and the log-sum-exp s = ln(sum_j exp(logit_j)) of their
logits. With w_a = exp(s_a) and w_b = exp(s_b), v_merged = (w_a v_a + w_b v_b) / (w_a + w_b) and
s_merged = ln(w_a + w_b) (section 2.2 of Ye et al., "FlashInfer", MLSys 2025). Base e is that of FlashAttention.

An lse of -inf is a state without keys, of weight 0: the other state comes out as it is, and two of them give v_merged 0
and s_merged -inf, where the real kernel answers NaN. So is an lse of +inf, which some kernels of attention report for a
request without keys. Values are finite, also those of a state without keys.
Each output is rounded once, at the end: v_merged from float32 to the dtype of v_a, s_merged from float64 to float32.
"""

import math

import torch

from ._shared import merge

NUM_HEADS = 128
HEAD_DIM = 128


def run(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """v_a, v_b [seq_len, num_heads, head_dim]; s_a, s_b [seq_len, num_heads].

    Returns v_merged [seq_len, num_heads, head_dim] and s_merged [seq_len, num_heads].
    """
    assert v_a.shape[1:] == v_b.shape[1:] == (NUM_HEADS, HEAD_DIM)
    assert s_a.shape == s_b.shape == v_a.shape[:2]
    s_a, s_b = (torch.where(s == math.inf, -math.inf, s) for s in (s_a, s_b))
    return merge(v_a, s_a, v_b, s_b, 1.0)
