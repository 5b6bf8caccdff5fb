"""Trees of draft tokens: how they are drawn, and the links by which kernels walk them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashinfer_trace.harness.inputs import Draws

#: ``chain``: each node descends from the one before, up to the number of steps; ``star``: all from the root.
SHAPES = ("random", "chain", "star")


def drawn_parents(shape: str, nodes: int, steps: int, draws: Draws) -> list[int]:
    """The parent of each node, -1 for the root, which is node 0; no node is deeper than `steps`."""
    parents, depth = [-1], [0]
    for node in range(1, nodes):
        open_nodes = [each for each in range(node) if depth[each] < steps]
        chosen = open_nodes[draws.host_integers(1, 0, len(open_nodes) - 1)[0]]
        if shape == "star":
            chosen = 0
        elif shape == "chain":
            chosen = node - 1 if depth[node - 1] < steps else 0
        parents.append(chosen)
        depth.append(depth[chosen] + 1)
    return parents


def links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first child and the next sibling of each node, -1 if there is none; children are in ascending order."""
    first, following = [-1] * len(parents), [-1] * len(parents)
    youngest: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if parent in youngest:
            following[youngest[parent]] = node
        else:
            first[parent] = node
        youngest[parent] = node
    return first, following


def link_inputs(trees: Sequence[Sequence[int]], nodes: int, shuffled: bool, draws: Draws) -> dict[str, torch.Tensor]:
    """int64 [batch_size, num_draft_tokens] inputs; with `shuffled`, nodes are not in the flat arrays' order."""
    shape = (len(trees), nodes)
    linked = [links(parents) for parents in trees]
    places = torch.arange(len(trees) * nodes, device=draws.device)
    if shuffled:
        places = places[draws.permutation(len(places))]

    def tensor(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=draws.device).view(shape)

    return {
        "retrive_index": places.view(shape),
        "retrive_next_token": tensor([first for first, _ in linked]),
        "retrive_next_sibling": tensor([following for _, following in linked]),
    }


def children_of(first: list[int], following: list[int]) -> list[list[int]]:
    """The children of each node of one tree, in the order in which a kernel meets them.

    Args:
        first, following: the tree's rows of ``retrive_next_token`` and ``retrive_next_sibling``.
    """
    children = []
    for node in first:
        found = []
        while node != -1:
            found.append(node)
            node = following[node]
        children.append(found)
    return children
