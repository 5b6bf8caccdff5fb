"""Gated delta nets over all tokens of sequences.

Kernels compute 64 tokens at once (Yang, Kautz and Hatamizadeh, section 3.3). In a chunk that begins with the state S,
with cumulative logarithms c of the decays, and D_ts = exp(c_t - c_s),

    T_ts = beta_t D_ts (k_t . k_s) for s < t,    A = (1 + T)^-1,
    u = A (beta V) - A (beta exp(c) K) S^T,
    output_t = scale (exp(c_t) S q_t + sum over s <= t of D_ts (q_t . k_s) u_s),
    S' = exp(c_last) S + sum over s of exp(c_last - c_s) u_s k_s^T.

Both kernels round every operand of a product to bf16: T, A, beta V, beta exp(c) K, their products with A, S, u, the
scores, and decayed keys or queries (SGLang 0.5.23: fla/chunk*.py and wy_fast.py). FlashInfer 0.7.2 (delta_rule_sm90.py)
adds 1e-10 to each decay before it takes the logarithm, and keeps T and A in fp16, which has absolute errors of 2^-25
below 2^-14. It takes decays, not their logarithms, and computes these by lg2.approx (alpha.py): PTX allows an absolute
error of 2^-22 between 1/2 and 2, and a relative one of 2^-22 elsewhere. This error is a function of the decay, so
those of all tokens can have one sign, and a state that decays for n tokens is up to n 2^-22 ln 2 off, as a whole. Six
more roundings sum the 64 logarithms of a chunk. With a beta of 0, 127 tokens were 5e-6 off on an H200; 2e-5 is allowed.

Neither takes a sequence without tokens (findings/kernels.json): SGLang's takes the tokens after it for those of another
one, and FlashInfer's leaves its state unwritten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.gdn import (
    BETAS,
    DECAYS,
    SCALES,
    SCALES_OF_A_CPU,
    SMALLEST,
    STEP,
    SWAPPED,
    Gates,
    dense,
    gate_inputs,
    gates_of,
    per_value_head,
    scale_of,
    step,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr, sizes
from flashinfer_trace.harness.plans import Drawn, RowPlans
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Expected, rounding_error, unit_roundoff

U, BF16 = unit_roundoff(torch.float32), unit_roundoff(torch.bfloat16)
#: Tokens that kernels compute at once.
CHUNK = 64
#: ``equal``: all keys of a head are nearly the same, so each token corrects what the one before wrote.
KEYS = ("apart", "equal")
#: FlashInfer's addition to a decay, and the absolute error of small numbers in fp16.
ADDED, HALF = 1e-10, 2.0**-25
#: Error of lg2.approx: absolute within [1/2, 2], relative elsewhere. Then the roundings of the sum of a chunk.
LG2, ADDITIONS = 2.0**-22, 6
#: Of queries and keys: their squares add up to less than 2, so no factor `1 - beta k k^T` makes errors larger.
NORM = 0.8


@dataclass(frozen=True)
class PrefillOptions:
    """Choices that plans can draw for a kernel: sequences without tokens, decays of any speed, and states that are not
    0."""

    empty: bool = True
    fast: bool = True
    states: bool = True


#: Slices of what projections give. The kernels of gated delta nets make them dense, or take dense ones.
ROWS = ("q", "k", "v", "a", "b")
#: The inputs that kernels of chunks accept.
SOME_TOKENS = PrefillOptions(empty=False)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    const, tokens, sequences = definition.const_axes, sum(plan["seq_lens"]), len(plan["seq_lens"])
    size, heads = const["head_size"], const["num_v_heads"]
    scale = NORM * size**-0.5
    q = draws.normal([tokens, const["num_q_heads"], size], torch.bfloat16, scale)
    k = draws.normal([tokens, const["num_k_heads"], size], scale=scale * (0.1 if plan["keys"] == "equal" else 1.0))
    one = draws.normal([1, const["num_k_heads"], size], scale=scale)
    k = k + one if plan["keys"] == "equal" else k
    inputs: dict[str, Any] = {
        "q": q,
        "k": k.to(torch.bfloat16),
        "v": draws.normal([tokens, heads, size], torch.bfloat16),
        "state": draws.normal([sequences, heads, size, size], scale=0.0 if plan["state"] == "zero" else 1.0),
        "cu_seqlens": indptr(plan["seq_lens"], draws.device).long(),
        "scale": scale_of(definition, plan),
    }
    inputs |= gate_inputs(definition, plan, [tokens], draws)
    return {name: inputs[name] for name in definition.inputs}


def lengths(request: PlanRequest) -> st.SearchStrategy[list[int]]:
    least, most = request.limits.get("num_seqs", (0, 8))
    length = sizes(int(not request.options_of(PrefillOptions).empty), 600 if request.large else 80)
    return st.lists(length, min_size=least, max_size=min(most, 5)).filter(lambda found: sum(found) >= least)


def usual_lengths(definition: Definition, axes: Mapping[str, int]) -> list[int]:
    count = axes.get("num_seqs", axes.get("len_cu_seqlens", 3) - 1)
    tokens = axes.get("total_seq_len", 35 * count)
    return [tokens // count + (index < tokens % count) for index in range(count)]


@dataclass(frozen=True)
class Sequence:
    """One sequence in float64, with errors: of a recurrence in float32, variances of chunks, in units of bf16 and of
    `HALF` [2, ...], what `ADDED` to each decay moves, and what errors of all logarithms in one direction do."""

    outputs: list[torch.Tensor]
    output_errors: list[torch.Tensor]
    output_variances: list[torch.Tensor]
    outputs_added: list[torch.Tensor]
    outputs_of_logs: list[torch.Tensor]
    state: torch.Tensor
    state_error: torch.Tensor
    state_variance: torch.Tensor
    state_added: torch.Tensor
    state_of_logs: torch.Tensor


def one(x: Gates, token: int) -> Gates:
    return Gates(*(part[token : token + 1] for part in (x.log_decay, x.log_error, x.beta, x.beta_error)))


def sequence(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Gates, scale: float
) -> Sequence:
    """Token by token. An error of the state passes through ``decay (1 - beta k k^T)``. Apart
    from the decay, this does not increase its norm over the key's features. So one number per value feature tracks it.

    Args:
        state: [heads, d_v, d_k].
        q, k: [tokens, heads, d_k], v: [tokens, heads, d_v].
    """
    outputs: list[torch.Tensor] = []
    errors: list[torch.Tensor] = []
    variances: list[torch.Tensor] = []
    of_added: list[torch.Tensor] = []
    of_logs: list[torch.Tensor] = []
    state_error = torch.zeros_like(state)
    carried = added_to = off = torch.zeros_like(state[..., 0])
    variance, spread = state.new_zeros(2, *state.shape), state.new_zeros(2, *state.shape[:-1])
    for first in range(0, len(q), CHUNK):
        begin, changes = state, []
        for token in range(first, min(first + CHUNK, len(q))):
            logs = gates.log_decay[token]
            slowest = (logs if logs.ndim == 1 else logs.amax(-1)).unsqueeze(-1)
            decay, of_log = slowest.exp(), LG2 * slowest.abs().clamp_min(math.log(2)) + ADDITIONS * U * slowest.abs()
            row = slice(token, token + 1)
            done = step(state.unsqueeze(0), q[row], k[row], v[row], one(gates, token), scale, 0.0)
            length = state.norm(dim=-1)
            added_to = (decay + ADDED) * added_to + ADDED * length
            off = decay * (off + of_log * length)
            state, before = done.state[0], decay * carried
            state_error = before.unsqueeze(-1) + done.state_error[0]
            carried = before + done.state_error[0].norm(dim=-1)
            changes.append(done.change[0])
            outputs.append(done.output[0])
            reads = abs(scale) * q[token].norm(dim=-1, keepdim=True)
            errors.append(done.output_error[0] + reads * before)
            of_added.append(reads * added_to)
            of_logs.append(reads * off)
        here = slice(first, first + len(changes))
        found, added, remains = of_chunk(
            begin, spread, q[here], k[here], v[here], torch.stack(changes), gates, here, scale
        )
        variances.extend(found)
        variance, spread = added + remains.unsqueeze(-1), added.sum(-1) + remains
    moved = added_to.unsqueeze(-1).expand_as(state)
    # The error of a row lies along it at worst: times the row it adds up to the product of both norms.
    along = state.abs() * (off / state.norm(dim=-1).clamp_min(SMALLEST)).unsqueeze(-1)
    return Sequence(outputs, errors, variances, of_added, of_logs, state, state_error, variance, moved, along)


def of_chunk(
    state: torch.Tensor,
    carried: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    changes: torch.Tensor,
    gates: Gates,
    here: slice,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The variances of a chunk's outputs [tokens, 2, heads, d_v], of its addition to the state, and of the remainder
    there of `carried` [2, heads, d_v]: first where each operand of a product has an independent relative error of 1,
    then where each element of T and A has an absolute one of 1."""
    q, k, v, u = (x.transpose(0, 1) for x in (q, k, v, changes))  # heads first
    logs, beta = gates.log_decay[here], gates.beta[here].T.unsqueeze(-1)
    c = (logs if logs.ndim == 3 else logs.unsqueeze(-1)).cumsum(0).transpose(0, 1)  # [heads, tokens, d_k or 1]
    lower = torch.ones(c.shape[1], c.shape[1], dtype=torch.float64, device=c.device).tril()
    products, of_products = weighted(k, k, c, lower.tril(-1))
    products, of_products = beta * products, beta.square() * of_products
    one = torch.eye(len(lower), dtype=torch.float64, device=c.device)
    inverse = torch.linalg.inv(one + products)
    from_state = c.exp()
    keys, values = beta * from_state * k, beta * v
    square, inverse2, states2 = u.square(), inverse.square(), state.square().mT
    # A and beta V; A and beta exp(c) K, which meet the state; T, in the inverse.
    sources = 2 * values.square() + (keys @ state.mT).square() + keys.square() @ states2 + of_products @ square
    # A's products, rounded; the state, rounded; the change, rounded.
    of_change = inverse2 @ sources + (inverse @ values).square() + 2 * (inverse @ keys).square() @ states2 + square
    absolute = inverse2 @ (lower.tril(-1) @ square) + lower @ ((one + products) @ u).square()
    both, nothing = torch.stack((of_change, absolute)), torch.zeros_like(square)
    scores, of_scores = weighted(q, k, c, lower)
    queries2 = (from_state * q).square()
    own = torch.stack((2 * queries2 @ states2 + of_scores @ square, nothing))
    output = own + queries2.sum(-1, keepdim=True) * carried.unsqueeze(-2) + scores.square() @ both
    to_last = (c[:, -1:] - c).exp() * k
    last = (both + torch.stack((square, nothing))).mT @ to_last.square()
    remains = c[:, -1].amax(-1, keepdim=True).exp().square() * carried
    return scale**2 * output.permute(2, 0, 1, 3), last, remains


