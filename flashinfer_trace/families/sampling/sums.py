"""Sums along the rows of a vocabulary, in float64."""

from __future__ import annotations

import torch

__all__ = ["running_sums"]

#: Elements of a row that are summed one after the other.
PART = 512


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of the first 0, 1, 2, ... elements of each row of [rows, length]: float64 [rows, length + 1].

    Parts of a row are summed first, then the parts: a GPU has one block of threads for each row that it scans, which
    takes longer for a whole vocabulary than all else that an oracle does.
    """
    rows, length = values.shape
    count = -(-(length + 1) // PART)
    padded = torch.nn.functional.pad(values, (1, count * PART - length - 1))
    within = padded.view(rows, count, PART).cumsum(dim=-1, dtype=torch.float64)
    if count > 1:
        before = torch.nn.functional.pad(within[:, :-1, -1].cumsum(dim=-1), (1, 0))
        within = within + before.unsqueeze(-1)
    return within.view(rows, count * PART)[:, : length + 1]
