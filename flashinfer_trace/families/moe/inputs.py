"""Shared by the mixtures of experts: logits with a clear choice, hidden states, experts in fp8 blocks, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from flashinfer_trace.families.moe.kernels import REFERENCE
from flashinfer_trace.families.quantized import BLOCK, CODE_SIGMA, normal_codes, quantize_groups, varied_scales
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan
from flashinfer_trace.harness.faults import FaultyCase, with_inputs
from flashinfer_trace.harness.inputs import ROWS_SPREAD, Draws
from flashinfer_trace.harness.layouts import LAYOUT, NAN_BYTE, NAN_ROW
from flashinfer_trace.harness.plans import PlanRequest, RowPlans
from flashinfer_trace.harness.refusals import take
from flashinfer_trace.verdict.compare import Expected

#: ``spread``: tokens that are 2^-10 to 2^10 times as large, and fp8 weights with scales like those of checkpoints.
VALUES = {"normal": 1.0, "large": 300.0, "tiny": 0.01, "spread": 1.0}
#: Exponents of the factors between spread scales of fp8 weights, for each block of intermediate features (of up, undone
#: by gemm2's) and for each block of outputs: gemm1's are from 2e-8 on then, gemm2's from 1e-9 to 1e2. Neither hides
#: others: every block of intermediate features is as large in the outputs, and outputs are independent.
UP_SPREAD, OUTPUT_SPREAD = (-14, 2), (-16, 4)
#: Only in corners: beyond float16's range.
CORNER_VALUES = {"huge": 1e5}
#: ``random``; ``ties``: logits of a few values; ``local``: all choices are on this rank, if it has enough experts;
#: ``one_expert``: all tokens choose one local expert, and otherwise experts elsewhere if possible; ``elsewhere``: no
#: choice is on this rank (such a case is vacuous).
ROUTINGS = (*("random", "local", "ties", "one_expert") * 3, "elsewhere")
#: Logits of tied experts. No two pairs of their sigmoids have almost equal sums.
TIED_LOGITS = (-1.0, 0.0, 2.0)
#: Sigmoids of logits near this one are near 3e-10: of a few experts, their sum is so small that a number which is added
#: against division by zero shows in the weights, unless it is as small as the 1e-20 of some kernels.
FAINT_LOGIT = -22.0
#: And sums of sigmoids of logits near this one are below 1e-12, to which some clamp sums, and far above 1e-20.
FAINTEST_LOGIT = -31.5
#: Extra rows of logits, which replace undecidable rows.
SPARE_ROWS = 16
#: Fewer tokens than this choose local experts only; otherwise most would choose none on this rank, and prove nothing.
FEW_TOKENS = 16


def ranks_of(request: PlanRequest) -> range:
    axes = request.definition.const_axes
    return range(axes["num_experts"] // axes["num_local_experts"])


def tied_logits(shape: Sequence[int], draws: Draws) -> torch.Tensor:
    levels = torch.tensor(TIED_LOGITS, device=draws.device)
    return levels[draws.integers(shape, 0, len(TIED_LOGITS) - 1)]


def faint_logits(normal: torch.Tensor, routing: str) -> torch.Tensor:
    """From normal numbers [tokens, experts]: near `FAINT_LOGIT` or `FAINTEST_LOGIT`, the same for all experts of a
    token."""
    near = normal[:, :1] / 4 + FAINTEST_LOGIT if routing == "faintest" else normal[:, :1] + FAINT_LOGIT
    return near.expand(normal.shape).contiguous()


def clear_rows(logits: torch.Tensor, clear: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` rows; those that are not `clear` are replaced by clear ones in turn."""
    usable = clear.nonzero().flatten()
    assert len(usable), "no row of logits makes the choice of experts clear"
    rows = torch.arange(len(logits), device=logits.device)
    return logits[torch.where(clear, rows, usable[rows % len(usable)])][:count].contiguous()


