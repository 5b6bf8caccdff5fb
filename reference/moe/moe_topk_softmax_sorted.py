"""The router of a mixture of experts, and the order of the chosen rows by expert, in which grouped products take them.

Each token's TOP_K experts with the largest logits are chosen; of equal logits, those of lower index. Their weights are
the softmax over the chosen logits, in float32, rounded once. Pair t * TOP_K + j is choice j of token t, where a token's
choices are in the order of their experts. Rows are the pairs sorted by expert, and by pair for the same expert.

gammas and row_pairs have the weight and the pair of each row, positions the row of each pair, and expert_counts the
number of rows of each expert.
"""

import torch

NUM_EXPERTS = 128
TOP_K = 8


def run(routing_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """routing_logits bfloat16 [seq_len, num_experts] -> gammas, expert_counts, row_pairs and positions.

    They are bfloat16 [num_pairs], and int32 [num_experts], [num_pairs] and [seq_len, top_k].
    """
    assert routing_logits.shape[1] == NUM_EXPERTS
    # A stable sort puts the lower index first among equal values; topk does not specify an order.
    experts = routing_logits.argsort(descending=True, stable=True)[:, :TOP_K].sort().values
    weights = torch.softmax(routing_logits.gather(1, experts).float(), dim=1)
    pairs = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=NUM_EXPERTS)
    positions = pairs.argsort(stable=True).view(experts.shape)
    gammas = weights.flatten()[pairs].to(torch.bfloat16)
    return gammas, counts.to(torch.int32), pairs.to(torch.int32), positions.to(torch.int32)
