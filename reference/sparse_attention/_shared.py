"""The function that the sparse_attention references share."""

import torch


def top_positions(scores: torch.Tensor, lengths: torch.Tensor, row_starts: torch.Tensor, top_k: int) -> torch.Tensor:
    """int64 [num_tokens, top_k]: where each row's largest scores are, relative to its start; -1 after the last one.

    The keys of row t are lengths[t] columns from row_starts[t] on. Scores are finite. Which of equal scores are listed,
    and the order of a row, are not defined; here the largest come first, and of equal ones the first.
    """
    columns = scores.shape[1]
    position = torch.arange(columns, device=scores.device)
    exists = position < lengths[:, None]
    place = (position + row_starts[:, None]).clamp_max(columns - 1)
    own = scores.gather(1, place).masked_fill(~exists, -torch.inf)
    best = own.argsort(descending=True, stable=True)
    # What is no key comes last: as many places as a row has keys are those of keys.
    listed = torch.where(exists, best, -1)
    # What is padded by less than nothing is cut.
    return torch.nn.functional.pad(listed, (0, top_k - listed.shape[1]), value=-1)
