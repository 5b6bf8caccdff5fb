"""One step of drafting a chain: the most probable token of each sequence becomes the next draft token.

Of equal logits the first counts. The token is written into column draft_token_column of draft_tokens, where all other
columns stay, and each position grows by 1. Logits are not NaN.
"""

import torch

NUM_STEPS = 3
VOCAB_SIZE = 129280


def run(
    next_token_logits: torch.Tensor, positions: torch.Tensor, draft_tokens: torch.Tensor, draft_token_column: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """next_token_logits [batch_size, vocab_size]; positions [batch_size]; draft_tokens [batch_size, num_steps].

    Returns topk_index int64 [batch_size], positions_out and draft_tokens_out.
    """
    assert next_token_logits.shape[1] == VOCAB_SIZE
    assert draft_tokens.shape[1] == NUM_STEPS
    best = next_token_logits.argmax(dim=1)
    tokens = draft_tokens.clone()
    tokens[:, draft_token_column] = best
    return best, positions + 1, tokens
