"""Shared experts appended to the choice of routed ones, with weights of their own for each token.

The first columns are the routed experts, as they are; the last ones are the shared experts, NUM_EXPERTS and up, with
their weights. Nothing is computed.
"""

import torch

NUM_EXPERTS = 512
ROUTED_TOP_K = 10
NUM_FUSED_SHARED_EXPERTS = 1
TOP_K = 11


def run(
    routed_ids: torch.Tensor, routed_weights: torch.Tensor, shared_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """routed_ids int32, routed_weights float32 [seq_len, routed_top_k] -> topk_weights, topk_ids [seq_len, top_k]."""
    assert routed_ids.shape[1] == routed_weights.shape[1] == ROUTED_TOP_K == TOP_K - NUM_FUSED_SHARED_EXPERTS
    assert shared_weights.shape[1] == NUM_FUSED_SHARED_EXPERTS
    shared = torch.arange(NUM_EXPERTS, NUM_EXPERTS + NUM_FUSED_SHARED_EXPERTS, device=routed_ids.device)
    shared_ids = shared.to(torch.int32).expand(shared_weights.shape)
    return torch.cat((routed_weights, shared_weights), dim=1), torch.cat((routed_ids, shared_ids), dim=1)
