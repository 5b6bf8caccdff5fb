"""Gated delta nets: gates, and the recurrence one token at a time.

The kernels work as follows, from the sources of SGLang 0.5.23 and FlashInfer 0.7.2:

- All of them compute in float32, with ex2.approx, and softplus as log(1 + exp(x)): where exp(x) is below 2^-24 nothing
  remains of it, an absolute error of the logarithm.
- SGLang's gating and its packed decode round beta to the dtype of b. Its decode of separate tensors does not.
- Its packed decode skips sequences whose slot is negative and gives them an output of 0, as FlashInfer's decode over a
  pool does. Its decode of separate tensors starts from a state of zeros there, so it is given no such slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, SPREAD, Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

U = unit_roundoff(torch.float32)
BF16 = unit_roundoff(torch.bfloat16)
#: Float32 results below this may be flushed to zero.
SMALLEST = torch.finfo(torch.float32).smallest_normal
#: Elements of queries, keys and values. ``tiny`` keys have a norm of the size of the root of epsilon.
VALUES = ("normal", "tiny", "large", "integers", SPREAD)
#: Decays: ``usual``, from 1e-8 to nearly 1; ``keep``: from 0.99 to 1 - 1e-7; ``forget``: below 1e-9, many 0 in float32.
#: Where a kernel takes no fast ones, ``slow``: a usual decay at a rate of at most one half.
DECAYS = ("usual", "keep", "forget")
#: Strengths of the update: ``usual``, around one half; 0 and 1 up to 1e-8, as sigmoids saturate; ``mixed``: all.
BETAS = ("usual", "zero", "one", "mixed")
#: Those that differ after a rounding to bf16.
ROUNDED_BETAS = tuple(beta for beta in BETAS if beta != "one")
CHOICES = {"values": VALUES, "decay": DECAYS, "beta": BETAS}
CORNERS = (
    {"batch_size": 1},
    {"decay": "keep", "beta": "one"},
    {"decay": "forget", "beta": "mixed"},
    {"values": "tiny"},
    {"beta": "zero"},
    {"values": "large", "decay": "keep"},
)


#: Factors of queries; None for the usual one.
SCALES = (None, 0.5)
#: Not every kernel takes a scale of 0 for the usual one, and SGLang's refuse one below.
SCALES_OF_A_CPU = ({"scale": 0.0}, {"scale": -0.5})


@dataclass(frozen=True)
class PoolOptions:
    """Choices that plans can draw for a kernel: sequences whose slot is -1."""

    padding: bool = True


def gate_inputs(definition: Definition, plan: Plan, rows: list[int], draws: Draws) -> Inputs:
    """A_log and dt_bias [num_v_heads], a and b [*rows, num_v_heads], as a model has them for the planned gates; a and
    dt_bias also for each feature of the keys, where the Definition has them so."""
    heads = definition.const_axes["num_v_heads"]
    features = [heads, *(definition.const_axes[axis] for axis in (definition.inputs["dt_bias"].shape or ())[1:])]
    least, most = {"forget": (0.0, 2.75), "slow": (-4.0, -0.7)}.get(plan["decay"], (-4.0, 2.75))
    rate = draws.uniform([heads], least, most)
    a = draws.normal([*rows, *features], scale=2.0)
    a = a + {"keep": -8.0, "forget": 30.0}.get(plan["decay"], 0.0)
    b = draws.normal([*rows, heads])
    turn = draws.integers([*rows, heads], 0, 2) if plan["beta"] == "mixed" else None
    far = {"usual": 0.0, "zero": -20.0, "one": 20.0, "mixed": 0.0}[plan["beta"]]
    b = b + far if turn is None else b + 20.0 * (turn - 1)
    found = {"A_log": rate, "a": a, "dt_bias": draws.normal(features), "b": b}
    return {name: x.to(torch.float32 if name == "A_log" else _dtype(definition, name)) for name, x in found.items()}


def _dtype(definition: Definition, name: str) -> torch.dtype:
    return torch.float32 if definition.inputs[name].dtype == "float32" else torch.bfloat16


@dataclass(frozen=True)
class Gates:
    """Gates in float64, and the errors of kernels in them.

    Attributes:
        log_decay, log_error: the logarithm of the decay, and the absolute error of it in float32; [rows, heads], or
            [rows, heads, d_k] where each feature of a key has its own.
        beta, beta_error: the strength of the update, and its relative error.
    """

    log_decay: torch.Tensor
    log_error: torch.Tensor
    beta: torch.Tensor
    beta_error: torch.Tensor


def softplus_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """max(x, 0) + log(1 + exp(-|x|)) in float64, and the absolute error of log(1 + exp(x)) in float32: the sum x is
    rounded, exp(x) has 2 |x| + 4 roundings, 1 + exp(x) and the logarithm an absolute one each."""
    softplus = x.clamp_min(0) + torch.log1p((-x.abs()).exp())
    return softplus, U * (torch.sigmoid(x) * (3 * x.abs() + 4) + 6 + 3 * softplus)


def gates_of(inputs: Inputs) -> Gates:
    """See `softplus_of`; the sigmoid through tanh or exp, where that would cancel."""
    a_log, a, bias, b = (inputs[name].double() for name in ("A_log", "a", "dt_bias", "b"))
    a_log = a_log.unsqueeze(-1) if a.ndim > b.ndim else a_log
    (softplus, of_softplus), rate = softplus_of(a + bias), a_log.exp()
    log_error = rate * (of_softplus + U * softplus * (2 * a_log.abs() + 5))
    tail = b.clamp_max(0).exp()
    beta = torch.where(b < -1, tail / (1 + tail), (1 + torch.tanh(b / 2)) / 2)
    return Gates(-rate * softplus, log_error, beta, U * ((1 - beta) * (2 * b.abs() + 4) + 4))


def gating_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    gates = gates_of(inputs)
    return {
        "g": Expected(gates.log_decay, {"error": gates.log_error}),
        "beta": Expected(gates.beta, {"error": gates.beta * gates.beta_error}),
    }


@dataclass(frozen=True)
class Step:
    """One token of the recurrence in float64: the change beta (v - S k), both results with the errors of float32,
    and the effects of a relative error of beta on them."""

    change: torch.Tensor
    output: torch.Tensor
    output_error: torch.Tensor
    output_of_beta: torch.Tensor
    state: torch.Tensor
    state_error: torch.Tensor
    state_of_beta: torch.Tensor


def step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Gates, scale: float, norm: float
) -> Step:
    """``decay S (I - beta k k^T) + beta v k^T`` term by term, and the effect of each float32 rounding on it.

    Args:
        state: [rows, heads, d_v, d_k].
        q, k: [rows, heads, d_k], v: [rows, heads, d_v], all float64.
        norm: relative error of q and k, where a kernel normalizes them.
    """
    size = k.shape[-1]
    beta = gates.beta.unsqueeze(-1)
    logs, errors = (x.unsqueeze(-2) if x.ndim == 3 else x[..., None, None] for x in (gates.log_decay, gates.log_error))
    decay, of_decay = logs.exp(), errors + U * (2 * logs.abs() + 5)
    kept = state * decay
    # A decay below 2^-126 is flushed to 0, and takes the state along; so may each result be.
    kept_error = kept.abs() * of_decay + (state.abs() + 1) * SMALLEST
    found, terms = (kept @ k.unsqueeze(-1))[..., 0], (kept.abs() @ k.abs().unsqueeze(-1))[..., 0]
    found_error = summation_error(terms, size) + (kept_error @ k.abs().unsqueeze(-1))[..., 0] + terms * (norm + U)
    change = beta * (v - found)
    of_beta = change.abs().unsqueeze(-1) * k.abs().unsqueeze(-2)
    change_error = beta * (found_error + U * (v.abs() + found.abs())) + change.abs() * 2 * U + SMALLEST
    change_error = change_error + change.abs() * gates.beta_error.unsqueeze(-1)
    new = kept - (beta * found).unsqueeze(-1) * k.unsqueeze(-2) + (beta * v).unsqueeze(-1) * k.unsqueeze(-2)
    new_error = kept_error + change_error.unsqueeze(-1) * k.abs().unsqueeze(-2) + of_beta * (norm + U)
    new_error = new_error + 2 * U * (new.abs() + of_beta) + SMALLEST
    read, terms = scale * (new @ q.unsqueeze(-1))[..., 0], abs(scale) * (new.abs() @ q.abs().unsqueeze(-1))[..., 0]
    read_error = abs(scale) * (new_error @ q.abs().unsqueeze(-1))[..., 0] + summation_error(terms, size)
    read_error = read_error + terms * (norm + 3 * U) + SMALLEST
    reads_change = abs(scale) * change.abs() * (k * q).sum(-1, keepdim=True).abs()
    return Step(change, read, read_error, reads_change, new, new_error, of_beta)


def per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.double()[:, torch.arange(heads, device=x.device) // (heads // x.shape[1])]


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def norm_error(size: int) -> float:
    """The relative error of a normalized feature: half of that of the sum of squares, a root, a quotient."""
    return float(summation_error(torch.ones(()), size)) / 2 + 5 * U


def decode_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Queries and keys whose norm is about 1, as callers pass them, and a state of the values' size."""
    size, rows = definition.const_axes["head_size"], plan["batch_size"]
    inputs: dict[str, Any] = {}
    for name, kind, scale in (("q", "normal", size**-0.5), ("k", plan["values"], size**-0.5), ("v", plan["values"], 1)):
        heads = definition.const_axes[f"num_{name}_heads"]
        inputs[name] = draws.values([rows, 1, heads, size], torch.bfloat16, kind, scale)
    inputs["state"] = draws.normal([rows, definition.const_axes["num_v_heads"], size, size])
    inputs |= gate_inputs(definition, plan, [rows, 1], draws)
    inputs["scale"] = scale_of(definition, plan)
    return {name: inputs[name] for name in definition.inputs}


