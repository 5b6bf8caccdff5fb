"""Uniform numbers beside the sums of probabilities with which they are compared."""

from __future__ import annotations

import torch

from flashinfer_trace.harness.inputs import Draws

__all__ = ["CLEAR", "beside_sums"]

#: The closest that a uniform number comes to a sum, relative to it; roundings add up to less than 2^-20.
CLEAR = 2.0**-16
#: How far a number beside a sum is from it, relative to it: sums in a 16-bit format are farther.
BESIDE = 2 * CLEAR


def beside_sums(edges: torch.Tensor, numbers: torch.Tensor, draws: Draws) -> torch.Tensor:
    """float32 like `numbers`: on either side of the sum of the second or third child; as given where there is none.

    Args:
        edges: float64 [batch_size, nodes, nodes], what the number of each node is compared with at each of its
            children, in the order in which they are tried; infinite at other nodes.
        numbers: float32 [draws, batch_size, nodes].
        draws: a stream.
    """
    child = edges.isfinite().cumsum(-1).masked_fill(~edges.isfinite(), 0)
    chosen = draws.integers(numbers.shape, 2, 3)[..., None] == child
    side = 2 * draws.integers(numbers.shape, 0, 1) - 1
    sums = torch.where(chosen, edges, 0.0).sum(-1)
    beside = (sums * (1 + side * BESIDE)).float()
    return torch.where((beside > 0) & (beside < 1), beside, numbers)
