"""Building the tree of the draft tokens that were kept: links, positions and the mask of attention."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import called
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws, sizes
from flashinfer_trace.harness.plans import OwnPlans
from flashinfer_trace.verdict.compare import Exact, Expected
from flashinfer_trace.verdict.wrong_outputs import MUTANTS, Mutant

#: Which of the tokens that may be kept next are: any; one that was drafted last; one that was drafted first.
SHAPES = ("random", "deep", "wide")
#: Tokens of a long text: more than a number of 16 bits can be.
LONG = 70000
FULL_MASK = 0
#: The kernel has one thread a node in one block.
LAUNCHABLE = {"batch_size": (1, 1 << 16)}


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    low, high = request.range("batch_size", 0, 8, 64)
    length = sizes(0, 4096 if request.large else 40)
    return st.fixed_dictionaries(
        {"lengths": st.lists(length, min_size=low, max_size=high), "shape": st.sampled_from(SHAPES)}
    )


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    nodes = definition.const_axes["num_draft_tokens"]
    count = axes.get("batch_size", axes.get("num_nodes", 4 * nodes) // nodes)
    text = axes["mask_size"] // nodes - count * nodes if "mask_size" in axes else 100 * count
    share = [text // count] * count if count else []
    return {"lengths": [text - sum(share[1:]), *share[1:]] if share else [], "shape": "random"}


def corners(request: PlanRequest) -> list[Plan]:
    """Sequences without text, of one token, and of different lengths; more than are drawn on a CPU; and a long text."""
    low, high = request.range("batch_size", 0, 8, 64)
    few = [{"lengths": [0, 1, 17, 2][: max(low, min(4, high))], "shape": shape} for shape in SHAPES]
    long = {"lengths": [3, LONG][-high:], "shape": "random"}
    return [*few, {"lengths": [number % 4 for number in range(40)], "shape": "random"}, long]


def drafted(definition: Definition, shape: str, draws: Draws) -> tuple[list[int], list[int]]:
    """The parent list of one draft, and the tokens that were kept of it, ascending, each with its parent. Tokens are
    numbered as drafting does: top_k of the first step, then top_k^2 of each further one, top_k for each of the top_k
    tokens that were expanded, which the parent list names."""
    axes = definition.const_axes
    top_k, steps = axes["top_k"], axes["num_steps"]
    # Entry 0 stands for the root; the entries 1, 2, ... name the tokens that were expanded.
    parent_list = [-1, *range(top_k)]
    for step in range(1, steps - 1):
        first = top_k + (step - 1) * top_k * top_k
        chosen = draws.host_integers(4 * top_k, 0, top_k * top_k - 1)
        distinct = list(dict.fromkeys([*chosen, *range(top_k * top_k)]))[:top_k]
        parent_list += [first + place for place in distinct]
    kept: list[int] = []
    ready = list(range(top_k))
    while len(kept) < axes["num_selected"]:
        place = {"wide": 0, "deep": len(ready) - 1}.get(shape, draws.host_integers(1, 0, len(ready) - 1)[0])
        token = ready.pop(place)
        kept.append(token)
        entries = [entry for entry, parent in enumerate(parent_list) if entry and parent == token]
        ready += [entry * top_k + child for entry in entries for child in range(top_k)]
    return parent_list[: axes["num_parents"]], sorted(kept)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """A mask whose columns of the text are drawn: kernels must leave them alone."""
    axes, device, lengths = definition.const_axes, draws.device, plan["lengths"]
    drafts = [drafted(definition, plan["shape"], draws) for _ in lengths]
    size = sum(axes["num_draft_tokens"] * (length + axes["num_draft_tokens"]) for length in lengths)

    def tensor(rows: list[list[int]], width: int) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device).view(len(rows), width)

    return {
        "parent_list": tensor([parents for parents, _ in drafts], axes["num_parents"]),
        "selected_index": tensor([kept for _, kept in drafts], axes["num_selected"]),
        "verified_seq_len": torch.tensor(lengths, dtype=torch.int64, device=device),
        "tree_mask": draws.integers([size], 0, 3) > 0,
    }


def ancestors(parent_list: list[int], kept: list[int], top_k: int) -> list[list[int]]:
    """The path of each node to the root, itself first, by looking up one token after the other."""
    node_of = {token: node for node, token in enumerate(kept, 1)}
    paths = [[0]]
    for token in kept:
        path, above = [node_of[token]], token
        while above >= top_k:
            above = parent_list[above // top_k]
            path.append(node_of[above])
        paths.append([*path, 0])
    return paths


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Sequence by sequence and node by node, in Python."""
    axes, device = definition.const_axes, inputs["parent_list"].device
    nodes, mask, start = axes["num_draft_tokens"], inputs["tree_mask"].clone(), 0
    positions: list[int] = []
    first: list[list[int]] = []
    following: list[list[int]] = []
    lengths = inputs["verified_seq_len"].tolist()
    rows = zip(inputs["parent_list"].tolist(), inputs["selected_index"].tolist(), lengths, strict=True)
    for parents, kept, length in rows:
        paths = ancestors(parents, kept, axes["top_k"])
        part = mask[start : start + nodes * (length + nodes)].view(nodes, length + nodes)
        part[:, length:] = torch.tensor([[node in path for node in range(nodes)] for path in paths], device=device)
        start += part.numel()
        positions += [length + len(path) - 1 for path in paths]
        children = [[path[0] for path in paths if path[1:2] == [node]] for node in range(nodes)]
        first.append([each[0] if each else -1 for each in children])
        next_of = {a: b for each in children for a, b in itertools.pairwise(each)}
        following.append([next_of.get(node, -1) for node in range(nodes)])

    def tensor(numbers: Any) -> Expected:
        return Expected(torch.tensor(numbers, dtype=torch.int64, device=device))

    return {
        "tree_mask_out": Expected(mask),
        "positions": tensor(positions),
        "retrive_index": Expected(torch.arange(len(lengths) * nodes, device=device).view(-1, nodes)),
        "retrive_next_token": Expected(tensor(first).value.view(-1, nodes)),
        "retrive_next_sibling": Expected(tensor(following).value.view(-1, nodes)),
    }


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The kernel writes links that exist: its caller fills the others with -1."""
    links = ("retrive_next_token", "retrive_next_sibling")
    for name in links:
        outputs[name].fill_(-1)
    given = "parent_list selected_index verified_seq_len tree_mask positions retrive_index"
    text = f"{given} {' '.join(links)} top_k num_steps num_draft_tokens {FULL_MASK}"
    called(PATH, text, definition, {**inputs, **outputs})
    return {**outputs, "tree_mask_out": inputs["tree_mask"]}


def one_text_longer(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The lengths of the first two sequences exchanged, which keeps the mask's size."""
    lengths = inputs["verified_seq_len"].clone()
    if len(lengths) < 2 or lengths[0] == lengths[1]:
        return None
    lengths[[0, 1]] = lengths[[1, 0]]
    return {**inputs, "verified_seq_len": lengths}


class Numbers(Exact):
    """For an output that depends on sizes alone: values that an earlier case left there are right, and not a mutant."""

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        return tuple(mutant for mutant in MUTANTS if mutant.name != "stale")


PATH = "sglang.kernels.ops.speculative.tree.build_tree_kernel_efficient"
LINKS = ("positions", "retrive_next_token", "retrive_next_sibling")
FAMILIES = (
    Family(
        name="build_tree_kernel_efficient",
        op_type="speculative",
        twin={"top_k": 3, "num_steps": 3, "num_draft_tokens": 8, "num_selected": 7, "num_parents": 7},
        plan=OwnPlans(plans, plan_for_axes, corners),
        make_inputs=make_inputs,
        oracle=oracle,
        compare={
            "tree_mask_out": Exact("columns of the tree follow from its links; those of the text are left alone"),
            **{name: Exact("integers are exact") for name in LINKS},
            "retrive_index": Numbers("consecutive numbers"),
        },
        kernels=(Kernel(PATH, run_sgl, limits=LAUNCHABLE, in_place=("tree_mask",)),),
        faults=(with_inputs("two sequences' lengths exchanged", lambda inputs, trial: one_text_longer(inputs)),),
    ),
)