def scale_of(definition: Definition, plan: Plan) -> float:
    scale: float | None = plan["scale"]
    return 1.0 / math.sqrt(definition.const_axes["head_size"]) if scale is None else scale


def decode_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    heads, size = (definition.const_axes[axis] for axis in ("num_v_heads", "head_size"))
    q, k = (per_value_head(inputs[name][:, 0], heads) for name in "qk")
    gates = gates_of({**inputs, "a": inputs["a"][:, 0], "b": inputs["b"][:, 0]})
    done = step(inputs["state"].double(), q, k, inputs["v"][:, 0].double(), gates, inputs["scale"] or size**-0.5, 0.0)
    parts = {"error": done.output_error.unsqueeze(1), "beta": done.output_of_beta.unsqueeze(1)}
    return {
        "output": Expected(done.output.unsqueeze(1), parts),
        "new_state": Expected(done.state, {"error": done.state_error, "beta": done.state_of_beta}),
    }


def pool_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows of the planned kind, distinct slots in any order, and more slots than sequences; every third may be -1."""
    sizes = definition.const_axes
    rows, spare = plan["batch_size"], plan["pool_size"]
    dtype = torch.float32 if definition.inputs["state"].dtype == "float32" else torch.bfloat16
    inputs: dict[str, Any] = {"mixed_qkv": draws.values([rows, sizes["qkv_size"]], torch.bfloat16, plan["values"])}
    shape = [max(rows, spare), sizes["num_v_heads"], sizes["head_size"], sizes["head_size"]]
    inputs["state"] = draws.normal(shape, dtype, 0.001 if plan["values"] == "tiny" else 1.0)
    slots = draws.permutation(shape[0])[:rows].to(torch.int32)
    if plan["padding"]:
        slots[1::3] = -1
    inputs |= {"state_indices": slots, "scale": scale_of(definition, plan)}
    inputs |= gate_inputs(definition, plan, [rows], draws)
    return {name: inputs[name] for name in definition.inputs}


def pool_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Sequences with a slot take a step; everything else is 0 in the output and stays in the state, exactly."""
    sizes = definition.const_axes
    heads, keys, size = sizes["num_v_heads"], sizes["num_k_heads"], sizes["head_size"]
    here = [row for row, slot in enumerate(inputs["state_indices"].tolist()) if slot >= 0]
    slots = inputs["state_indices"][here].long()
    rows = inputs["mixed_qkv"][here].double().view(len(here), 2 * keys + heads, size)
    q, k = (per_value_head(unit(x), heads) for x in (rows[:, :keys], rows[:, keys : 2 * keys]))
    gates = gates_of({**inputs, "a": inputs["a"][here], "b": inputs["b"][here]})
    before = inputs["state"].double()
    done = step(before[slots], q, k, rows[:, 2 * keys :], gates, inputs["scale"], norm_error(size))
    output = torch.zeros(len(inputs["a"]), heads, size, dtype=torch.float64, device=before.device)
    nothing, same = torch.zeros_like(output), torch.zeros_like(before)
    read = [
        into.index_copy(0, torch.tensor(here, dtype=torch.int64, device=before.device), part)
        for into, part in ((output, done.output), (nothing, done.output_error), (nothing, done.output_of_beta))
    ]
    kept = [
        into.index_copy(0, slots, part)
        for into, part in ((before, done.state), (same, done.state_error), (same, done.state_of_beta))
    ]
    return {
        "output": Expected(read[0], {"error": read[1], "beta": read[2]}),
        "state_out": Expected(kept[0], {"error": kept[1], "beta": kept[2]}),
    }


