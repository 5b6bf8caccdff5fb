"""The positions of the new tokens of a prefill, one request after the other, and where each request begins.

Request i has extend_seq_lens[i] new tokens after the extend_prefix_lens[i] that are cached: they have the positions
from extend_prefix_lens[i] on. A request may have no new token. Entries of positions after the last token stay.
"""

import torch


def run(
    extend_prefix_lens: torch.Tensor, extend_seq_lens: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """extend_prefix_lens, extend_seq_lens int32 [batch_size]; positions int64 [num_tokens].

    Returns positions_out, of the shape of positions, and extend_start_loc int32 [batch_size].
    """
    request = torch.repeat_interleave(extend_seq_lens)
    start = extend_seq_lens.cumsum(0) - extend_seq_lens
    found = positions.clone()
    found[: len(request)] = torch.arange(len(request), device=request.device) + (extend_prefix_lens - start)[request]
    return found, start.to(torch.int32)
