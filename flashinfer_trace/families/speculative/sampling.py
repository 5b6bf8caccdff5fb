"""Verifying a tree of draft tokens by rejection sampling, judged with the uniform numbers that it is given.

A kernel's float32 results decide between tokens in two places. First, the probabilities of tried siblings are added
and compared with a uniform number. Inputs keep that number away from each sum by much more than roundings, or make all
sums exact and the number different from them. Releases disagree if they are equal: sglang-kernel 0.4.2 accepts; SGLang
0.5.23 and the reference reject. Only rejection is right for a number of 0, because a token of probability 0 is never
accepted, not even by a threshold of 0. Second, the last token is the first whose cumulative weight exceeds a number. If
that number is within the errors of float32 sums of an edge between two tokens, either may come out (`DRAWN`).
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.families.sampling import SUM
from flashinfer_trace.families.speculative.greedy import (
    COMPARE,
    LAUNCHABLE,
    SHAPES,
    children_of,
    drawn_parents,
    expected_path,
    link_inputs,
    usual_sequences,
    verified,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, ReferenceRun
from flashinfer_trace.harness.faults import FaultyCase, with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import Exact, Expected, unit_roundoff
from flashinfer_trace.verdict.intervals import Interval

#: ``dyadic``: multiples of 1/32 that sum to 1, with uniform numbers halfway between them, or 0: arithmetic is exact;
#: ``faint``: all but the last token have probabilities around the smallest threshold. Only corners have ``beside``:
#: flat ones, with uniform numbers next to the sums of second and third siblings.
VALUES = ("peaked", "flat", "dyadic", "one_hot", "faint")
#: The last uniform number: any, or a neighbor in float32 of an edge between two tokens.
FINAL = ("random", "edge")
#: SGLang gives zeros. ``same``: where the target model's probabilities are, so nothing remains to draw from.
DRAFTS = ("zeros", "random", "same")
#: (threshold_single, threshold_acc); numbers of float32.
THRESHOLDS = ((1.0, 1.0), (0.3125, 1.0), (1.0, 0.5), (1.0, 0.0), (0.75, 0.9), (0.0, 1.0), (0.0, 0.0))
#: The first ones, which leave some candidates to reject.
DRAWN_THRESHOLDS = 5
UNITS = 32
#: How many uniform numbers are drawn for each that is used.
SPARE = 8
SMALLEST_THRESHOLD = 1e-9
#: Errors of a cumulative float32 sum and of the product of the uniform number with the total, relative to the total.
FLOAT32_EDGE = 2 * SUM + 4 * unit_roundoff(torch.float32)
FLOAT64_EDGE = 2.0**-35
#: The largest uniform number.
LARGEST = 1 - 2.0**-24
#: The closest that a uniform number comes to a sum, relative to it; roundings add up to less than 2^-20.
CLEAR = 2.0**-16
#: How far a number next to a sum is from it, relative to it: sums in a 16-bit format are farther.
BESIDE = 2 * CLEAR


def beside_sums(edges: torch.Tensor, numbers: torch.Tensor, draws: Draws) -> torch.Tensor:
    """float32 like `numbers` [draws, batch_size, nodes]: on either side of the sum of the second or third child, as
    given where there is none. `edges` [batch_size, nodes, nodes] is what a number is compared with, or infinite."""
    child = edges.isfinite().cumsum(-1).masked_fill(~edges.isfinite(), 0)
    chosen = draws.integers(numbers.shape, 2, 3)[..., None] == child
    side = 2 * draws.integers(numbers.shape, 0, 1) - 1
    sums = torch.where(chosen, edges, 0.0).sum(-1)
    beside = (sums * (1 + side * BESIDE)).float()
    return torch.where((beside > 0) & (beside < 1), beside, numbers)


#: Few plans have no tree, unlikely candidates, or a draft of zeros: where none is accepted, or rejected, an output is
#: zero, and the case proves nothing.
EXACT: Plan = {"values": "dyadic"}
PLAN = RowPlans(
    {"batch_size": Count(12, 12, usual=functools.partial(usual_sequences, 4), corner=5)},
    {
        "shape": SHAPES,
        "values": VALUES,
        "draft": (*DRAFTS, "random", "random", "same"),
        "thresholds": range(DRAWN_THRESHOLDS),
        "final": FINAL,
        "likely": (True, True, True, False),
        "shuffled": FLAG,
    },
    # Exact arithmetic with each pair of thresholds; trees of each shape; nothing to draw from; numbers next to sums;
    # many impossible candidates.
    special=[
        *({**EXACT, "thresholds": number, "shuffled": True} for number in range(4)),
        *({**EXACT, "thresholds": number, "shape": "star", "likely": False} for number in (0, 3, 5, 6)),
        *({**EXACT, "shape": shape, "draft": "random"} for shape in SHAPES),
        {**EXACT, "shape": "star", "likely": False},
        *({"shape": shape, "values": "faint", "thresholds": 3, "likely": False} for shape in SHAPES),
        *({"values": "flat", "draft": draft, "final": "edge"} for draft in ("zeros", "random")),
        {"draft": "same", "shape": "chain"},
        {"values": "flat", "draft": "random", "thresholds": 4},
        *({"shape": "star", "values": "beside", "thresholds": number} for number in (0, 2, 4)),
    ],
    many_rows=300,
)


def distribution(values: str, shape: list[int], draws: Draws) -> torch.Tensor:
    if values == "dyadic":
        # Few tokens: their probabilities, and sums of them, meet thresholds and uniform numbers often.
        ends = draws.integers([*shape[:-1], UNITS], 0, 3) * draws.integers([*shape[:-1], 1], 1, 3)
        counts = torch.zeros(shape, device=draws.device)
        return counts.scatter_add_(-1, ends, torch.ones(ends.shape, device=draws.device)) / UNITS
    if values == "one_hot":
        tokens = draws.integers([*shape[:-1], 1], 0, shape[-1] - 1)
        return torch.zeros(shape, device=draws.device).scatter_(-1, tokens, 1.0)
    if values == "faint":
        faint = draws.uniform(shape, 0.0, 2 * SMALLEST_THRESHOLD)
        faint[..., -1] = 1.0
        return faint
    return torch.softmax(draws.normal(shape, scale=6.0 if values == "peaked" else 1.0), dim=-1)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Likely candidates are the most probable tokens after their parents, one after the other."""
    axes, count = definition.const_axes, plan["batch_size"]
    nodes, vocabulary = axes["num_draft_tokens"], axes["vocab_size"]
    # One level more than is accepted: the walk has to end before.
    trees = [drawn_parents(plan["shape"], nodes, axes["num_steps"] + 1, draws) for _ in range(count)]
    parents = torch.tensor(trees, dtype=torch.int64, device=draws.device).view(count, nodes)
    target = distribution(plan["values"], [count, nodes, vocabulary], draws)
    same = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, :, None]
    order = torch.arange(nodes, device=draws.device)
    candidates = draws.integers([count, nodes], 0, vocabulary - 1)
    if plan["likely"]:
        elder = (same & (order < order[:, None])).sum(2)
        best = target.topk(min(nodes, vocabulary), dim=2).indices
        candidates = best[torch.arange(count, device=draws.device)[:, None], parents.clamp_min(0), elder]
    single, acc = THRESHOLDS[plan["thresholds"]]
    above = target.gather(1, parents.clamp_min(0)[:, :, None].expand(-1, -1, vocabulary))
    probability = above.gather(2, candidates[:, :, None]).squeeze(2).double()
    tried = (same & (order <= order[:, None])).double() @ probability[:, :, None] if count else probability[:, :, None]
    inputs: dict[str, Any] = {
        "candidates": candidates,
        **link_inputs(trees, nodes, plan["shuffled"], draws),
        "uniform_samples": uniform(plan, tried.squeeze(2) / max(acc, SMALLEST_THRESHOLD), parents, draws),
        "uniform_samples_for_final_sampling": draws.integers([count], 0, UNITS - 1).float() / UNITS
        if plan["values"] == "dyadic"
        else draws.uniform([count]),
        "target_probs": target,
        "draft_probs": distribution(plan["values"], list(target.shape), draws)
        if plan["draft"] == "random"
        else target * float(plan["draft"] == "same"),
        "threshold_single": float(torch.tensor(single)),
        "threshold_acc": float(torch.tensor(acc)),
    }
    if plan["final"] == "edge":
        inputs["uniform_samples_for_final_sampling"] = beside_edges(outcome(definition, inputs).weights, draws)
    return {name: inputs[name] for name in definition.inputs}


