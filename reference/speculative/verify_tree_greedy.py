"""Follows a tree of draft tokens as far as the target model's most probable tokens go (SpecInfer, arXiv 2305.09781).

From the root on, the first child whose token is what the target model predicts after its parent is accepted, at most
NUM_STEPS times. retrive_next_token is the first child of a node and retrive_next_sibling the next child of its parent,
-1 if there is none; retrive_index is the place of a node in the flat arrays of all trees, predicts and target_predict.

predicts has the predicted token at the place of the root and of each accepted node. accept_index lists the places of
the root and the accepted nodes, and accept_token_num counts the accepted nodes. All other entries are -1: the kernels
do not write them, so their caller fills the memory with -1.
"""

import torch

NUM_STEPS = 3
NUM_SPECULATIVE_TOKENS = 4
NUM_DRAFT_TOKENS = 8


def run(
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All inputs are int64 [batch_size, num_draft_tokens].

    Returns predicts [num_nodes], accept_index [batch_size, num_speculative_tokens] and accept_token_num [batch_size],
    all int32.
    """
    batch, device = candidates.shape[0], candidates.device
    assert candidates.shape[1] == NUM_DRAFT_TOKENS
    assert candidates.shape == retrive_index.shape == retrive_next_token.shape
    assert candidates.shape == retrive_next_sibling.shape == target_predict.shape
    tree = torch.arange(batch, device=device)
    target = target_predict.flatten()
    place = retrive_index[:, 0]
    node = retrive_next_token[:, 0]
    accepted = torch.zeros(batch, dtype=torch.int64, device=device)
    predicts = torch.full((batch * NUM_DRAFT_TOKENS,), -1, dtype=torch.int32, device=device)
    accept_index = torch.full((batch, NUM_SPECULATIVE_TOKENS), -1, dtype=torch.int32, device=device)
    # Each turn looks at one more node of every tree: at the first child after an accepted node, else at the sibling.
    for _ in range(NUM_DRAFT_TOKENS):
        accept_index[tree, accepted] = place.to(torch.int32)
        predicts[place] = target[place].to(torch.int32)
        here = node.clamp_min(0)
        accept = (node >= 0) & (candidates[tree, here] == target[place])
        following = torch.where(accept, retrive_next_token[tree, here], retrive_next_sibling[tree, here])
        accepted = accepted + accept
        place = torch.where(accept, retrive_index[tree, here], place)
        node = torch.where((node >= 0) & (accepted < NUM_STEPS), following, -1)
    return predicts, accept_index, accepted.to(torch.int32)
