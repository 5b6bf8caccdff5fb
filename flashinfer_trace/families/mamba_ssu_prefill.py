"""Mamba2's state space model over all tokens of sequences.

The oracle computes chunks of tokens at once, as kernels do. In a chunk that begins with the state S, with cumulative
logarithms c of the decays,

    output_t = exp(c_t) S C_t + sum over s <= t of exp(c_t - c_s) dt_s (C_t . B_s) x_s + D x_t,
    S' = exp(c_last) S + sum over s of exp(c_last - c_s) dt_s x_s B_s^T.

SGLang 0.5.23 (mamba/triton_ops/ssd_*.py) makes chunks of CHUNK tokens of all sequences, and cuts them where one begins.
Without initial states, which it passes only where a sequence has one, it finds the sequences of a chunk in seq_idx.
Logarithms are added up in float32 from the start of the chunk, also over tokens of the sequences before. It rounds to
bf16 the factors of x_s, those of B_s, and the state that C_t reads. It is given no sequence without tokens, as SGLang
gives it none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.families.gdn import softplus_of
from flashinfer_trace.families.gdn_prefill import LAUNCHABLE, SOME_TOKENS, PrefillOptions, lengths, usual_lengths
from flashinfer_trace.families.mamba_ssu import SMALLEST, STEPS, VALUES, U, far_steps
from flashinfer_trace.families.short_conv import MEAN_OF_PRODUCTS
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr
from flashinfer_trace.harness.plans import Drawn, RowPlans
from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    ErrorBound,
    Expected,
    rounding_error,
    summation_error,
    unit_roundoff,
)

BF16 = unit_roundoff(torch.bfloat16)
#: Tokens that kernels compute at once: chunk_size of Nemotron-3-Nano's configuration, as recorded runs have it.
CHUNK = 128
#: Roundings on the longest way through a sum of CHUNK logarithms that a scan adds up as a tree.
DEPTH = 16


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    sizes, tokens = definition.const_axes, sum(plan["seq_lens"])
    heads, dim, states, groups = (sizes[axis] for axis in ("nheads", "head_dim", "dstate", "ngroups"))
    shape, bf16 = [len(plan["seq_lens"]), heads, dim, states], torch.bfloat16
    inputs: dict[str, Any] = {
        "x": draws.values([tokens, heads, dim], bf16, plan["values"]),
        "dt": (draws.normal([tokens, heads]) + far_steps(plan)).to(bf16),
        "A": draws.uniform([heads], -16.0, -0.02),
        "B": draws.values([tokens, groups, states], bf16, plan["values"]),
        "C": draws.normal([tokens, groups, states], bf16),
        "D": draws.normal([heads], bf16),
        "dt_bias": draws.normal([heads], bf16),
        "initial_states": draws.normal(shape, scale=0.0 if plan["state"] == "zero" else 1.0),
        "cu_seqlens": indptr(plan["seq_lens"], draws.device),
    }
    return {name: inputs[name] for name in definition.inputs}


@dataclass(frozen=True)
class State:
    """A state in float64 [heads, head_dim, dstate], and what kernels make of it: the error of a recurrence in float32,
    that of sums of logarithms, and the variance of rounded factors, in units of bf16."""

    value: torch.Tensor
    error: torch.Tensor
    of_logs: torch.Tensor
    variance: torch.Tensor


@dataclass(frozen=True)
class Tokens:
    """Tokens of one chunk and sequence in float64, heads first.

    Attributes:
        x, write, read: [heads, tokens, features]; B and C of each head.
        step, log, error: [heads, tokens]: dt, the logarithm of the decay, and the relative error of the decay and of
            what a recurrence rounds in float32.
        own: the relative error of a token's addition to the state.
        logs: that of sums of logarithms, [heads, 1].
    """

    x: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor
    step: torch.Tensor
    log: torch.Tensor
    error: torch.Tensor
    own: torch.Tensor
    logs: torch.Tensor


def scanned(before: State, tokens: Tokens) -> tuple[dict[str, torch.Tensor], State]:
    """The parts that C reads of each token [tokens, heads, head_dim] by name of a `State`, and the state after them."""
    x, write, read = tokens.x, tokens.write, tokens.read
    c, e = tokens.log.cumsum(1), tokens.error.cumsum(1)
    lower = torch.ones(c.shape[1], c.shape[1], dtype=torch.float64, device=c.device).tril()
    decay = (c.unsqueeze(2) - c.unsqueeze(1)).clamp_max(0).exp() * lower * tokens.step.unsqueeze(1)
    between = e.unsqueeze(2) - e.unsqueeze(1) + tokens.own.unsqueeze(1)
    signed, absolute = decay * (read @ write.mT), decay * (read.abs() @ write.abs().mT)
    start, since = c.exp().unsqueeze(2), e.unsqueeze(2)
    old, size = start * (read.abs() @ before.value.abs().mT), x.abs()
    total = absolute @ size + old
    found = {
        "value": signed @ x + start * (read @ before.value.mT),
        "error": (absolute * between) @ size + since * old + start * (read.abs() @ before.error.mT),
        "of_logs": tokens.logs.unsqueeze(2) * total + start * (read.abs() @ before.of_logs.mT),
        "variance": signed.square() @ x.square()
        + (start * read).square() @ (before.value.square() + before.variance).mT,
    }
    # A decay or a product below 2^-126 is flushed to 0, in each step.
    most = before.value.abs().amax((1, 2)) + (tokens.step.unsqueeze(2) * size * write.abs().amax(2, True)).sum((1, 2))
    flushed = SMALLEST * c.shape[1] * (1 + most)[:, None, None]
    found["error"] += summation_error(total, read.shape[2]) + flushed * (1 + read.abs().sum(2, True))
    last = (decay[:, -1] if c.shape[1] else tokens.step).unsqueeze(1)
    taken, taken_size = last * x.mT, last * size.mT
    end, rest = start[:, -1:], (e[:, -1:] - e + tokens.own).unsqueeze(1)
    kept = end * before.value.abs()
    after = State(
        end * before.value + taken @ write,
        end * before.error + kept * since[:, -1:] + (taken_size * rest) @ write.abs() + flushed,
        end * before.of_logs + tokens.logs.unsqueeze(2) * (kept + taken_size @ write.abs()),
        end.square() * before.variance + taken.square() @ write.square(),
    )
    return {name: part.transpose(0, 1) for name, part in found.items()}, after


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    x, heads = inputs["x"].double(), definition.const_axes["nheads"]
    group = torch.arange(heads, device=x.device) // (heads // definition.const_axes["ngroups"])
    step, step_error = softplus_of(inputs["dt"].double() + inputs["dt_bias"].double())
    rates = inputs["A"].double()
    log = rates * step
    error = rates.abs() * step_error + U * (5 * log.abs() + 8)
    own = step_error / step.clamp_min(SMALLEST) + 4 * U
    write, read = (inputs[name].double()[:, group] for name in "BC")
    skip = inputs["D"].double()[:, None] * x
    parts: list[dict[str, torch.Tensor]] = []
    states: list[State] = []
    offsets = inputs["cu_seqlens"].tolist()
    for state, first, end in zip(inputs["initial_states"].double(), offsets[:-1], offsets[1:], strict=True):
        none = torch.zeros_like(state)
        now = State(state, none, none, none)
        cuts = [first, *(cut for cut in range(0, end, CHUNK) if cut > first), end]
        for begin, stop in itertools.pairwise(cuts):
            if begin == stop:
                continue
            chunk = begin // CHUNK * CHUNK
            logs = DEPTH * U * log[chunk : chunk + CHUNK].abs().sum(0).unsqueeze(1)
            own_tokens = (each[begin:stop].transpose(0, 1) for each in (x, write, read, step, log, error, own))
            found, now = scanned(now, Tokens(*(*own_tokens, logs)))
            parts.append(found)
        states.append(now)
    empty = x[:0]
    read_parts = {
        name: torch.cat([empty, *(part[name] for part in parts)]) for name in ("value", "error", "of_logs", "variance")
    }
    value = read_parts.pop("value") + skip
    read_parts["error"] += 4 * U * (value.abs() + skip.abs()) + SMALLEST
    none = inputs["initial_states"].double()[:0]
    final = {
        name: torch.stack([getattr(state, name) for state in states]) if states else none
        for name in ("value", "error", "of_logs", "variance")
    }
    return {"output": Expected(value, read_parts), "final_states": Expected(final.pop("value"), final)}


def rounded(expected: Expected) -> torch.Tensor:
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8)


def of_chunks(expected: Expected) -> torch.Tensor:
    parts = expected.parts
    return CONFIDENCE * BF16 * parts["variance"].sqrt() + parts["of_logs"] + parts["error"]


def gain(expected: Expected) -> float:
    """The errors along the output of the rounded factors, which are independent, and of sums of logarithms, over the
    square of the output."""
    size, value = float(expected.value.square().sum()), expected.value.abs()
    if not size:
        return 0.0
    along = (expected.parts["variance"].sqrt() * value).sum(-1)
    logs = float((expected.parts["of_logs"] * value).sum())
    return (CONFIDENCE * BF16 * float(along.norm()) + logs) / size + 64 * U


def gain_of_output(expected: Expected) -> float:
    """The output is rounded itself; where D x is most of it, its mean error is that of a rounded product."""
    size = float(expected.value.square().sum())
    own = CONFIDENCE * BF16 * float(expected.value.square().norm()) / size if size else 0.0
    return gain(expected) + own + MEAN_OF_PRODUCTS


STEP = (
    "a recurrence in float32: a relative error of each step, |A| 2^-24 (6 + 3 dt + (3 |x| + 4) sigmoid(x)) + 2^-24 "
    "(5 |A| dt + 8), of what is there; a sum over d_state features; a decay or product below 2^-126 is 0"
)
CHUNKS = (
    f"products of chunks of {CHUNK} tokens whose factors of x and B, and the state that C reads, are rounded to bf16: "
    "8 * 2^-8 times the root of the sum of their squares; logarithms of decays that a float32 scan adds up, 16 * 2^-24 "
    f"of the sum of a chunk; and {STEP}"
)


def run_sglang(initial: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.mamba.triton_ops.ssd_combined import mamba_chunk_scan_combined

    offsets = inputs["cu_seqlens"]
    cuts = sorted({*offsets[:-1].tolist(), *range(0, len(inputs["x"]), CHUNK)})
    logical = torch.tensor(cuts, dtype=torch.int32, device=offsets.device)
    states = {"initial_states": inputs["initial_states"], "chunk_indices": logical // CHUNK}
    states |= {"chunk_offsets": logical % CHUNK}
    numbers = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
    after = mamba_chunk_scan_combined(
        *(inputs[name].unsqueeze(0) for name in ("x", "dt")),
        inputs["A"],
        *(inputs[name].unsqueeze(0) for name in ("B", "C")),
        chunk_size=CHUNK,
        **{name: inputs[name] for name in ("D", "dt_bias", "cu_seqlens")},
        **(states if initial else {}),
        seq_idx=numbers.repeat_interleave(offsets.diff()).unsqueeze(0),
        dt_softplus=True,
        out=outputs["output"].unsqueeze(0),
        return_varlen_states=True,
        state_dtype=torch.float32,
    )
    return {"output": outputs["output"], "final_states": after}


def corners(request: PlanRequest) -> list[Plan]:
    empty = [0] * request.options_of(PrefillOptions).empty
    return [
        {"seq_lens": [1]},
        {"seq_lens": [3, *empty, 2 * CHUNK + 2]},
        {"seq_lens": [CHUNK, 1], "state": "zero"},
        {"seq_lens": [CHUNK - 1, 1, 2], "steps": "short"},
        {"seq_lens": [*empty, 4, 5], "steps": "long", "values": "large"},
        {"seq_lens": [9, 70], "steps": "long", "values": "integers"},
        {"seq_lens": [40], "steps": "short", "values": "tiny"},
    ]


SCAN = "sglang.kernels.ops.mamba.triton_ops.ssd_combined.mamba_chunk_scan_combined"
LAUNCHED: Mapping[str, Any] = {
    "limits": LAUNCHABLE,
    "compare": {
        "output": ErrorBound(
            lambda expected: rounded(expected) + of_chunks(expected),
            f"one bf16 rounding, u = 2^-8, of {CHUNKS}",
            gain_of_output,
        ),
        "final_states": ErrorBound(of_chunks, CHUNKS, gain),
    },
}

FAMILIES = (
    Family(
        name="mamba_ssd_prefill",
        op_type="mamba_ssu",
        twin={"nheads": 4, "head_dim": 8, "dstate": 16, "ngroups": 2},
        plan=RowPlans(
            {},
            {
                "seq_lens": Drawn(lengths, usual_lengths),
                "values": VALUES,
                "steps": STEPS,
                "state": lambda request: ("normal", "zero")[not request.options_of(PrefillOptions).states :],
            },
            special=corners,
        ),
        make_inputs=make_inputs,
        oracle=oracle,
        compare={
            "output": ErrorBound(
                lambda expected: rounded(expected) + expected.parts["error"], f"one bf16 rounding, u = 2^-8, of {STEP}"
            ),
            "final_states": ErrorBound(lambda expected: expected.parts["error"], STEP),
        },
        kernels=(
            Kernel(SCAN, functools.partial(run_sglang, True), plan_options=SOME_TOKENS, **LAUNCHED),
            Kernel(
                SCAN,
                functools.partial(run_sglang, False),
                variant="no initial states",
                plan_options=PrefillOptions(empty=False, states=False),
                **LAUNCHED,
            ),
        ),
        strided=("x", "dt", "B", "C"),
    ),
)