def beside_edges(weights: torch.Tensor, draws: Draws) -> torch.Tensor:
    """float32 [batch_size]: the number before or after the cumulative share of a token, which decides for it or not."""
    shares = weights.cumsum(1) / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    token = draws.integers([len(weights), 1], 0, weights.shape[1] - 2)
    edge = shares.gather(1, token)[:, 0].float()
    toward = draws.integers(edge.shape, 0, 1).float()
    return torch.nextafter(edge, toward).clamp(0.0, LARGEST)


def uniform(plan: Plan, tried: torch.Tensor, parents: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The number of each node, clear of what its children compare it with (`tried`, float64 [batch_size, nodes]),
    except for 0, where sums may be 0 too. Exact ones are halfway between possible sums; planned ones are next to a
    sum."""
    count, nodes = tried.shape
    # float32 makes no error in sums of probabilities and in what a number is compared with, or none that could matter:
    # divided by the smallest threshold, a sum is 0 or beyond all numbers.
    if plan["values"] in ("dyadic", "one_hot") and THRESHOLDS[plan["thresholds"]][1] != 0.9:
        number = draws.integers([count, nodes], 0, UNITS - 1).float() + 0.5
        numbers = torch.where(draws.integers([count, nodes], 0, 7) == 0, 0.0, number) / UNITS
        # Of every other tree that of the root, whose last child is accepted by no more than it must be.
        last = torch.where(parents == 0, tried, 0.0).amax(1)
        below = torch.where(last >= 1, LARGEST, (last - 0.5 / UNITS).clamp_min(0)).float()
        numbers[::2, 0] = below[::2]
        return numbers
    numbers = draws.uniform([SPARE, count, nodes])
    node = torch.arange(nodes, device=tried.device)
    edges = torch.where(parents[:, None, :] == node[:, None], tried[:, None, :], math.inf)
    if plan["values"] == "beside" and count:
        numbers = beside_sums(edges, numbers, draws)
    clear = ((numbers[..., None] - edges).abs() > CLEAR * edges.clamp_max(2.0)).all(-1)
    return numbers.gather(0, clear.long().argmax(0, keepdim=True))[0] if count else numbers[0]


@dataclass(frozen=True)
class Outcome:
    """The result of the trees of a case.

    Attributes:
        paths: the root and the accepted nodes of each tree.
        draft: draft_probs with what is copied to them.
        weights: float64 [batch_size, vocab_size], those of the last token.
    """

    paths: list[list[int]]
    draft: torch.Tensor
    weights: torch.Tensor


def outcome(definition: Definition, inputs: Inputs) -> Outcome:
    target, draft = inputs["target_probs"], inputs["draft_probs"].clone()
    paths = []
    for tree in range(len(target)):
        path, rejected = accepted_path(definition, inputs, tree)
        for node, token in rejected:
            draft[tree, node, token] = target[tree, node, token]
        paths.append(path)
    last = torch.tensor([path[-1] for path in paths], dtype=torch.int64, device=draft.device)
    here = torch.arange(len(paths), device=draft.device), last
    full = torch.tensor([len(path) > definition.const_axes["num_steps"] for path in paths], device=draft.device)
    weights = target[here].double() - draft[here].double().masked_fill(full.view(-1, 1).bool(), 0.0)
    return Outcome(paths, draft, weights.clamp_min(0))


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    places, device = inputs["retrive_index"].tolist(), inputs["candidates"].device
    found, tokens = outcome(definition, inputs), {}
    accepted = [[place[node] for node in path] for place, path in zip(places, found.paths, strict=True)]
    for tree, path in enumerate(found.paths):
        for above, below in itertools.pairwise(path):
            tokens[places[tree][above]] = int(inputs["candidates"][tree, below])
    u = inputs["uniform_samples_for_final_sampling"].double()
    choices = [token_ranges(found.weights, u, edge).tolist() for edge in (0.0, FLOAT64_EDGE, FLOAT32_EDGE)]
    tokens |= {place[-1]: first for place, (first, _) in zip(accepted, choices[0], strict=True)}
    expected = expected_path(definition, device, accepted, tokens, len(places))
    predicts = expected["predicts"].value
    parts = {}
    for name, ranges in zip(("float64", "float32"), choices[1:], strict=True):
        limits = torch.stack((predicts, predicts))
        for place, (low, high) in zip(accepted, ranges, strict=True):
            limits[0, place[-1]], limits[1, place[-1]] = low, high
        parts[name] = limits.double()
    return {**expected, "predicts": Expected(predicts, parts), "draft_probs_out": Expected(found.draft.double())}


def accepted_path(definition: Definition, inputs: Inputs, tree: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The root and the accepted nodes, and (parent, token) of each rejected node."""
    first, following, candidates = (
        inputs[name][tree].tolist() for name in ("retrive_next_token", "retrive_next_sibling", "candidates")
    )
    children = children_of(first, following)
    numbers = inputs["uniform_samples"][tree].double().tolist()
    path: list[int] = [0]
    rejected: list[tuple[int, int]] = []
    while len(path) <= definition.const_axes["num_steps"]:
        node, mass = path[-1], 0.0
        for child in children[node]:
            probability = float(inputs["target_probs"][tree, node, candidates[child]])
            mass += probability
            bound = mass / max(inputs["threshold_acc"], SMALLEST_THRESHOLD)
            if probability > 0 and (numbers[node] < bound or probability >= inputs["threshold_single"]):
                path.append(child)
                break
            rejected.append((node, candidates[child]))
        else:
            break
    return path, rejected


def token_ranges(weights: torch.Tensor, u: torch.Tensor, edge: float) -> torch.Tensor:
    """int64 [batch_size, 2]: the first and the last token that may be drawn if sums are off by `edge` of the total; one
    token where they are exact: the first that has less weight after it than 1 - u of the total."""
    behind = weights.flip(1).cumsum(1).flip(1) - weights
    total = weights.sum(1, keepdim=True)
    units = torch.cat((weights, u[:, None]), dim=1) * UNITS
    error = torch.where((units == units.round()).all(1, keepdim=True), 0.0, edge) * total
    beyond = total - u[:, None] * total
    last_valid = torch.where(weights > 0, torch.arange(weights.shape[1], device=u.device), -1).amax(1)
    found = []
    for shift in (error, -error):
        drawn = (behind < beyond + shift) & (weights > 0)
        first = torch.where(drawn.any(1), drawn.long().argmax(1), last_valid)
        found.append(torch.where(last_valid < 0, weights.shape[1] - 1, first))
    return torch.stack(found, dim=1)


def drawn_limits(arithmetic: str) -> Interval:
    reasons = {
        "float64": "edges between tokens are as exact as float64 sums, 2^-35 of the total",
        "float32": "tokens whose edges are within the error of two float32 sums of 200 roundings, 2 x 200 + 4 of them",
    }
    return Interval(
        lambda expected: (expected.parts[arithmetic][0], expected.parts[arithmetic][1]),
        f"accepted tokens are exact; for the drawn one, {reasons[arithmetic]}",
    )


def drawn_from_weights(definition: Definition, inputs: Inputs, outputs: Outputs) -> list[str]:
    """A line if the last token of a tree has no weight although others have."""
    batch = len(inputs["candidates"])
    tree = torch.arange(batch, device=inputs["candidates"].device)
    counts = outputs["accept_token_num"].long()
    place = outputs["accept_index"].long()[tree, counts]
    node = (inputs["retrive_index"] == place[:, None]).long().argmax(1)
    draft = outputs["draft_probs_out"][tree, node] * (counts < definition.const_axes["num_steps"])[:, None]
    weights = inputs["target_probs"][tree, node] - draft
    token = outputs["predicts"].long()[place]
    wrong = (weights.gather(1, token[:, None])[:, 0] <= 0) & (weights > 0).any(1)
    return [f"{int(wrong.sum())} drawn tokens have no weight"] if wrong.any() else []


def sums_reject(definition: Definition, run: ReferenceRun) -> list[str]:
    """A line if the reference accepts a first child whose probability is the uniform number, as no other case shows."""
    plan = {**PLAN.plan_for_axes(definition, {}, Draws(0, "cpu")), "values": "dyadic", "shape": "star"}
    inputs = make_inputs(definition, plan, Draws(0, "cpu"))
    tree = torch.arange(len(inputs["candidates"]))
    inputs["uniform_samples"][:, 0] = inputs["target_probs"][tree, 0, inputs["candidates"][:, 1]]
    wanted, found = oracle(definition, inputs)["accept_index"].value, run(definition, inputs)["accept_index"]
    return [] if torch.equal(found.cpu().long(), wanted) else ["reference: a number that equals the sum must reject"]


NUMBERS = ("uniform_samples", "uniform_samples_for_final_sampling", "target_probs", "draft_probs")


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.speculative.sampling import tree_speculative_sampling_target_only

    more = (inputs[name] for name in (*NUMBERS, "threshold_single", "threshold_acc"))
    found = verified(tree_speculative_sampling_target_only, inputs, outputs, *more, True)
    return {**found, "draft_probs_out": inputs["draft_probs"]}


def ignored(name: str, inputs: Inputs, trial: FaultyCase) -> Inputs | None:
    return None if inputs[name] == 1.0 else {**inputs, name: 1.0}


FAMILIES = (
    Family(
        name="tree_speculative_sampling_target_only",
        op_type="speculative",
        twin={"num_steps": 3, "num_speculative_tokens": 4, "num_draft_tokens": 8, "vocab_size": 48},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={
            **COMPARE,
            "predicts": drawn_limits("float64"),
            "draft_probs_out": Exact("the probability of each rejected token; all others are left alone"),
        },
        kernels=(
            Kernel(
                "sglang.kernels.ops.speculative.sampling.tree_speculative_sampling_target_only",
                run_sgl,
                limits=LAUNCHABLE,
                in_place=("draft_probs",),
                compare={"predicts": drawn_limits("float32")},
            ),
        ),
        relations=(drawn_from_weights,),
        checks=(sums_reject,),
        faults=(
            # Each node uses the number of the next.
            with_inputs(
                "the uniform number of another node",
                lambda inputs, trial: {**inputs, "uniform_samples": inputs["uniform_samples"].roll(1, dims=1)},
            ),
            *(
                with_inputs(f"{name} ignored", functools.partial(ignored, name))
                for name in ("threshold_single", "threshold_acc")
            ),
        ),
    ),
)
