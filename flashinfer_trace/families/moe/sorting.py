"""Where rows go when they are sorted by expert: block alignment, permutations and the sizes of grouped products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import called, calling
from flashinfer_trace.families.moe.inputs import drawn_ids
from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, sizes
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Exact, Expected
from flashinfer_trace.verdict.unordered import UNSPECIFIED, Multiset

#: How tokens choose: ``few`` choose among a few experts, which get many rows; with ``elsewhere``, about half of the
#: choices are on other ranks; ``one_expert``: all first choices are the same, and the others are on other ranks.
CHOICES = ("random", "skewed", "few", "elsewhere", "one_expert")
SCALE_ROWS = 128
#: The axis, the fewest tokens that are drawn, and the most on a CPU and on a GPU.
TOKENS = ("seq_len", 0, 256, 4096)
#: Pairs that are also drawn for a kernel of fewer tokens, which compares each pair with each: Triton compiles 256 for
#: 30 s and 512 for 340 s, for each alignment of their number again.
FEW_PAIRS = 256


def few_tokens(definition: Definition) -> int:
    axes = definition.const_axes
    return max(1, axes["num_experts"] // axes["top_k"])


def drawn_tokens(request: PlanRequest) -> st.SearchStrategy[int]:
    """Half of the batches have no more pairs than experts, as in decode."""
    (fewest, most), top_k = request.range(*TOKENS), request.definition.const_axes["top_k"]
    few = min(few_tokens(request.definition), max(most, FEW_PAIRS // top_k))
    return sizes(max(fewest, 1), few) | sizes(fewest, most)


def corners(request: PlanRequest) -> list[Plan]:
    """One token; the largest batch with no more pairs than experts, and one more; on a CPU none, if allowed, and
    1200."""
    few, (fewest, _) = few_tokens(request.definition), request.range(*TOKENS)
    counts = (few, few + 1, *(() if request.large else (fewest, 1200)))
    return [{"seq_len": 1}, *({"seq_len": count, "choice": "elsewhere"} for count in counts)]


PLAN = RowPlans(
    {"seq_len": Count(256, 4096, drawn=drawn_tokens)},
    {"choice": CHOICES},
    special=corners,
    many_rows=11000,  # more than 1024 pairs of an expert, and than 2^15 pairs
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    return {"topk_ids": drawn_ids(plan["seq_len"], axes["top_k"], axes["num_experts"], plan["choice"], draws)}


def inputs_with_both_ids(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    ids = make_inputs(definition, plan, draws)["topk_ids"]
    last = draws.uniform(ids.shape) < 0.5
    return {"topk_ids": ids.masked_fill_((ids < 0) & last, definition.const_axes["num_experts"])}


def pairs_by_expert(ids: torch.Tensor, num_experts: int) -> dict[int, list[int]]:
    pairs: dict[int, list[int]] = {expert: [] for expert in range(-1, num_experts)}
    for pair, expert in enumerate(ids.flatten().tolist()):
        pairs[expert].append(pair)
    return pairs


def align_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Part by part, in Python. ``group`` tells which entries may change places, and which are not specified."""
    axes, ids = definition.const_axes, inputs["topk_ids"]
    block, pairs = axes["block_size"], ids.numel()
    parts = axes["num_experts"] + 1
    length = pairs * block if pairs < parts else pairs + parts * (block - 1)
    slots: list[int] = []
    groups: list[int] = []
    experts: list[int] = []
    for expert, part in pairs_by_expert(ids, axes["num_experts"]).items():
        padding = -len(part) % block
        slots += part + [pairs] * padding
        groups += [expert + 1] * len(part) + [axes["num_experts"] + 1] * padding
        experts += [expert] * (-(-len(part) // block))
    count, blocks = len(slots), -(-length // block)
    slots += [pairs] * (length - count)
    groups += [axes["num_experts"] + 1] * (length - count)
    rest = blocks - len(experts)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=ids.device)

    written = tensor([*range(len(experts)), *[UNSPECIFIED] * rest])
    return {
        "sorted_token_ids": Expected(tensor(slots), {"group": tensor(groups)}),
        "expert_ids": Expected(tensor([*experts, *[-1] * rest]), {"group": written}),
        "num_tokens_post_pad": Expected(tensor([count])),
    }


def blocks_agree(definition: Definition, inputs: Inputs, outputs: Outputs) -> list[str]:
    ids, block = inputs["topk_ids"].flatten(), definition.const_axes["block_size"]
    slots = outputs["sorted_token_ids"][: int(outputs["num_tokens_post_pad"])].long()
    expert = torch.where(slots < len(ids), torch.cat([ids, ids.new_zeros(1)])[slots.clamp_max(len(ids))], -2)
    of_block = outputs["expert_ids"][: len(slots) // block].repeat_interleave(block)
    wrong = (expert != -2) & (expert != of_block)
    return [f"{int(wrong.sum())} pairs are in blocks of other experts"] if wrong.any() else []


def sizes_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Counted expert by expert; the outputs that the Definition has."""
    axes, ids = definition.const_axes, inputs["topk_ids"]
    ids = ids.masked_fill(ids == axes["num_experts"], -1)
    hidden, size, experts = axes["hidden_size"], axes["intermediate_size"], range(axes["num_experts"])
    pairs = pairs_by_expert(ids, axes["num_experts"])
    counts = [len(pairs[expert]) for expert in experts]
    rows = [pair for expert in experts for pair in pairs[expert]]
    rest = ids.numel() - len(rows)
    of_pair, group_of_pair = [-1] * ids.numel(), [UNSPECIFIED] * ids.numel()
    groups = [expert for expert in experts for _ in pairs[expert]]
    for row, pair in enumerate(rows):
        of_pair[pair], group_of_pair[pair] = row, groups[row]

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=ids.device)

    tokens = [pair // axes["top_k"] for pair in rows]
    transposed = "input_permutation" not in definition.outputs
    found = {
        "expert_offsets": Expected(tensor([sum(counts[:expert]) for expert in range(len(counts) + 1)])),
        "problem_sizes1": Expected(tensor([sized(rows, 2 * size, hidden, transposed) for rows in counts])),
        "problem_sizes2": Expected(tensor([sized(rows, hidden, size, transposed) for rows in counts])),
        "input_permutation": Expected(
            tensor([*tokens, *[-1] * rest]), {"group": tensor([*groups, *[UNSPECIFIED] * rest])}
        ),
        "output_permutation": Expected(tensor(of_pair), {"group": tensor(group_of_pair)}),
        "blockscale_offsets": Expected(
            tensor([sum(math.ceil(n / SCALE_ROWS) * SCALE_ROWS for n in counts[:e]) for e in range(len(counts) + 1)])
        ),
    }
    return {name: found[name] for name in definition.outputs}


def sized(rows: int, columns: int, depth: int, transposed: bool) -> list[int]:
    return [columns, rows, depth] if transposed else [rows, columns, depth]


def permutations_agree(definition: Definition, inputs: Inputs, outputs: Outputs) -> list[str]:
    ids = inputs["topk_ids"]
    token = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    here = ids.flatten() >= 0
    rows = outputs["output_permutation"][here].long()
    wrong = outputs["input_permutation"][rows] != token[here]
    return [f"input_permutation has other tokens in the rows of {int(wrong.sum())} pairs"] if wrong.any() else []


# The kernels


@dataclass(frozen=True)
class ListOptions:
    """The inputs that a kernel accepts, because nothing past its outputs may change: the length of its list is a
    multiple of this number. Plans draw any length, because PyTorch's allocator rounds the memory of an output up."""

    multiple: int = 1


ATOMICS = Multiset(
    "each expert has its pairs; atomics decide their order, and nothing is written where there is no pair"
)


def run_align(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang's wrapper calls it: one expert more, for id -1, and padding written to the end."""
    experts, device = definition.const_axes["num_experts"], inputs["topk_ids"].device
    given = {"experts": experts + 1, "counts": torch.empty(experts + 2, dtype=torch.int32, device=device)}
    text = "topk_ids experts block_size sorted_token_ids expert_ids num_tokens_post_pad counts True"
    called("sgl_kernel.moe_align_block_size", text, definition, {**inputs, **outputs, **given})
    return outputs


def run_align_small(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """One launch for a few tokens. It writes nothing after the padded parts, which its caller does not read."""
    from sglang.kernels.ops.moe.moe_align_small_numel import moe_align_small_numel

    axes, ids = definition.const_axes, inputs["topk_ids"]
    outputs["sorted_token_ids"].fill_(ids.numel())
    moe_align_small_numel(ids, axes["num_experts"] + 1, axes["block_size"], *outputs.values())
    return outputs


def run_w4a8_sizes(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The permutations are arguments that the kernel does not write."""
    given = {name: torch.empty_like(inputs["topk_ids"]).flatten() for name in ("unused", "also_unused")}
    text = "topk_ids expert_offsets problem_sizes1 problem_sizes2 unused also_unused num_experts intermediate_size"
    known = {**inputs, **outputs, **given}
    called("sgl_kernel.get_cutlass_w4a8_moe_mm_data", f"{text} hidden_size", definition, known)
    return outputs


ALIGN = Kernel(
    "sgl_kernel.moe_align_block_size",
    run_align,
    limits=LAUNCHABLE,
    plan_options=ListOptions(multiple=4),
    compare={"sorted_token_ids": ATOMICS, "expert_ids": ATOMICS},
)
ALIGN_SMALL = Kernel(
    "sglang.kernels.ops.moe.moe_align_small_numel.moe_align_small_numel",
    run_align_small,
    limits={"seq_len": (1, 6)},
    compare={"sorted_token_ids": ATOMICS, "expert_ids": ATOMICS},
)
PREPARE = calling(
    "sgl_kernel.prepare_moe_input",
    "topk_ids expert_offsets problem_sizes1 problem_sizes2 input_permutation output_permutation num_experts "
    "intermediate_size hidden_size blockscale_offsets",
    limits=LAUNCHABLE,
    compare={"input_permutation": ATOMICS, "output_permutation": ATOMICS},
)
W4A8_SIZES = Kernel("sgl_kernel.get_cutlass_w4a8_moe_mm_data", run_w4a8_sizes, limits=LAUNCHABLE)

TWIN = {"num_experts": 5, "top_k": 3}
SIZES_TWIN = {**TWIN, "num_offsets": 6, "hidden_size": 48, "intermediate_size": 20}


SIZES = {name: Exact("counts") for name in ("expert_offsets", "problem_sizes1", "problem_sizes2")}
ASCENDING = Exact("the reference lists pairs in ascending order, and -1 where nothing is defined")
SORTED = {"sorted_token_ids": ASCENDING, "expert_ids": ASCENDING, "num_tokens_post_pad": Exact("a count")}
PERMUTED = {"input_permutation": ASCENDING, "output_permutation": ASCENDING, "blockscale_offsets": Exact("counts")}
FAMILIES = tuple(
    Family(f"moe_{name}", "moe", {**TWIN, **twin}, PLAN, inputs, oracle, policies, kernels, tuple(relations))
    for name, twin, inputs, oracle, policies, kernels, *relations in (
        ("align_block_size", {"block_size": 4}, make_inputs, align_oracle, SORTED, (ALIGN, ALIGN_SMALL), blocks_agree),
        ("prepare_input", SIZES_TWIN, make_inputs, sizes_oracle, {**SIZES, **PERMUTED}, (PREPARE,), permutations_agree),
        ("w4a8_problem_sizes", SIZES_TWIN, inputs_with_both_ids, sizes_oracle, SIZES, (W4A8_SIZES,)),
    )
)
