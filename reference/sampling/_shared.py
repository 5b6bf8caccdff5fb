"""Functions that the sampling references share: thresholds from the largest values, and inverse-transform draws."""

import torch


def largest_values(probs: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, in descending order: [batch_size, count]."""
    if 4 * count <= probs.shape[-1]:
        return torch.topk(probs, count, dim=-1).values
    return torch.sort(probs, dim=-1, descending=True).values[:, :count]


def top_k_threshold(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each row [batch_size, 1].

    0 (keeps all) for k >= vocab_size and for k < 0; infinity (keeps none) for k = 0.
    """
    k = top_k.long().unsqueeze(-1)
    everything = (k < 0) | (k >= probs.shape[-1])
    k = torch.where(everything, 0, k)
    descending = largest_values(probs, max([1, *k.flatten().tolist()]))
    kth = descending.gather(-1, (k - 1).clamp_min(0))
    return torch.where(everything, 0.0, torch.where(k == 0, torch.inf, kth))


def nucleus_threshold(probs: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The smallest value with less than `limit` mass strictly above it [batch_size, 1]; infinity if there is none.

    In descending order this is the value that reaches the limit. All values equal to it have the same mass above them.
    """
    threshold = torch.zeros_like(limit, dtype=probs.dtype)
    rows = torch.arange(probs.shape[0], device=probs.device)
    for part in (64, 8, 1):  # a nucleus is usually small: look at more values only of rows where it may be larger
        descending = largest_values(probs[rows], -(-probs.shape[-1] // part))
        mass = descending.cumsum(dim=-1, dtype=torch.float64)
        above = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        threshold[rows] = torch.where(above < limit[rows], descending, torch.inf).amin(dim=-1, keepdim=True)
        rows = rows[mass[:, -1] <= limit[rows, 0]]
    return threshold


def kept_mass(probs: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Sum of the kept probabilities of each row, float64 [batch_size, 1]."""
    return torch.where(keep, probs, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)


def draw(probs: torch.Tensor, keep: torch.Tensor, scaled: bool) -> torch.Tensor:
    """One token per row, int64 [batch_size, 1]: the first whose cumulative kept mass, in order of index, exceeds u.

    u is uniform in [0, total kept mass) if `scaled`, else in [0, 1). If no token exceeds it, the result is the last
    kept token, or token 0 if none is kept.
    """
    cumulative = torch.where(keep, probs, 0.0).cumsum(dim=-1, dtype=torch.float64)
    u = torch.rand(probs.shape[0], 1, dtype=torch.float64, device=probs.device)
    token = torch.searchsorted(cumulative, u * cumulative[:, -1:] if scaled else u, right=True)
    index = torch.arange(probs.shape[-1], dtype=torch.int32, device=probs.device)
    last = torch.where(keep, index, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(token, last)


def draw_by_rejection(probs: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [batch_size, 1]: drawn from the row as it is, and drawn again from `keep` if not in it.

    For rows that sum to 1 this is a draw from the kept tokens in proportion to their probabilities. For other rows the
    first draw is not scaled by the sum: mass beyond 1, in order of index, is never reached, and missing mass goes to
    the last token with a positive probability.
    """
    first = draw(probs, probs > 0, scaled=False)
    again = draw(probs, keep, scaled=True)
    return torch.where(keep.gather(-1, first), first, again)
