"""Chains of draft tokens: the most probable token of each step, and rejection sampling against the draft's own
distribution, judged with the uniform numbers that it is given (see `speculative.sampling` for what roundings decide).
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.speculative.greedy import COMPARE, LAUNCHABLE, UNWRITTEN, expected_path
from flashinfer_trace.families.speculative.sampling import (
    CLEAR,
    FLOAT32_EDGE,
    FLOAT64_EDGE,
    SPARE,
    UNITS,
    beside_edges,
    distribution,
    drawn_limits,
    token_ranges,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import Exact, Expected

# One step of drafting


#: ``last``: the last token is the most probable. Only corners have ``equal`` logits, and ``none``: all are -infinity.
LOGITS = ("normal", "ties", "last", "spread")
STEPS = RowPlans(
    {"batch_size": Count(12, 64)},
    {"values": LOGITS, "last_column": FLAG},
    special=[{"values": values, "last_column": True} for values in (*LOGITS, "equal", "none")],
    many_rows=300,
)


def step_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, rows = definition.const_axes, plan["batch_size"]
    kind, shape = plan["values"], [rows, axes["vocab_size"]]
    drawn = {"ties": "integers", "spread": "spread"}.get(kind, "normal")
    logits = draws.values(shape, torch.float32, drawn)
    if kind == "last":
        logits[:, -1] = 9.0
    elif kind in ("equal", "none"):
        logits.fill_(-torch.inf if kind == "none" else -1.5)
    return {
        "next_token_logits": logits,
        "positions": draws.integers([rows], 0, 1 << 20),
        "draft_tokens": draws.integers([rows, axes["num_steps"]], 0, axes["vocab_size"] - 1),
        "draft_token_column": axes["num_steps"] - 1 if plan["last_column"] else 0,
    }


def step_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """A stable sort of each row. The kernel's probability, which is always 1, is not an output."""
    best = inputs["next_token_logits"].double().sort(dim=1, descending=True, stable=True).indices[:, :1]
    column = torch.arange(definition.const_axes["num_steps"], device=best.device) == inputs["draft_token_column"]
    return {
        "topk_index": Expected(best[:, 0]),
        "positions_out": Expected(inputs["positions"] + 1),
        "draft_tokens_out": Expected(torch.where(column, best, inputs["draft_tokens"])),
    }


