"""Walsh-Hadamard transform of each row, times a scale: output = scale * x H.

H is Sylvester's matrix of order HEAD_DIM, in natural order: H[i, j] = (-1)^popcount(i & j). DeepSeek-V3.2 turns the
indexer's queries and keys with it before it quantizes them to fp8, with a scale of HEAD_DIM^-0.5, which makes scale * H
orthogonal. Computed in float32 as sums and differences, log2(HEAD_DIM) times; rounded once, to the dtype of x.
"""

import torch

HEAD_DIM = 128


def run(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x [num_rows, head_dim] -> output [num_rows, head_dim]; HEAD_DIM is a power of two."""
    assert x.shape[1] == HEAD_DIM
    values = x.float()
    width = 1
    while width < HEAD_DIM:
        first, second = values.view(-1, 2, width).unbind(1)
        values = torch.stack((first + second, first - second), dim=1)
        width *= 2
    return (values.view(x.shape) * scale).to(x.dtype)
