"""Accepts draft tokens of a tree and samples one more token, so that all follow the target model's distribution.

From the root on, the children of the last accepted node are tried in order. One is accepted if the node's uniform
number is at most the probability of all children tried so far, divided by threshold_acc (at least 1e-9), or if its own
probability is at least threshold_single; at most NUM_STEPS are accepted. With both thresholds 1, this is multi-round rejection
sampling by draft tokens that are certain (SpecInfer, arXiv 2305.09781). The probability of each rejected token is copied
to draft_probs. One more token is drawn with the last uniform number u: the first whose cumulative weight exceeds u times
the sum of weights max(target - draft, 0); after NUM_STEPS accepted nodes draft_probs do not count. If no weight is
positive, it is the last token of the vocabulary.

retrive_next_token is the first child of a node and retrive_next_sibling the next child of its parent, -1 if there is
none; retrive_index is the place of a node in predicts. predicts has at the place of the root and each accepted node the
token that follows. accept_index lists the places of the root and the accepted nodes, accept_token_num counts the
accepted nodes. All other entries are -1: the kernels do not write them, so their caller fills the memory with -1.
Sums are in float64.
"""

import torch

NUM_STEPS = 3
NUM_SPECULATIVE_TOKENS = 4
NUM_DRAFT_TOKENS = 8
VOCAB_SIZE = 129280
SMALLEST_THRESHOLD = 1e-9


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """int64 [batch_size]: the first token whose cumulative weight exceeds u times the sum; weights float64."""
    cumulative = weights.cumsum(1)
    exceeds = (cumulative > u[:, None] * cumulative[:, -1:]) & (weights > 0)
    return torch.where(exceeds.any(1), exceeds.long().argmax(1), VOCAB_SIZE - 1)


def run(
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """candidates and the three retrive_* [batch_size, num_draft_tokens]; target_probs, draft_probs [..., vocab_size].

    uniform_samples [batch_size, num_draft_tokens], uniform_samples_for_final_sampling [batch_size]. Returns predicts
    [num_nodes], accept_index [batch_size, num_speculative_tokens], accept_token_num [batch_size] and draft_probs_out.
    """
    batch, device = candidates.shape[0], candidates.device
    assert candidates.shape[1] == NUM_DRAFT_TOKENS
    assert candidates.shape == retrive_index.shape == retrive_next_token.shape
    assert candidates.shape == retrive_next_sibling.shape == uniform_samples.shape
    assert uniform_samples_for_final_sampling.shape == (batch,)
    assert target_probs.shape == draft_probs.shape == (*candidates.shape, VOCAB_SIZE)
    tree = torch.arange(batch, device=device)
    last = torch.zeros(batch, dtype=torch.int64, device=device)
    accepted, mass, bound = last, last.double(), max(threshold_acc, SMALLEST_THRESHOLD)
    node = retrive_next_token[:, 0]
    predicts = torch.full((batch * NUM_DRAFT_TOKENS,), -1, dtype=torch.int32, device=device)
    accept_index = torch.full((batch, NUM_SPECULATIVE_TOKENS), -1, dtype=torch.int32, device=device)
    accept_index[:, 0] = retrive_index[:, 0].to(torch.int32)
    draft_probs_out = draft_probs.clone()
    # Each turn looks at one more node of every tree: at the first child after an accepted node, else at the sibling.
    for _ in range(NUM_DRAFT_TOKENS - 1):
        here = node.clamp_min(0)
        token = candidates[tree, here]
        probability = target_probs[tree, last, token]
        mass = mass + probability.double()
        likely = (uniform_samples[tree, last].double() <= mass / bound) | (probability >= threshold_single)
        accept, reject = (node >= 0) & likely, (node >= 0) & ~likely
        draft_probs_out[tree[reject], last[reject], token[reject]] = probability[reject]
        predicts[retrive_index[tree, last][accept]] = token[accept].to(torch.int32)
        accepted = accepted + accept
        accept_index[tree[accept], accepted[accept]] = retrive_index[tree, here][accept].to(torch.int32)
        following = torch.where(accept, retrive_next_token[tree, here], retrive_next_sibling[tree, here])
        last = torch.where(accept, here, last)
        mass = mass.masked_fill(accept, 0.0)
        node = torch.where((node >= 0) & (accepted < NUM_STEPS), following, -1)
    draft = draft_probs_out[tree, last].double().masked_fill((accepted == NUM_STEPS)[:, None], 0.0)
    weights = (target_probs[tree, last].double() - draft).clamp_min(0.0)
    sampled = draw(weights, uniform_samples_for_final_sampling.double())
    predicts[retrive_index[tree, last]] = sampled.to(torch.int32)
    return predicts, accept_index, accepted.to(torch.int32), draft_probs_out
