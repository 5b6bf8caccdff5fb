"""Accepts draft tokens of a chain and samples one more token, so all follow the target model's distribution.

Draft token i was drawn from draft_probs[i - 1], where its probability is q; p is that of target_probs[i - 1]. From the
first on it is accepted if u q < p for its uniform number u and q > 0: with probability min(1, p / q). The first that is
rejected ends the chain, and one more token is drawn with the last uniform number: the first whose cumulative weight
exceeds it times the sum of weights max(p - q, 0), or of p after NUM_STEPS accepted tokens (Leviathan, Kalman and
Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023). If no weight is positive, it is the
last token of the vocabulary. Numbers are at least 0 and below 1.

retrive_index is the place of each token in predicts, which has there the token that follows. accept_index lists the
places of the root and the accepted tokens, and accept_token_num counts the accepted ones. All other entries are -1: the
kernels do not write them, so their caller fills the memory with -1. Sums of weights are in float64.
"""

import torch

NUM_STEPS = 3
NUM_SPECULATIVE_TOKENS = 4
NUM_DRAFT_TOKENS = 4
VOCAB_SIZE = 129280


def run(
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """candidates, retrive_index, uniform_samples [batch_size, num_draft_tokens]; the first number is that of token 1.

    uniform_samples_for_final_sampling [batch_size]; target_probs [batch_size, num_draft_tokens, vocab_size];
    draft_probs [batch_size, num_steps, vocab_size]. Returns predicts [num_nodes], accept_index [batch_size,
    num_speculative_tokens] and accept_token_num [batch_size], all int32.
    """
    assert candidates.shape[1] == retrive_index.shape[1] == uniform_samples.shape[1] == NUM_DRAFT_TOKENS
    assert target_probs.shape[1:] == (NUM_DRAFT_TOKENS, VOCAB_SIZE)
    assert draft_probs.shape[1:] == (NUM_STEPS, VOCAB_SIZE)
    chain = torch.arange(candidates.shape[0], device=candidates.device)
    step = torch.arange(NUM_DRAFT_TOKENS, device=candidates.device)
    tokens = candidates[:, 1:]
    p, q = (probs[chain[:, None], step[:NUM_STEPS], tokens] for probs in (target_probs, draft_probs))
    likely = (uniform_samples[:, :NUM_STEPS] * q < p) & (q > 0)
    accepted = likely.cumprod(1).sum(1)
    # After the last step there is no draft: its weights are those of the target model.
    draft = draft_probs[chain, accepted.clamp_max(NUM_STEPS - 1)].masked_fill((accepted == NUM_STEPS)[:, None], 0.0)
    cumulative = (target_probs[chain, accepted].double() - draft).clamp_min(0.0).cumsum(1)
    # If no token but the last exceeds the number, it is the last.
    exceeded = cumulative[:, :-1] <= uniform_samples_for_final_sampling[:, None] * cumulative[:, -1:]
    predicts = torch.full_like(candidates, -1).flatten()
    taken = step[:NUM_STEPS] < accepted[:, None]
    predicts[retrive_index[:, :NUM_STEPS][taken]] = tokens[taken]
    predicts[retrive_index[chain, accepted]] = exceeded.sum(1)
    accept_index = torch.where(step <= accepted[:, None], retrive_index, -1)
    return predicts.to(torch.int32), accept_index.to(torch.int32), accepted.to(torch.int32)
