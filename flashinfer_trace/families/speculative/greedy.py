"""Verifying a tree of draft tokens against the tokens that the target model finds most probable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import Exact, Expected

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


#: Tokens from 0 on; with two, most siblings have the same token and most trees are followed far.
VOCABULARIES = (100000, 2)
#: How far apart two tokens are: their last 16 bits are alike.
APART = 1 << 16
#: How likely the target model's token is that of a child: in quarters.
AGREEMENTS = (3, 0, 4)
UNWRITTEN = -1
LAUNCHABLE = {"batch_size": (1, 1 << 16)}


def usual_sequences(few: int, definition: Definition, axes: Mapping[str, int]) -> int:
    nodes = definition.const_axes["num_draft_tokens"]
    return axes.get("num_nodes", few * nodes) // nodes


#: The corners are trees of each shape that are followed to the end, and siblings with the same token.
PLAN = RowPlans(
    {"batch_size": Count(12, 256, usual=functools.partial(usual_sequences, 8), corner=6)},
    {"shape": SHAPES, "vocabulary": VOCABULARIES, "agreement": AGREEMENTS, "shuffled": FLAG},
    special=[
        *({"shape": shape, "agreement": 4} for shape in SHAPES),
        {"vocabulary": 2, "agreement": 4, "shuffled": True},
    ],
    many_rows=300,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, count, device = definition.const_axes, plan["batch_size"], draws.device
    nodes = axes["num_draft_tokens"]
    # One level more than is accepted: the walk has to end before.
    trees = [drawn_parents(plan["shape"], nodes, axes["num_steps"] + 1, draws) for _ in range(count)]
    apart = APART if plan["vocabulary"] == 2 else 1
    candidates = draws.integers([count, nodes], 0, plan["vocabulary"] - 1) * apart
    linked = link_inputs(trees, nodes, plan["shuffled"], draws)
    targets = draws.integers([count, nodes], 0, plan["vocabulary"] - 1) * apart
    numbers = iter(draws.host_integers(2 * count * nodes, 0, 1 << 20))
    for tree, parents in enumerate(trees):
        for node in range(nodes):
            children = [child for child, parent in enumerate(parents) if parent == node]
            likely, which = next(numbers) % 4 < plan["agreement"], next(numbers)
            if children and likely:
                targets[tree, node] = candidates[tree, children[which % len(children)]]
    # The target model's tokens are in the flat order, where the place of a node is retrive_index.
    target_predict = torch.empty_like(targets).view(-1)
    target_predict[linked["retrive_index"].flatten()] = targets.flatten()
    return {"candidates": candidates, **linked, "target_predict": target_predict.view(count, nodes).to(device)}


def expected_path(
    definition: Definition, device: torch.device, accepted: list[list[int]], tokens: dict[int, int], batch: int
) -> dict[str, Expected]:
    """The outputs, given the places of the root and the accepted nodes of each tree, and the token at each of them."""
    axes = definition.const_axes
    predicts = [tokens.get(place, UNWRITTEN) for place in range(batch * axes["num_draft_tokens"])]
    width = axes["num_speculative_tokens"]
    index = [[*places, *[UNWRITTEN] * (width - len(places))] for places in accepted]

    def tensor(numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return {
        "predicts": Expected(tensor(predicts)),
        "accept_index": Expected(tensor(index).view(batch, width)),
        "accept_token_num": Expected(tensor([len(places) - 1 for places in accepted])),
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    candidates, places = inputs["candidates"].tolist(), inputs["retrive_index"].tolist()
    target = inputs["target_predict"].flatten().tolist()
    trees = zip(inputs["retrive_next_token"].tolist(), inputs["retrive_next_sibling"].tolist(), strict=True)
    accepted: list[list[int]] = []
    tokens: dict[int, int] = {}
    for tree, (place, links) in enumerate(zip(places, trees, strict=True)):
        children, node, path = children_of(*links), 0, [place[0]]
        while True:
            wanted = tokens[place[node]] = target[place[node]]
            agreeing = [child for child in children[node] if candidates[tree][child] == wanted]
            if not agreeing or len(path) > definition.const_axes["num_steps"]:
                break
            node = agreeing[0]
            path.append(place[node])
        accepted.append(path)
    return expected_path(definition, inputs["candidates"].device, accepted, tokens, len(places))


SIBLINGS = "retrive_next_sibling"
TREES = ("candidates", "retrive_index", "retrive_next_token", SIBLINGS)


def verified(function: Callable[..., None], inputs: Inputs, outputs: Outputs, *more: Any) -> Outputs:
    """The entries that a kernel writes as it walks trees. It leaves others alone; its caller fills them with -1."""
    for name in ("predicts", "accept_index"):
        outputs[name].fill_(UNWRITTEN)
    written = (outputs[name] for name in ("predicts", "accept_index", "accept_token_num"))
    function(*written, *(inputs[name] for name in TREES), *more)
    return outputs


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.speculative.tree import verify_tree_greedy

    return verified(verify_tree_greedy, inputs, outputs, inputs["target_predict"])


COMPARE = {
    "predicts": Exact("tokens; -1 where no node was accepted"),
    "accept_index": Exact("places of accepted nodes; -1 after the last one"),
    "accept_token_num": Exact("a count"),
}
FAMILIES = (
    Family(
        name="verify_tree_greedy",
        op_type="speculative",
        twin={"num_steps": 3, "num_speculative_tokens": 4, "num_draft_tokens": 8},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare=COMPARE,
        kernels=(Kernel("sglang.kernels.ops.speculative.tree.verify_tree_greedy", run_sgl, limits=LAUNCHABLE),),
        faults=(
            with_inputs(
                "only first children tried",
                lambda inputs, trial: {**inputs, SIBLINGS: torch.full_like(inputs[SIBLINGS], -1)},
            ),
        ),
    ),
)
