"""Accepts draft tokens of a tree and samples one more token, so all follow the target model's distribution.

From the root on, the children of the last accepted node are tried in order. One of positive probability is accepted if
the node's uniform number is below the probability of all children tried so far, divided by threshold_acc (at least
1e-9), or if its own probability is at least threshold_single; at most NUM_STEPS are accepted. A token of probability 0
is never accepted, whatever the number and the thresholds are: the target model cannot draw it. Uniform numbers are at
least 0 and below 1, so one is below p with probability p, and a number that equals the sum rejects. With both
thresholds 1, this is multi-round rejection sampling by draft tokens that are certain (SpecInfer, arXiv 2305.09781). The
probability of each rejected token is copied to draft_probs. One more token is drawn with the last uniform number u: the
first whose cumulative weight exceeds u times the sum of weights max(target - draft, 0); after NUM_STEPS accepted nodes
draft_probs do not count. If no weight is positive, it is the last token of the vocabulary.

retrive_next_token is the first child of a node and retrive_next_sibling the next child of its parent, -1 if there is
none; retrive_index is the place of a node in predicts. predicts has at the place of the root and each accepted node the
token that follows. accept_index lists the places of the root and the accepted nodes, accept_token_num counts the
accepted nodes. All other entries are -1: the kernels do not write them, so their caller fills the memory with -1. The
sums of weights are in float64, those of tried children in float32.
"""

import torch

NUM_STEPS = 3
NUM_SPECULATIVE_TOKENS = 4
NUM_DRAFT_TOKENS = 8
VOCAB_SIZE = 129280
SMALLEST_THRESHOLD = 1e-9


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
    assert candidates.shape[1] == uniform_samples.shape[1] == retrive_index.shape[1] == NUM_DRAFT_TOKENS
    assert retrive_next_token.shape[1] == retrive_next_sibling.shape[1] == NUM_DRAFT_TOKENS
    assert target_probs.shape[1:] == draft_probs.shape[1:] == (NUM_DRAFT_TOKENS, VOCAB_SIZE)
    tree = torch.arange(candidates.shape[0], device=candidates.device)
    place, node = retrive_index[:, 0], retrive_next_token[:, 0]
    last, accepted = torch.zeros_like(place), torch.zeros_like(place)
    mass, bound = torch.zeros_like(uniform_samples_for_final_sampling), max(threshold_acc, SMALLEST_THRESHOLD)
    predicts = torch.full_like(candidates, -1).flatten()
    accept_index = torch.full_like(place, -1)[:, None].repeat(1, NUM_SPECULATIVE_TOKENS)
    draft_probs_out = draft_probs.clone()
    # Each turn looks at one more node of every tree: at the first child after an accepted node, else at the sibling.
    # Node -1 is none: what it reads of the last node has no effect.
    for _ in range(NUM_DRAFT_TOKENS):
        accept_index[tree, accepted] = place
        token, tried = candidates[tree, node], node > 0
        probability = target_probs[tree, last, token]
        mass = mass + probability
        likely = (uniform_samples[tree, last] < mass / bound) | (probability >= threshold_single)
        likely &= probability > 0
        accept, reject = tried & likely, tried & ~likely
        draft = draft_probs_out[tree, last, token]
        draft_probs_out[tree, last, token] = torch.where(reject, probability, draft)
        # If the node is not accepted, this is written over.
        predicts[place] = token
        accepted = accepted + accept
        place, last = torch.where(accept, retrive_index[tree, node], place), torch.where(accept, node, last)
        mass = mass.masked_fill(accept, 0.0)
        following = torch.where(likely, retrive_next_token[tree, node], retrive_next_sibling[tree, node])
        node = torch.where(tried & (accepted < NUM_STEPS), following, -1)
    draft = draft_probs_out[tree, last].masked_fill((accepted == NUM_STEPS)[:, None], 0.0)
    cumulative = (target_probs[tree, last].double() - draft).clamp_min(0.0).cumsum(1)
    # If no token but the last exceeds the number, it is the last.
    exceeded = cumulative[:, :-1] <= uniform_samples_for_final_sampling[:, None] * cumulative[:, -1:]
    predicts[place] = exceeded.sum(1)
    return predicts.to(torch.int32), accept_index.to(torch.int32), accepted.to(torch.int32), draft_probs_out
