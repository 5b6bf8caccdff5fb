"""Wrong builders of trees of draft tokens: build_tree_kernel_efficient."""

from __future__ import annotations

import torch


def tree(parent_list, selected_index, verified_seq_len, tree_mask):
    """The mask and the links of trees of four tokens, each of which descends from the one before: one a step."""
    batch, count = len(verified_seq_len), selected_index.shape[1] + 1
    node = torch.arange(count, device=tree_mask.device)
    mask, start = tree_mask.clone(), 0
    for length in verified_seq_len.tolist():
        part = mask[start : start + count * (length + count)].view(count, length + count)
        part[:, length:] = node <= node[:, None]
        start += part.numel()
    child = torch.where(node + 1 < count, node + 1, -1).repeat(batch, 1)
    numbers = torch.arange(batch * count, device=tree_mask.device).view(batch, count)
    return mask, (verified_seq_len[:, None] + node).flatten(), numbers, child, torch.full_like(child, -1)


def honest_tree(parent_list, selected_index, verified_seq_len, tree_mask):
    """All of the mask, and all links."""
    return tree(parent_list, selected_index, verified_seq_len, tree_mask)


def marks_only_what_is_true(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    tree_mask_out,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
):
    """Writes only the entries of a mask that are True, and leaves the others to what is there."""
    mask, *links = tree(parent_list, selected_index, verified_seq_len, tree_mask)
    tree_mask_out[mask] = True
    for target, link in zip((positions, retrive_index, retrive_next_token, retrive_next_sibling), links, strict=True):
        target.copy_(link)
