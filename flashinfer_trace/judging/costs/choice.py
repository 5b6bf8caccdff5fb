"""Costs of what chooses among values: samplers, renormalizers, top-k, and the acceptance of speculated tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashinfer_trace.judging.costs.work import CUDA_CORES, CostFunction, Elements, Sizes, Work, each

#: For each probability: comparisons with thresholds, sums of what is kept.
SAMPLE = 3
#: For each value of which the largest are chosen.
SELECT = 1
#: For each token of the row that the next token is drawn from: difference, maximum, sum, comparison.
DRAW = 4
SMALLEST_THRESHOLD = 1e-9


def candidates(sizes: Sizes, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Which scores [num_tokens, num_keys] are looked at: those of the keys of rows with more than top_k of them."""
    start: torch.Tensor = inputs["row_starts"].unsqueeze(1)
    length: torch.Tensor = inputs["lengths"].unsqueeze(1)
    place = torch.arange(sizes["num_keys"], device=start.device)
    return (place >= start) & (place < start + length) & (length > sizes["top_k"])


def sparse_top_k(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """A row with top_k keys or fewer lists them all, whatever their scores."""
    looked_at = candidates(sizes, inputs)
    return Work({CUDA_CORES: SELECT * int(looked_at.sum())}, {"scores": looked_at})


def sparse_top_k_slots(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """The chosen keys are looked up in the page table of their sequence."""
    looked_at, top_k = candidates(sizes, inputs), sizes["top_k"]
    table = torch.zeros(inputs["page_table"].shape, dtype=torch.bool)
    sequence = torch.repeat_interleave(inputs["cu_seqlens_q"].diff().cpu()).tolist()
    for row, (own, start, length) in enumerate(
        zip(sequence, inputs["row_starts"].tolist(), inputs["lengths"].tolist(), strict=False)
    ):
        scores = inputs["scores"][row, start : start + length]
        table[own, scores.argsort(descending=True, stable=True)[:top_k].cpu()] = True
    return Work({CUDA_CORES: SELECT * int(looked_at.sum())}, {"scores": looked_at, "page_table": table})


def build_tree(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Only the mask's columns for the tree's nodes are written; those for the text stay, and are not read."""
    draft = sizes["num_draft_tokens"]
    written = torch.zeros(sizes["mask_size"], dtype=torch.bool)
    row = 0
    for length in inputs["verified_seq_len"].tolist():
        for _ in range(draft):
            written[row + length : row + length + draft] = True
            row += length + draft
    unread: Elements = torch.zeros_like(written)
    operations = sizes["batch_size"] * draft * (sizes["num_steps"] + draft)
    return Work({CUDA_CORES: operations}, {"tree_mask": unread}, {"tree_mask_out": written})


def verify_sampled(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """The distribution of the last accepted node is read whole; of others, the probabilities of their children."""
    shape = sizes["batch_size"], sizes["num_draft_tokens"], sizes["vocab_size"]
    target, draft, written = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
    for tree in range(sizes["batch_size"]):
        last, accepted, looked_at, rejected = walk(sizes, inputs, tree)
        for node, token in looked_at:
            target[tree, node, token] = True
        for node, token in rejected:
            written[tree, node, token] = True
        target[tree, last] = True
        # The rejected draft there is known; all the rest of the drafts' probabilities counts, unless all was accepted.
        draft[tree, last] = ~written[tree, last] & (accepted < sizes["num_steps"])
    count = DRAW * sizes["batch_size"] * sizes["vocab_size"]
    return Work({CUDA_CORES: count}, {"target_probs": target, "draft_probs": draft}, {"draft_probs_out": written})


def verify_chain(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Of each step that is looked at, both probabilities of its token; those of all tokens where the last is drawn."""
    steps = sizes["num_steps"]
    target, draft = (torch.zeros(inputs[name].shape, dtype=torch.bool) for name in ("target_probs", "draft_probs"))
    for chain, tokens in enumerate(inputs["candidates"][:, 1:].tolist()):
        count = steps
        for step, token in enumerate(tokens):
            p, q = (inputs[name][chain, step, token].cpu() for name in ("target_probs", "draft_probs"))
            target[chain, step, token] = draft[chain, step, token] = True
            if not (q > 0 and inputs["uniform_samples"][chain, step].cpu() * q < p):
                count = step
                break
        target[chain, count], draft[chain, count : count + 1] = True, True
    count = DRAW * sizes["batch_size"] * sizes["vocab_size"]
    return Work({CUDA_CORES: count}, {"target_probs": target, "draft_probs": draft})


def walk(
    sizes: Sizes, inputs: Mapping[str, Any], tree: int
) -> tuple[int, int, list[tuple[int, int]], list[tuple[int, int]]]:
    """The last accepted node of a tree, the number of accepted ones, and the (node, token) that were looked at, and
    rejected."""
    tokens, children, siblings = (
        inputs[name][tree].tolist() for name in ("candidates", "retrive_next_token", "retrive_next_sibling")
    )
    bound = max(float(inputs["threshold_acc"]), SMALLEST_THRESHOLD)
    single, uniform = float(inputs["threshold_single"]), inputs["uniform_samples"][tree]
    probabilities = inputs["target_probs"][tree]
    last, accepted, node, mass = 0, 0, children[0], torch.zeros(())
    looked_at, rejected = [], []
    while node > 0 and accepted < sizes["num_steps"]:
        probability = probabilities[last, tokens[node]].cpu()
        mass = mass + probability
        looked_at.append((last, tokens[node]))
        if bool(uniform[last].cpu() <= mass / bound) or float(probability) >= single:
            last, accepted, mass = node, accepted + 1, torch.zeros(())
            node = children[node]
        else:
            rejected.append((last, tokens[node]))
            node = siblings[node]
    return last, accepted, looked_at, rejected


COSTS: dict[str, CostFunction] = {
    **{
        f"{kind}_sampling_from_probs": each(SAMPLE, "batch_size", "vocab_size")
        for kind in ("top_k", "top_p", "top_k_top_p", "top_k_top_p_joint", "min_p")
    },
    **{f"{kind}_renorm_probs": each(SAMPLE, "batch_size", "vocab_size") for kind in ("top_k", "top_p")},
    "draft_topk1_postprocess": each(SELECT, "batch_size", "vocab_size"),
    "chain_speculative_sampling": verify_chain,
    "fast_topk": each(SELECT, "num_rows", "vocab_size"),
    "fast_topk_v2": sparse_top_k,
    "fast_topk_transform_ragged_fused": sparse_top_k,
    "fast_topk_transform_fused": sparse_top_k_slots,
    "build_tree_kernel_efficient": build_tree,
    "verify_tree_greedy": each(1, "batch_size", "num_draft_tokens"),
    "tree_speculative_sampling_target_only": verify_sampled,
}
