"""Follows a tree of draft tokens as far as the target model's most probable tokens go (SpecInfer, arXiv 2305.09781).

From the root on, the first child whose token is what the target model predicts after its parent is accepted, at most
NUM_STEPS times. Tokens are not negative. retrive_next_token is the first child of a node and retrive_next_sibling the
next child of its parent, -1 if there is none; retrive_index is the place of a node in the flat arrays of all trees,
predicts and target_predict.

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
    assert candidates.shape[1] == target_predict.shape[1] == retrive_index.shape[1] == NUM_DRAFT_TOKENS
    assert retrive_next_token.shape[1] == retrive_next_sibling.shape[1] == NUM_DRAFT_TOKENS
    # Node -1, which is none, reads the last column: no token, no child and no sibling.
    links = (candidates, retrive_next_token, retrive_next_sibling)
    tokens, children, siblings = (torch.nn.functional.pad(each, (0, 1), value=-1) for each in links)
    tree = torch.arange(candidates.shape[0], device=candidates.device)
    target = target_predict.flatten()
    place, node = retrive_index[:, 0], retrive_next_token[:, 0]
    accepted = torch.zeros_like(place)
    predicts = torch.full_like(target, -1)
    accept_index = torch.full_like(place, -1)[:, None].repeat(1, NUM_SPECULATIVE_TOKENS)
    # Each turn looks at one more node of every tree: at the first child after an accepted node, else at the sibling.
    for _ in range(NUM_DRAFT_TOKENS):
        accept_index[tree, accepted] = place
        predicts[place] = target[place]
        accept = tokens[tree, node] == target[place]
        accepted = accepted + accept
        place = torch.where(accept, retrive_index[tree, node], place)
        following = torch.where(accept, children[tree, node], siblings[tree, node])
        node = torch.where(accepted < NUM_STEPS, following, -1)
    return predicts.to(torch.int32), accept_index.to(torch.int32), accepted.to(torch.int32)