def run_step(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.speculative.topk1 import draft_topk1_postprocess

    _, index = draft_topk1_postprocess(*inputs.values())
    written = {"positions_out": inputs["positions"], "draft_tokens_out": inputs["draft_tokens"]}
    return {"topk_index": index[:, 0], **written}


# Rejection sampling


#: Those of `speculative.sampling`, and for corners ``equal``: uniform numbers that are p / q exactly.
VALUES = ("peaked", "flat", "dyadic", "one_hot")
#: ``same``: the draft has the distribution of the target model.
DRAFTS = ("random", "same")
CHAINS = RowPlans(
    {"batch_size": Count(12, 12, usual=lambda definition, axes: axes.get("num_nodes", 16) // 4, corner=6)},
    {
        "values": VALUES,
        "draft": DRAFTS,
        "final": ("random", "edge"),
        "candidates": ("draft", "draft", "target", "any"),
        "shuffled": FLAG,
    },
    special=[
        {"values": "dyadic", "shuffled": True},
        {"values": "dyadic", "candidates": "any"},
        {"values": "dyadic", "candidates": "target"},
        {"values": "one_hot", "candidates": "target"},
        {"values": "equal", "shuffled": True},
        {"values": "flat", "final": "edge"},
        {"values": "flat", "draft": "same", "final": "edge"},
        {"values": "peaked", "draft": "same"},
    ],
    many_rows=300,
)


def chain_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Candidates are probable for the draft, and the target model accepts some of them; or for the target model, and
    the draft draws none where its probability is 0; or any."""
    axes, count, device = definition.const_axes, plan["batch_size"], draws.device
    nodes, steps, vocabulary = axes["num_draft_tokens"], axes["num_steps"], axes["vocab_size"]
    kind = "dyadic" if plan["values"] == "equal" else plan["values"]
    target = distribution(kind, [count, nodes, vocabulary], draws)
    draft = distribution(kind, [count, steps, vocabulary], draws)
    if plan["draft"] == "same":
        draft = target[:, :steps].clone()
    candidates = draws.integers([count, nodes], 0, vocabulary - 1)
    if plan["candidates"] != "any":
        both = draft if plan["draft"] == "same" else torch.minimum(draft, target[:, :steps])
        best = target[:, :steps] if plan["candidates"] == "target" else draft
        agreed = draws.integers([count, steps], 0, 2) > 0
        candidates[:, 1:] = torch.where(agreed, both.topk(1).indices[:, :, 0], best.topk(1).indices[:, :, 0])
    chosen = candidates[:, 1:, None]
    p, q = (each[:, :steps].gather(2, chosen)[:, :, 0].double() for each in (target, draft))
    edges = p / q.clamp_min(1e-30)
    place = draws.permutation(count * nodes) if plan["shuffled"] else torch.arange(count * nodes, device=device)
    inputs = {
        "candidates": candidates,
        "retrive_index": place.view(count, nodes),
        "uniform_samples": uniform(plan["values"], edges, nodes, draws),
        "uniform_samples_for_final_sampling": draws.integers([count], 0, UNITS - 1).float() / UNITS
        if kind == "dyadic"
        else draws.uniform([count]),
        "target_probs": target,
        "draft_probs": draft,
    }
    if plan["final"] == "edge":
        inputs["uniform_samples_for_final_sampling"] = beside_edges(outcome(definition, inputs)[1], draws)
    return inputs


def uniform(values: str, edges: torch.Tensor, nodes: int, draws: Draws) -> torch.Tensor:
    """float32 [batch_size, nodes]: a number for each step, clear of p / q [batch_size, steps], and one for no step. Of
    ``dyadic`` ones products are exact, and none is a probability but 0; ``equal`` ones are p / q where float32 has
    it."""
    shape = [len(edges), nodes]
    if values in ("dyadic", "equal"):
        number = draws.integers(shape, 0, UNITS - 1).float() + 0.5
        numbers = torch.where(draws.integers(shape, 0, 7) == 0, 0.0, number) / UNITS
        if values == "equal":
            exact = (edges < 1) & ((edges * UNITS) == (edges * UNITS).round())
            numbers[:, :-1] = torch.where(exact, edges, numbers[:, :-1].double()).float()
        return numbers
    numbers = draws.uniform([SPARE, *shape])
    clear = (numbers[..., :-1] - edges).abs() > CLEAR * edges.clamp_max(2.0)
    first = torch.nn.functional.pad(clear, (0, 1), value=True).long().argmax(0, keepdim=True)
    return numbers.gather(0, first)[0]


def outcome(definition: Definition, inputs: Inputs) -> tuple[list[int], torch.Tensor]:
    """How many tokens of each chain are accepted, token by token, and the float64 weights of the last one."""
    counts, weights, steps = [], [], definition.const_axes["num_steps"]
    target, draft = inputs["target_probs"].double(), inputs["draft_probs"].double()
    numbers = inputs["uniform_samples"].double().tolist()
    for chain, tokens in enumerate(inputs["candidates"].tolist()):
        count = 0
        while count < steps:
            token = tokens[count + 1]
            p, q = float(target[chain, count, token]), float(draft[chain, count, token])
            if not (q > 0 and numbers[chain][count] * q < p):
                break
            count += 1
        counts.append(count)
        weights.append(target[chain, count] - (draft[chain, count] if count < steps else 0.0))
    return counts, torch.stack(weights).clamp_min(0) if weights else target.new_zeros(0, target.shape[2])


def chain_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    places, candidates = inputs["retrive_index"].tolist(), inputs["candidates"].tolist()
    counts, weights = outcome(definition, inputs)
    u = inputs["uniform_samples_for_final_sampling"].double()
    ranges = [token_ranges(weights, u, edge).tolist() for edge in (0.0, FLOAT64_EDGE, FLOAT32_EDGE)]
    tokens: dict[int, int] = {}
    for chain, count in enumerate(counts):
        tokens |= {places[chain][step]: candidates[chain][step + 1] for step in range(count)}
        tokens[places[chain][count]] = ranges[0][chain][0]
    accepted = [place[: count + 1] for place, count in zip(places, counts, strict=True)]
    expected = expected_path(definition, u.device, accepted, tokens, len(places))
    predicts, parts = expected["predicts"].value, {}
    for name, found in zip(("float64", "float32"), ranges[1:], strict=True):
        limits = torch.stack((predicts, predicts))
        for place, (low, high) in zip(accepted, found, strict=True):
            limits[0, place[-1]], limits[1, place[-1]] = low, high
        parts[name] = limits.double()
    return {**expected, "predicts": Expected(predicts, parts)}


def run_chain(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """It leaves entries of tokens that are not reached alone, which its caller fills with -1."""
    from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

    for name in ("predicts", "accept_index"):
        outputs[name].fill_(UNWRITTEN)
    candidates, places, *numbers = inputs.values()
    chain_speculative_sampling_triton(*outputs.values(), candidates, places, None, None, *numbers, 1.0, 1.0, True)
    return outputs


FAMILIES = (
    Family(
        name="draft_topk1_postprocess",
        op_type="speculative",
        twin={"num_steps": 4, "vocab_size": 48},
        plan=STEPS,
        make_inputs=step_inputs,
        oracle=step_oracle,
        compare={
            "topk_index": Exact("the first of the largest"),
            "positions_out": Exact("a count"),
            "draft_tokens_out": Exact("tokens; other columns stay"),
        },
        strided=("next_token_logits",),
        kernels=(
            Kernel(
                "sglang.kernels.ops.speculative.topk1.draft_topk1_postprocess",
                run_step,
                limits=LAUNCHABLE,
                in_place=("positions", "draft_tokens"),
            ),
        ),
    ),
    Family(
        name="chain_speculative_sampling",
        op_type="speculative",
        twin={"num_steps": 3, "num_speculative_tokens": 4, "num_draft_tokens": 4, "vocab_size": 48},
        plan=CHAINS,
        make_inputs=chain_inputs,
        oracle=chain_oracle,
        compare={**COMPARE, "predicts": drawn_limits("float64")},
        kernels=(
            Kernel(
                "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
                run_chain,
                limits=LAUNCHABLE,
                compare={"predicts": drawn_limits("float32")},
            ),
        ),
        faults=(
            with_inputs(
                "the uniform number of the next token",
                lambda inputs, trial: {**inputs, "uniform_samples": inputs["uniform_samples"].roll(1, dims=1)},
            ),
        ),
    ),
)