def output_bound(of_beta: float, expected: Expected) -> torch.Tensor:
    """One bf16 rounding of float32; an output of padding is 0 exactly."""
    error = expected.parts["error"] + of_beta * expected.parts["beta"]
    rounding = rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8)
    return torch.where(error > 0, rounding + error, 0.0)


def state_bound(of_beta: float, expected: Expected) -> torch.Tensor:
    return expected.parts["error"] + of_beta * expected.parts["beta"]


STEP = (
    "float32: a decay whose logarithm is rounded, |S| (|g| 2^-23 + ...), or that is flushed to 0, |S| 2^-126; sums "
    "over d_k features; beta |v - S k| |k|, each factor rounded a few times"
)
OUTPUT = ErrorBound(functools.partial(output_bound, 0.0), f"one bf16 rounding, u = 2^-8, of a step in {STEP}")
STATE = ErrorBound(functools.partial(state_bound, 0.0), STEP)
ROUNDED_BETA = "; beta rounded to bf16, 2^-8 of the update beta (v - S k) k^T"
COARSE_OUTPUT = ErrorBound(functools.partial(output_bound, BF16), OUTPUT.reason + ROUNDED_BETA)
COARSE_STATE = ErrorBound(functools.partial(state_bound, BF16), STATE.reason + ROUNDED_BETA)


