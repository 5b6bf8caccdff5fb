"""The end of a mixture of experts: gathers each token's rows from those sorted by expert, and adds them up by weight.

output[t] = sum over j with topk_ids[t, j] >= 0 of topk_weights[t, j] * hidden_states[src2dst[t, j]], in float32 and
rounded once. A negative id marks an expert of another rank, whose place in src2dst is not looked at. Rows that no token
names are never read, so they may hold NaN. A token without experts here has output 0.
"""

import torch

TOP_K = 9
HIDDEN_SIZE = 7168


def run(
    hidden_states: torch.Tensor, src2dst: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states bfloat16 [num_rows, hidden_size]; the others [seq_len, top_k] -> [seq_len, hidden_size]."""
    assert hidden_states.shape[1] == HIDDEN_SIZE
    assert src2dst.shape[1] == topk_ids.shape[1] == topk_weights.shape[1] == TOP_K
    elsewhere = topk_ids < 0
    rows = hidden_states[src2dst.masked_fill(elsewhere, 0)]
    terms = torch.where(elsewhere.unsqueeze(2), 0.0, rows * topk_weights.unsqueeze(2))
    return terms.sum(dim=1).to(torch.bfloat16)