def weighted(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, where: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The products of rows t of a and s of b [heads, tokens, d_k], decayed from s to t, and their variance: of one
    rounding of each, and where each feature decays by itself, which takes place in the operands, of those too."""
    decays = (c.unsqueeze(2) - c.unsqueeze(1)).clamp_max(0).exp()
    if c.shape[-1] == 1:
        found = decays[..., 0] * (a @ b.mT) * where
        return found, found.square()
    terms = a.unsqueeze(2) * b.unsqueeze(1) * decays
    found = terms.sum(-1) * where
    return found, found.square() + 2 * terms.square().sum(-1) * where


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    heads, size = (definition.const_axes[axis] for axis in ("num_v_heads", "head_size"))
    q, k = (per_value_head(inputs[name], heads) for name in "qk")
    v, gates, offsets = inputs["v"].double(), gates_of(inputs), inputs["cu_seqlens"].tolist()
    found = []
    for state, first, end in zip(inputs["state"].double(), offsets[:-1], offsets[1:], strict=True):
        here = Gates(*(x[first:end] for x in (gates.log_decay, gates.log_error, gates.beta, gates.beta_error)))
        found.append(sequence(state, q[first:end], k[first:end], v[first:end], here, inputs["scale"] or size**-0.5))
    none, states = v.new_zeros(0, heads, size), v.new_zeros(0, heads, size, size)

    def tokens(of: str) -> torch.Tensor:
        return torch.stack([row for each in found for row in getattr(each, of)]) if len(v) else none

    def last(of: str) -> torch.Tensor:
        return torch.stack([getattr(each, of) for each in found]) if found else states

    def parts(
        error: torch.Tensor, variance: torch.Tensor, added: torch.Tensor, logs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        relative, absolute = variance.unbind(1) if variance.ndim > error.ndim else (error, error)
        # Twice the added number: chunks also round it.
        floor = CONFIDENCE * HALF * absolute.sqrt() + 2 * added
        return {"error": error, "variance": relative, "floor": floor, "logs": logs}

    output = parts(*map(tokens, ("output_errors", "output_variances", "outputs_added", "outputs_of_logs")))
    state_parts = parts(*map(last, ("state_error", "state_variance", "state_added", "state_of_logs")))
    return {"output": Expected(tokens("outputs"), output), "new_state": Expected(last("state"), state_parts)}


def rounded(expected: Expected) -> torch.Tensor:
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8)


def of_chunks(expected: Expected) -> torch.Tensor:
    return CONFIDENCE * BF16 * expected.parts["variance"].sqrt() + 8 * expected.parts["error"]


def with_floor(expected: Expected) -> torch.Tensor:
    """The same, and what FlashInfer adds to decays, and loses in fp16."""
    return of_chunks(expected) + expected.parts["floor"]


def gain(expected: Expected) -> float:
    """The sum of these independent roundings along the output, over its square; and that of the float32 sums, whose
    roundings are not independent."""
    size = float(expected.value.square().sum())
    if not size:
        return 0.0
    along = (expected.parts["variance"].sqrt() * expected.value.abs()).sum(-1)
    return CONFIDENCE * BF16 * float(along.norm()) / size + 64 * U


def gain_with_floor(expected: Expected) -> float:
    """The same, and errors of the logarithms of decays, which move a whole state."""
    size, moved = float(expected.value.square().sum()), expected.parts["floor"] + expected.parts["logs"]
    return gain(expected) + float((moved * expected.value.abs()).sum()) / size if size else 0.0


RECURRENCE = f"each step in {STEP}; errors of states pass on by no more than the decay"
CHUNKS = (
    "products of chunks of 64 tokens, each operand rounded to bf16: 8 * 2^-8 times the root of the sum of squares of "
    "what these roundings change, through the inverse of the chunk; and 8 times what a float32 recurrence rounds, for "
    "the sums of 64 logarithms of decays"
)


def run_sglang(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

    log_decay, beta = gates_for(inputs)
    sequences = len(inputs["state"])
    output, *_ = chunk_gated_delta_rule(
        q=inputs["q"].unsqueeze(0),
        k=inputs["k"].unsqueeze(0),
        v=inputs["v"].unsqueeze(0),
        g=log_decay.unsqueeze(0),
        beta=beta.unsqueeze(0),
        scale=inputs["scale"],
        initial_state=inputs["state"],
        initial_state_indices=torch.arange(sequences, dtype=torch.int32, device=beta.device),
        cu_seqlens=inputs["cu_seqlens"],
        use_qk_l2norm_in_kernel=False,
    )
    return {"output": output[0], "new_state": inputs["state"]}


def gates_for(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that callers compute: the logarithm of the decay, and beta, in float32."""
    x = inputs["a"].float() + inputs["dt_bias"]
    return -inputs["A_log"].exp() * torch.nn.functional.softplus(x), torch.sigmoid(inputs["b"].float())


def run_flashinfer(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    inputs = dense(inputs)
    log_decay, beta = gates_for(inputs)
    named = {name: inputs[name] for name in ("q", "k", "v", "cu_seqlens", "scale")}
    output, state = chunk_gated_delta_rule(
        **named,
        g=log_decay.exp(),
        beta=beta,
        initial_state=inputs["state"],
        output_final_state=True,
        output=outputs["output"],
        output_state=outputs["new_state"],
        use_cp=False,
    )
    return {"output": output, "new_state": state}


def corners(request: PlanRequest) -> list[Plan]:
    options = request.options_of(PrefillOptions)
    empty, fast = [0] * options.empty, {"decay": "forget"} if options.fast else {}
    return [
        {"seq_lens": [1]},
        {"seq_lens": [CHUNK + 1], "decay": "keep"},
        {"seq_lens": [3, *empty, CHUNK + 3], "keys": "equal", "beta": "mixed"},
        {"seq_lens": [CHUNK + 1, CHUNK + 1], **fast},
        {"seq_lens": [CHUNK], "decay": "keep", "beta": "one", "keys": "equal"},
        {"seq_lens": [*empty, 4, 5], "beta": "zero"},
        {"seq_lens": [2, 7], "state": "zero"},
    ]


#: Both kernels launch a grid over tokens.
LAUNCHABLE = {"total_seq_len": (1, 1 << 20), "num_seqs": (1, 1 << 10)}
RECURRENT = {
    "output": ErrorBound(
        lambda expected: rounded(expected) + expected.parts["error"], f"one bf16 rounding of {RECURRENCE}"
    ),
    "new_state": ErrorBound(lambda expected: expected.parts["error"], RECURRENCE),
}
BY_CHUNKS = {
    "output": ErrorBound(
        lambda expected: rounded(expected) + of_chunks(expected), f"one bf16 rounding of {CHUNKS}", gain
    ),
    "new_state": ErrorBound(of_chunks, CHUNKS, gain),
}
IN_HALF = (
    f"{CHUNKS}; 1e-10 is added to each decay, which moves a state by 1e-10 of the one before; elements of T and of its "
    "inverse are 2^-25 off in fp16, in quadrature; lg2.approx of each decay moves the gain by up to 2^-22 ln 2 a token"
)
WITH_FLOOR = {
    "output": ErrorBound(
        lambda expected: rounded(expected) + with_floor(expected), f"one bf16 rounding of {IN_HALF}", gain_with_floor
    ),
    "new_state": ErrorBound(with_floor, IN_HALF, gain_with_floor),
}

FAMILIES = (
    Family(
        name="gdn_prefill",
        op_type="gdn",
        twin={"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_size": 16},
        plan=RowPlans(
            {},
            {
                "seq_lens": Drawn(lengths, usual_lengths),
                "decay": DECAYS,
                "beta": BETAS,
                "keys": KEYS,
                "state": ("normal", "zero"),
                "scale": SCALES,
            },
            special=corners,
            on_cpu=SCALES_OF_A_CPU,
        ),
        make_inputs=make_inputs,
        oracle=oracle,
        compare=RECURRENT,
        kernels=(
            Kernel(
                "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule",
                run_sglang,
                limits=LAUNCHABLE,
                plan_options=SOME_TOKENS,
                in_place=("state",),
                compare=BY_CHUNKS,
            ),
            Kernel(
                "flashinfer.gdn_prefill.chunk_gated_delta_rule",
                run_flashinfer,
                limits=LAUNCHABLE,
                plan_options=SOME_TOKENS,
                compare=WITH_FLOOR,
            ),
        ),
        strided=ROWS,
        faults=(SWAPPED,),
    ),
)