def logarithm_bound(expected: Expected) -> torch.Tensor:
    return expected.parts["error"] + 2 * U * expected.value.abs() + SMALLEST


LOGARITHM = ErrorBound(
    logarithm_bound,
    "float32: exp(A_log) times an error of softplus, 2^-24 (6 + 3 softplus + (3 |x| + 4) sigmoid(x)) for a rounded x, "
    "1 + exp and a logarithm, and of two products",
)
BETA = ErrorBound(
    lambda expected: expected.parts["error"] + 2 * U * expected.value + SMALLEST,
    "float32: 2^-24 ((2 |b| + 4) (1 - beta) + 6) beta for exp, a sum and a quotient",
)
BF16_BETA = ErrorBound(
    lambda expected: expected.parts["error"] + rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + SMALLEST,
    "one bf16 rounding, u = 2^-8, of float32: the kernel rounds to the dtype of b before it stores float32",
)


def run_gating(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.linear.fused_gdn_gating import fused_gdn_gating

    g, beta = fused_gdn_gating(inputs["A_log"], inputs["a"], inputs["b"], inputs["dt_bias"])
    return {"g": g[0], "beta": beta[0]}


def dense(inputs: Inputs) -> Inputs:
    """For kernels that take no strides, or whose callers make tensors dense."""
    return {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def run_flashinfer_decode(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    inputs = dense(inputs)
    named = {name: inputs[name] for name in ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "scale")}
    output, state = gated_delta_rule_decode_pretranspose(**named, output=outputs["output"], use_qk_l2norm=False)
    return {"output": output, "new_state": state}


def update(
    inputs: Inputs, qkv: tuple[torch.Tensor, ...], *, norm: bool, slots: torch.Tensor, kda: bool = False
) -> torch.Tensor:
    """SGLang's decode of separate tensors, one token a sequence: each of them [1, rows, heads, d]."""
    from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )

    q, k, v = qkv
    rows, heads = q.shape[1], v.shape[2]
    found: torch.Tensor = fused_sigmoid_gating_delta_rule_update(
        A_log=inputs["A_log"],
        a=inputs["a"].view(rows, -1),
        dt_bias=inputs["dt_bias"],
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=q,
        k=k,
        v=v,
        b=inputs["b"].view(rows, heads),
        initial_state_source=inputs["state"],
        initial_state_indices=slots,
        scale=inputs["scale"],
        use_qk_l2norm_in_kernel=norm,
        is_kda=kda,
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=q.device),
    )
    return found