def hidden_values(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    """float32 [seq_len, hidden_size]: normal values whose blocks differ in magnitude; on request, one row is zero."""
    count, hidden_size = plan["seq_len"], definition.const_axes["hidden_size"]
    blocks = (
        torch.exp2(draws.uniform([count, -(-hidden_size // BLOCK)], -0.5, 0.5))
        * {**VALUES, **CORNER_VALUES}[plan["values"]]
    )
    if plan["values"] == "spread":
        blocks *= draws.powers(count, *ROWS_SPREAD).unsqueeze(1)
    hidden = draws.normal([count, hidden_size]) * blocks.repeat_interleave(BLOCK, dim=1)[:, :hidden_size]
    if plan["zero_row"] and count:
        hidden[count // 2] = 0
    return hidden


def fp8_experts(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    hidden = hidden_values(definition, plan, draws)
    axes = definition.const_axes
    experts, hidden_size, size = axes["num_local_experts"], axes["hidden_size"], axes["intermediate_size"]
    codes, scales = quantize_groups(hidden)
    shapes = definition.input_shapes({"seq_len": len(hidden)})

    def scales_of(name: str, features: int) -> torch.Tensor:
        shape = shapes[name]
        assert shape is not None
        return varied_scales(draws, shape, 1 / (CODE_SIGMA * features**0.5))

    found = {
        "hidden_states": codes,
        "hidden_states_scale": scales.T.contiguous(),
        "gemm1_weights": normal_codes(draws, [experts, 2 * size, hidden_size]),
        "gemm1_weights_scale": scales_of("gemm1_weights_scale", hidden_size),
        "gemm2_weights": normal_codes(draws, [experts, hidden_size, size]),
        "gemm2_weights_scale": scales_of("gemm2_weights_scale", size),
    }
    if plan["values"] == "spread":
        blocks = size // BLOCK
        up = draws.powers(experts * blocks, *UP_SPREAD).view(experts, blocks)
        found["gemm1_weights_scale"][:, :blocks] *= up.unsqueeze(2)
        found["gemm2_weights_scale"] *= up.reciprocal().unsqueeze(1)
        found["gemm2_weights_scale"] *= draws.powers(hidden_size // BLOCK, *OUTPUT_SPREAD).view(-1, 1)
    return found


def spoil_unchosen(definition: Definition, plan: Plan, inputs: Inputs, chosen: Callable[[], torch.Tensor]) -> Inputs:
    """The inputs; where one token is NaN, so are the weights of local experts that no token chose, which no kernel may
    multiply by 0. `chosen` gives who chose whom, bool [seq_len, num_experts]."""
    if plan.get(LAYOUT) == NAN_ROW:
        first, count = inputs["local_expert_offset"], definition.const_axes["num_local_experts"]
        for expert in (~chosen()[:, first : first + count].any(dim=0)).nonzero().flatten().tolist():
            for name in ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale"):
                if name in inputs:
                    inputs[name][expert].view(torch.uint8).fill_(NAN_BYTE)
    return inputs


def drawn_ids(count: int, top_k: int, experts: int, choice: str, draws: Draws) -> torch.Tensor:
    """int32 [count, top_k]: different experts for each token, or -1 for those on other ranks. ``random``; ``skewed``:
    some experts more often than others; ``few``: of the last top_k + 1 experts; ``neighbors``: of 2 top_k experts in a
    row; ``elsewhere``: about half are on other ranks; ``nobody``: all are; ``one_expert``: the first choice is the same
    for all tokens, and the others are on other ranks."""
    among = min(experts, {"few": top_k + 1, "neighbors": 2 * top_k}.get(choice, experts))
    first = draws.host_integers(1, 0, experts - among)[0] if choice == "neighbors" else experts - among
    scores = draws.uniform([count, among])
    if choice == "skewed":
        scores += draws.uniform([1, among])
    shuffled = scores.argsort(dim=1)
    ids = (shuffled[:, :top_k] + first).to(torch.int32)
    if choice in ("one_expert", "nobody"):
        ids.fill_(-1)
    if choice == "one_expert":
        ids[:, 0] = experts // 2
    if choice == "elsewhere":
        ids.masked_fill_(draws.uniform([count, top_k]) < 0.5, -1)
    return ids.contiguous()


def two_experts_exchanged(inputs: Inputs, trial: FaultyCase) -> Inputs | None:
    """The weights of two local experts in each other's place: the effect of a wrong row of an expert table."""
    experts = len(inputs["gemm1_weights"])
    if experts < 2:
        return None
    first, second = trial.number(experts), trial.number(experts - 1)
    second += second >= first
    order = list(range(experts))
    order[first], order[second] = second, first
    index = torch.tensor(order, device=inputs["gemm1_weights"].device)
    return {name: take(value, 0, index) if name.startswith("gemm") else value for name, value in inputs.items()}


EXPERT_FAULTS = (with_inputs("two experts exchanged", two_experts_exchanged),)
FP8_UNSEEN = {
    "output: mantissa bit *": "Kernels round activations to e4m3, whose unit roundoff is 2^-4. The bound of an element "
    "is 8 standard deviations of that noise, summed over the intermediate features: a lower bit, or any bit of an "
    "element near 0, changes less than that."
}
#: Four ranks of eight experts, so all 8 choices may be on one rank or on the others. Large enough that a scale
#: that is one per cent off shows above the roundings of every kernel.
TWIN = {"num_experts": 32, "num_local_experts": 8, "hidden_size": 512, "intermediate_size": 384, "gemm1_out_size": 768}
FP8_TWIN = {**TWIN, "num_hidden_blocks": 4, "num_intermediate_blocks": 3, "num_gemm1_out_blocks": 6}


def experts_family(
    name: str,
    twin: Mapping[str, int],
    plan: RowPlans,
    make_inputs: Callable[[Definition, Plan, Draws], Inputs],
    oracle: Callable[[Definition, Inputs], dict[str, Expected]],
    kernels: tuple[Kernel, ...],
    unverified: str = "",
) -> Family:
    return Family(
        name=name,
        op_type="moe",
        twin=twin,
        plan=plan,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": REFERENCE},
        kernels=kernels,
        faults=EXPERT_FAULTS,
        isolated=() if "nvfp4" in name else ("hidden_states",),  # codes of nvfp4 have no NaN
        unseen={} if "bf16" in name else FP8_UNSEEN,
        unverified=unverified,
    )
