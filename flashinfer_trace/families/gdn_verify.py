"""Gated delta nets over a few draft tokens of each sequence, with the state after each: what verification needs.

Both kernels do one token after the other in float32 (see `gdn`): FlashInfer 0.7.2 in gdn_decode_mtp.py, SGLang 0.5.23
in its decode of separate tensors. Neither changes the pool of states, which the harness checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.families.gdn import (
    BETAS,
    DECAYS,
    SCALES,
    SCALES_OF_A_CPU,
    SWAPPED,
    UPDATE,
    Gates,
    dense,
    gate_inputs,
    gates_of,
    most_rows,
    per_value_head,
    scale_of,
    step,
)
from flashinfer_trace.families.gdn_prefill import KEYS, NORM, RECURRENCE, ROWS, rounded
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected

#: The most draft tokens of a sequence.
TOKENS = 8
CORNERS = (
    {"batch_size": 1},
    {"seq_len": TOKENS, "decay": "keep", "beta": "one", "keys": "equal"},
    {"decay": "forget", "beta": "mixed"},
    {"batch_size": 5, "pool_size": 2, "keys": "equal"},
    {"beta": "zero"},
)


@dataclass(frozen=True)
class ScaleOptions:
    """Choices that plans can draw for a kernel: another scale than the usual one."""

    scales: tuple[float | None, ...] = SCALES


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Queries and keys with a norm below 1.4, a pool of states of the values' size, and slots in any order, which
    sequences may share."""
    const, rows, tokens = definition.const_axes, plan["batch_size"], plan["seq_len"]
    size, heads = const["head_size"], const["num_v_heads"]
    scale, equal = NORM * size**-0.5, plan["keys"] == "equal"
    k = draws.normal([rows, tokens, const["num_k_heads"], size], scale=scale * (0.1 if equal else 1.0))
    one = draws.normal([1, 1, const["num_k_heads"], size], scale=scale)
    inputs: dict[str, Any] = {
        "q": draws.normal([rows, tokens, const["num_q_heads"], size], torch.bfloat16, scale),
        "k": (k + one if equal else k).to(torch.bfloat16),
        "v": draws.normal([rows, tokens, heads, size], torch.bfloat16),
        "initial_state": draws.normal([plan["pool_size"], heads, size, size]),
        "initial_state_indices": draws.integers([rows], 0, plan["pool_size"] - 1).to(torch.int32),
        "scale": scale_of(definition, plan),
    }
    inputs |= gate_inputs(definition, plan, [rows, tokens], draws)
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    heads, size = (definition.const_axes[axis] for axis in ("num_v_heads", "head_size"))
    gates, scale = gates_of(inputs), inputs["scale"] or size**-0.5
    state = inputs["initial_state"].double()[inputs["initial_state_indices"].long()]
    carried = torch.zeros_like(state[..., 0])
    found = []
    for token in range(inputs["v"].shape[1]):
        here = Gates(*(x[:, token] for x in (gates.log_decay, gates.log_error, gates.beta, gates.beta_error)))
        q, k = (per_value_head(inputs[name][:, token], heads) for name in "qk")
        done = step(state, q, k, inputs["v"][:, token].double(), here, scale, 0.0)
        before = here.log_decay.exp().unsqueeze(-1) * carried
        read = done.output_error + abs(scale) * q.norm(dim=-1, keepdim=True) * before
        found.append((done.output, read, done.state, before.unsqueeze(-1) + done.state_error))
        state, carried = done.state, before + done.state_error.norm(dim=-1)
    output, output_error, states, states_error = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
    return {
        "output": Expected(output, {"error": output_error}),
        "intermediate_states": Expected(states, {"error": states_error}),
    }


def run_flashinfer(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.gdn_decode import gated_delta_rule_mtp

    output, _ = gated_delta_rule_mtp(
        **dense(inputs),
        output=outputs["output"],
        intermediate_states_buffer=outputs["intermediate_states"],
        disable_state_update=True,
        use_qk_l2norm=False,
    )
    return {"output": output, "intermediate_states": outputs["intermediate_states"]}


def run_update(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's, as its backend of gated delta nets verifies drafts without a tree: all tokens in one row."""
    from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )

    rows, tokens = inputs["v"].shape[:2]
    packed = {name: inputs[name].reshape(1, rows * tokens, *inputs[name].shape[2:]) for name in ("q", "k", "v", "b")}
    ends = torch.arange(rows + 1, dtype=torch.int32, device=inputs["v"].device)
    output = fused_sigmoid_gating_delta_rule_update(
        **packed,
        A_log=inputs["A_log"],
        a=inputs["a"].reshape(rows * tokens, -1),
        dt_bias=inputs["dt_bias"],
        softplus_beta=1.0,
        softplus_threshold=20.0,
        initial_state_source=inputs["initial_state"],
        initial_state_indices=inputs["initial_state_indices"],
        scale=inputs["scale"],
        cu_seqlens=ends * tokens,
        disable_state_update=True,
        intermediate_states_buffer=outputs["intermediate_states"],
        intermediate_state_indices=ends[:-1],
        cache_steps=tokens,
    )
    return {"output": output.view(outputs["output"].shape), "intermediate_states": outputs["intermediate_states"]}


LAUNCHABLE = {"batch_size": (1, 1 << 12), "seq_len": (2, TOKENS), "pool_size": (1, 1 << 12)}
#: FlashInfer compiles its kernel for each count of tokens and each scale, which takes seconds: these are usual ones.
COMPILED = {**LAUNCHABLE, "seq_len": (3, 4)}

FAMILIES = (
    Family(
        name="gdn_verify",
        op_type="gdn",
        twin={"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_size": 16},
        plan=RowPlans(
            {
                "batch_size": Count(4, lambda definition: max(4, most_rows(definition) // TOKENS)),
                "seq_len": Count(5, TOKENS, least=1, usual=4),
                "pool_size": Count(6, most_rows, least=1),
            },
            {
                "decay": DECAYS,
                "beta": BETAS,
                "keys": KEYS,
                "scale": lambda request: request.options_of(ScaleOptions).scales,
            },
            special=CORNERS,
            on_cpu=SCALES_OF_A_CPU,
            many_rows=100,
        ),
        make_inputs=make_inputs,
        oracle=oracle,
        compare={
            "output": ErrorBound(
                lambda expected: rounded(expected) + expected.parts["error"], f"one bf16 rounding of {RECURRENCE}"
            ),
            "intermediate_states": ErrorBound(lambda expected: expected.parts["error"], RECURRENCE),
        },
        kernels=(
            Kernel(
                "flashinfer.gdn_decode.gated_delta_rule_mtp",
                run_flashinfer,
                limits=COMPILED,
                plan_options=ScaleOptions((None,)),
            ),
            Kernel(UPDATE, run_update, limits=LAUNCHABLE),
        ),
        strided=ROWS,
        isolated=ROWS,
        faults=(SWAPPED,),
    ),
)