def run_update(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")
    slots = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
    output = update(inputs, (q, k, v), norm=False, slots=slots)
    return {"output": output.transpose(0, 1), "new_state": inputs["state"]}


def split_heads(definition: Definition, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """q, k and v [rows, heads, d]: views of the packed row."""
    sizes = definition.const_axes
    size, keys = sizes["head_size"], sizes["num_k_heads"]
    heads: torch.Tensor = inputs["mixed_qkv"].unflatten(1, (sizes["qkv_size"] // size, size))
    return heads[:, :keys], heads[:, keys : 2 * keys], heads[:, 2 * keys :]


def run_update_of_pool(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    q, k, v = (x.unsqueeze(0) for x in split_heads(definition, inputs))
    output = update(inputs, (q, k, v), norm=True, slots=inputs["state_indices"])
    return {"output": output[0], "state_out": inputs["state"]}


def run_packed(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode

    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=inputs["mixed_qkv"],
        a=inputs["a"],
        b=inputs["b"],
        A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"],
        scale=inputs["scale"],
        initial_state=inputs["state"],
        out=outputs["output"].unsqueeze(1),
        ssm_state_indices=inputs["state_indices"],
        use_qk_l2norm_in_kernel=True,
    )
    return {"output": outputs["output"], "state_out": inputs["state"]}


def run_flashinfer_pool(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    inputs = dense(inputs)
    q, k, v = (x.unsqueeze(1).contiguous() for x in split_heads(definition, inputs))
    output, state = gated_delta_rule_decode_pretranspose(
        q=q,
        k=k,
        v=v,
        state=None,
        A_log=inputs["A_log"],
        a=inputs["a"].unsqueeze(1),
        dt_bias=inputs["dt_bias"],
        b=inputs["b"].unsqueeze(1),
        scale=inputs["scale"],
        output=outputs["output"].unsqueeze(1),
        use_qk_l2norm=True,
        initial_state=inputs["state"],
        initial_state_indices=inputs["state_indices"],
    )
    return {"output": output[:, 0], "state_out": state}


def pool_corners(request: PlanRequest) -> list[Plan]:
    padded = [{"padding": True, "batch_size": 5}] if request.options_of(PoolOptions).padding else []
    return [*CORNERS, *padded, {"batch_size": 2, "pool_size": 2}]


def padding_choices(request: PlanRequest) -> tuple[bool, ...]:
    return FLAG if request.options_of(PoolOptions).padding else (False,)


def most_rows(definition: Definition) -> int:
    sizes = definition.const_axes
    return max(8, 2**28 // (sizes["num_v_heads"] * sizes["head_size"] ** 2 * 4))


def usual_slots(definition: Definition, axes: Mapping[str, int]) -> int:
    return max(8, axes.get("batch_size", 8))


def swapped_heads(inputs: dict[str, Any], trial: Any) -> dict[str, Any] | None:
    inputs["A_log"] = torch.cat((inputs["A_log"][:2].flip(0), inputs["A_log"][2:]))
    return inputs


ROWS = Count(6, most_rows)
LAUNCHABLE: Mapping[str, tuple[int, int]] = {"batch_size": (1, 1 << 16)}
POOL_PLAN = RowPlans(
    {"batch_size": ROWS, "pool_size": Count(8, most_rows, least=1, corner=7, usual=usual_slots)},
    {**CHOICES, "scale": SCALES, "padding": padding_choices},
    special=pool_corners,
    fit=lambda request, plan: {**plan, "pool_size": max(plan["pool_size"], plan["batch_size"])},
    many_rows=300,
)
#: Slices of what projections give, and slots of states that are parts of larger pages.
ROWS_OF_TOKENS = ("q", "k", "v", "a", "b", "state")
PACKED_ROWS = ("mixed_qkv", "a", "b", "state")
SWAPPED = with_inputs("decays of two heads exchanged", swapped_heads)
UPDATE = "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update"
PACKED = "sglang.kernels.ops.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode"
FLASHINFER = "flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose"

FAMILIES = (
    Family(
        name="fused_gdn_gating",
        op_type="gdn",
        twin={"num_v_heads": 12},
        plan=RowPlans(
            {"num_tokens": Count(40, 4096)},
            {"decay": DECAYS, "beta": ROUNDED_BETAS},
            special=[
                {"num_tokens": 1},
                *({"decay": decay} for decay in DECAYS),
                *({"beta": beta} for beta in ROUNDED_BETAS),
            ],
        ),
        make_inputs=lambda definition, plan, draws: {
            name: gate_inputs(definition, plan, [plan["num_tokens"]], draws)[name] for name in definition.inputs
        },
        oracle=gating_oracle,
        compare={"g": LOGARITHM, "beta": BETA},
        kernels=(
            Kernel(
                "sglang.kernels.ops.attention.linear.fused_gdn_gating.fused_gdn_gating",
                run_gating,
                limits={"num_tokens": (1, 1 << 20)},
                compare={"beta": BF16_BETA},
            ),
        ),
        strided=("a", "b"),
        isolated=("a", "b"),
        faults=(SWAPPED,),
    ),
    Family(
        name="gdn_decode",
        op_type="gdn",
        twin={"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_size": 16},
        plan=RowPlans(
            {"batch_size": ROWS}, {**CHOICES, "scale": SCALES}, special=CORNERS, on_cpu=SCALES_OF_A_CPU, many_rows=300
        ),
        make_inputs=decode_inputs,
        oracle=decode_oracle,
        compare={"output": OUTPUT, "new_state": STATE},
        kernels=(
            Kernel(FLASHINFER, run_flashinfer_decode, limits=LAUNCHABLE, in_place=("state",)),
            Kernel(UPDATE, run_update, limits=LAUNCHABLE, in_place=("state",)),
        ),
        strided=ROWS_OF_TOKENS,
        isolated=ROWS_OF_TOKENS,
        faults=(SWAPPED,),
    ),
    Family(
        name="gdn_packed_decode",
        op_type="gdn",
        twin={"num_k_heads": 2, "num_v_heads": 4, "head_size": 16, "qkv_size": 128},
        plan=POOL_PLAN,
        make_inputs=pool_inputs,
        oracle=pool_oracle,
        compare={"output": OUTPUT, "state_out": STATE},
        kernels=(
            Kernel(
                PACKED,
                run_packed,
                limits=LAUNCHABLE,
                in_place=("state",),
                compare={"output": COARSE_OUTPUT, "state_out": COARSE_STATE},
            ),
            Kernel(
                UPDATE,
                run_update_of_pool,
                limits=LAUNCHABLE,
                plan_options=PoolOptions(padding=False),
                in_place=("state",),
            ),
            Kernel(FLASHINFER, run_flashinfer_pool, limits=LAUNCHABLE, in_place=("state",)),
        ),
        strided=PACKED_ROWS,
        faults=(SWAPPED,),
    ),
)
