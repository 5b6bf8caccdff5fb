"""Sizes of the products of each expert, for the grouped products of int4 weights and fp8 activations.

Those kernels compute the transposed product, so problem_sizes1[e] is (2 * INTERMEDIATE_SIZE, rows, HIDDEN_SIZE), the
columns out, rows and columns in of the first product (gate and up); problem_sizes2[e] is (HIDDEN_SIZE, rows,
INTERMEDIATE_SIZE), those of the second. rows is how often topk_ids has the expert. expert_offsets[e] is the first row
of expert e among rows that are sorted by expert, and expert_offsets[NUM_EXPERTS] the number of all rows. Pairs of
experts on other ranks get no row. Their id is -1 or NUM_EXPERTS: with expert parallelism, SGLang writes the latter.
"""

import torch

NUM_EXPERTS = 32
TOP_K = 8
HIDDEN_SIZE = 7168
INTERMEDIATE_SIZE = 2048
NUM_OFFSETS = 33
NUM_SIZES = 3


def run(topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_ids int32 [seq_len, top_k] -> expert_offsets, problem_sizes1 and problem_sizes2, all int32."""
    assert topk_ids.shape == (topk_ids.shape[0], TOP_K)
    # The first and the last count are those of other ranks.
    counts = torch.bincount(topk_ids.flatten() + 1, minlength=NUM_EXPERTS + 2)[1:-1]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sizes1 = torch.stack(
        [torch.full_like(counts, 2 * INTERMEDIATE_SIZE), counts, torch.full_like(counts, HIDDEN_SIZE)], 1
    )
    sizes2 = torch.stack([torch.full_like(counts, HIDDEN_SIZE), counts, torch.full_like(counts, INTERMEDIATE_SIZE)], 1)
    return offsets.to(torch.int32), sizes1.to(torch.int32), sizes2.to(torch.int32)
