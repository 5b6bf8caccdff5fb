"""Turns the draft tokens that were kept into a tree: its links, its positions and its attention mask (EAGLE-2, 2024).

Drafting numbers its tokens: TOP_K of the first step, then TOP_K^2 of each further one, TOP_K for each token that was
expanded. Token t descends from token parent_list[t // TOP_K], or from the root if t // TOP_K is 0. Node 0 of a tree is
the root, the last verified token; node i is token selected_index[i - 1]. The parent of each node is also there.

retrive_index numbers the nodes of all trees. retrive_next_token is the first child of a node, retrive_next_sibling the
next child of its parent, in ascending order; both are -1 if there is none. Positions count from the length of the
verified text. The mask of sequence b has NUM_DRAFT_TOKENS rows with verified_seq_len[b] + NUM_DRAFT_TOKENS columns: the
columns of the text stay as the caller set them, those of nodes say which nodes are ancestors, or the node itself.
"""

import torch

TOP_K = 4
NUM_STEPS = 3
NUM_DRAFT_TOKENS = 8
NUM_SELECTED = 7
NUM_PARENTS = 9


def parents(parent_list: torch.Tensor, selected_index: torch.Tensor) -> torch.Tensor:
    """int64 [batch_size, num_draft_tokens]: the node above each node; the root's is the root."""
    entry = selected_index // TOP_K
    token = parent_list.gather(1, entry)
    node = torch.searchsorted(selected_index, token) + 1
    return torch.nn.functional.pad(torch.where(entry == 0, 0, node), (1, 0))


def run(
    parent_list: torch.Tensor, selected_index: torch.Tensor, verified_seq_len: torch.Tensor, tree_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """parent_list [batch_size, num_parents], selected_index [batch_size, num_selected], verified_seq_len [batch_size].

    tree_mask [mask_size] as the caller set it. Returns tree_mask_out [mask_size], positions [num_nodes], and
    retrive_index, retrive_next_token and retrive_next_sibling [batch_size, num_draft_tokens].
    """
    batch, device = verified_seq_len.shape[0], verified_seq_len.device
    assert parent_list.shape[1] == NUM_PARENTS
    assert selected_index.shape[1] == NUM_SELECTED
    parent = parents(parent_list, selected_index)
    node = torch.arange(NUM_DRAFT_TOKENS, device=device)
    reached = (node[:, None] == node).expand(batch, -1, -1)
    for _ in range(NUM_STEPS):
        reached = reached | reached.gather(1, parent[:, :, None].expand(-1, -1, NUM_DRAFT_TOKENS))
    positions = verified_seq_len[:, None] + reached.sum(2) - 1

    # child[b, p, i]: node i descends from node p; the root is nobody's child.
    child = (parent[:, None, :] == node[:, None]) & (node > 0)
    first = torch.where(child, node, NUM_DRAFT_TOKENS).amin(2)
    later = (parent[:, :, None] == parent[:, None, :]) & (node > node[:, None]) & (node[:, None] > 0)
    following = torch.where(later, node, NUM_DRAFT_TOKENS).amin(2)
    first, following = (torch.where(link == NUM_DRAFT_TOKENS, -1, link) for link in (first, following))

    width = verified_seq_len + NUM_DRAFT_TOKENS
    end = (width * NUM_DRAFT_TOKENS).cumsum(0)
    start = end - width * NUM_DRAFT_TOKENS
    tree = torch.arange(batch, device=device)[:, None, None]
    column = verified_seq_len[tree] + node
    tree_mask_out = tree_mask.clone()
    tree_mask_out[start[tree] + node[:, None] * width[tree] + column] = reached
    numbers = torch.arange(batch * NUM_DRAFT_TOKENS, device=device).view(batch, NUM_DRAFT_TOKENS)
    return tree_mask_out, positions.flatten(), numbers, first, following
