"""Where each (token, choice) pair goes when rows are sorted by expert, and the sizes of the products of each expert.

expert_offsets[e] is the first row of expert e, and expert_offsets[NUM_EXPERTS] the number of all rows. Pairs of experts
on other ranks (id -1) get no row. problem_sizes1[e] is (rows, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE), the rows, columns
out and columns in of the first product (gate and up); problem_sizes2[e] is (rows, HIDDEN_SIZE, INTERMEDIATE_SIZE),
those of the second. blockscale_offsets are expert_offsets with the rows of each expert rounded up to 128, as
block-scaled formats need.

input_permutation has the token of each row, and output_permutation the row of each pair; both have as many elements as
there are pairs. Rows after the last expert and pairs without a row are undefined: kernels leave them unwritten, here
they are -1. The order of pairs inside an expert is not defined either; here it is ascending.
"""

import torch

NUM_EXPERTS = 32
TOP_K = 8
HIDDEN_SIZE = 7168
INTERMEDIATE_SIZE = 2048
NUM_OFFSETS = 33
NUM_SIZES = 3
SCALE_ROWS = 128


def run(
    topk_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_ids int32 [seq_len, top_k] -> the outputs in the order of the Definition, all int32."""
    assert topk_ids.shape == (topk_ids.shape[0], TOP_K)
    expert = topk_ids.flatten()
    counts = torch.bincount(expert + 1, minlength=NUM_EXPERTS + 1)
    elsewhere, counts = counts[0], counts[1:]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    whole = (counts + SCALE_ROWS - 1) // SCALE_ROWS * SCALE_ROWS
    scale_offsets = torch.nn.functional.pad(whole.cumsum(0), (1, 0))
    sizes1 = torch.stack(
        [counts, torch.full_like(counts, 2 * INTERMEDIATE_SIZE), torch.full_like(counts, HIDDEN_SIZE)], 1
    )
    sizes2 = torch.stack([counts, torch.full_like(counts, HIDDEN_SIZE), torch.full_like(counts, INTERMEDIATE_SIZE)], 1)
    # Pairs of other ranks come first in this order, and get negative rows.
    order = expert.argsort(stable=True)
    row = torch.arange(len(order), device=order.device) - elsewhere
    output_permutation = order.argsort(stable=True).sub(elsewhere).clamp_min(-1)
    input_permutation = torch.where(row >= 0, order // TOP_K, -1).roll(-int(elsewhere))
    outputs = [offsets, sizes1, sizes2, input_permutation, output_permutation, scale_offsets]
    return tuple(output.to(torch.int32) for output in outputs)
