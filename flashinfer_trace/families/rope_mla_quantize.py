"""Rotary embedding of latent attention's queries and keys together with their rounding to fp8.

Codes are judged exactly, with one allowance: where the float32 roundings of a rotation and of the product with the
scale can move a value past the middle of two codes, both pass. Steps that round nothing, such as a scale that
is a power of two, add nothing to the allowance.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flashinfer_trace.families.quantization import nearest_e4m3
from flashinfer_trace.families.rope import THETAS, make_cache, make_positions, pairs_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Expected, unit_roundoff
from flashinfer_trace.verdict.intervals import Interval

U = unit_roundoff(torch.float32)
#: ``integers`` meet many ties of e4m3, ``large`` values saturate, ``tiny`` ones become subnormal.
KINDS = ("normal", "integers", "large", "tiny", "spread")
SCALES = (1.0, 0.5, 1.7, 0.03)
PARTS = ("q_rope", "k_rope", "q_nope", "k_nope")


#: The corners are exact products, whose ties must go to even codes; values that saturate; scales that differ; and
#: values beyond float16's range, with scales that bring them back into that of e4m3.
PLAN = RowPlans(
    {"num_tokens": Count(24, 512, corner=5), "max_seq_len": Count(64, 8192, least=1, usual=4096, corner=64)},
    {
        "values": KINDS,
        "cache": ("rotary", "quarter_turns", "scaled"),
        "positions": ("random", "consecutive", "same"),
        "scale_q": SCALES,
        "scale_kv": SCALES,
    },
    special=[
        {"values": "spread", "cache": "quarter_turns"},
        {"values": "large", "scale_q": 1.7, "scale_kv": 0.5},
        {"values": "tiny", "scale_q": 0.5, "scale_kv": 1.7},
        {"values": "huge", "scale_q": 2.0**-12, "scale_kv": 1.7e-4},
    ],
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, tokens = definition.const_axes, plan["num_tokens"]
    inputs: dict[str, Any] = {}
    for name in PARTS:
        shape = [tokens, axes["head_dim_kpe" if name.endswith("rope") else "head_dim_ckv"]]
        if name.startswith("q"):
            shape.insert(1, axes["num_qo_heads"])
        if plan["values"] == "spread":
            inputs[name] = (draws.normal(shape) * torch.exp2(draws.integers(shape, -12, 9).float())).to(torch.bfloat16)
        else:
            inputs[name] = draws.values(shape, torch.bfloat16, plan["values"])
    cache = {"theta": THETAS[0], "bfloat16_cache": False, **plan}
    inputs["cos_sin_cache"] = make_cache(cache, axes["head_dim_kpe"], draws)
    inputs["pos_ids"] = make_positions(plan["positions"], tokens, plan["max_seq_len"], draws)
    for name, scale in (("quant_scale_q", plan["scale_q"]), ("quant_scale_kv", plan["scale_kv"])):
        inputs[name] = float(torch.tensor(scale, dtype=torch.float32))
    return inputs


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Pairs as complex numbers times cos + i sin, then the scale, in float64: the values before their rounding to e4m3.
    Part ``error``: what float32 may be off by before that; 0 where all products and sums are exact."""
    chosen = inputs["cos_sin_cache"].double().index_select(0, inputs["pos_ids"])
    half = chosen.shape[1] // 2
    exact_turn = bool(((chosen == 0) | (chosen.abs() == 1)).all())
    found = {}
    for name in PARTS:
        scale = inputs["quant_scale_q" if name.startswith("q") else "quant_scale_kv"]
        exact_scale = math.frexp(scale)[0] == 0.5
        states = inputs[name].double()
        magnitude, exact_value = states.abs(), True
        if name.endswith("rope"):
            turn = torch.complex(chosen[:, :half], chosen[:, half:])
            turn = turn.unsqueeze(1) if name.startswith("q") else turn
            pairs = pairs_of(False, states)
            states = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn).flatten(-2)
            larger = pairs.abs().sum(-1) * torch.maximum(turn.real.abs(), turn.imag.abs())
            magnitude, exact_value = larger.repeat_interleave(2, dim=-1), exact_turn
        value = states * scale
        error = magnitude * abs(scale) * (0.0 if exact_value else (1 + U) ** 2 - 1)
        error = error + value.abs() * (0.0 if exact_scale else U)
        found[f"{name}_out"] = Expected(value, {"error": error})
    return found


def code_limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    error = expected.parts["error"]
    return nearest_e4m3(expected.value - error), nearest_e4m3(expected.value + error)


CODES = Interval(
    code_limits,
    "the nearest e4m3 code; its neighbor too where two products, their sum and the product with the scale, each "
    "rounded to float32, can pass the middle of both",
)


def run_flashinfer(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import flashinfer.rope

    flashinfer.rope.mla_rope_quantize_fp8(
        *(inputs[name] for name in PARTS),
        inputs["cos_sin_cache"],
        inputs["pos_ids"],
        is_neox=False,
        quantize_dtype=torch.float8_e4m3fn,
        quant_scale_q=inputs["quant_scale_q"],
        quant_scale_kv=inputs["quant_scale_kv"],
        **{f"{name}_out": outputs[f"{name}_out"] for name in PARTS},
    )
    return outputs


def exchanged_scales(inputs: dict[str, Any]) -> dict[str, Any] | None:
    q, kv = inputs["quant_scale_q"], inputs["quant_scale_kv"]
    return None if q == kv else {**inputs, "quant_scale_q": kv, "quant_scale_kv": q}


def position_before(inputs: dict[str, Any]) -> dict[str, Any] | None:
    rows = inputs["cos_sin_cache"].shape[0]
    return {**inputs, "pos_ids": (inputs["pos_ids"] - 1) % rows} if rows > 1 else None


FAMILIES = (
    Family(
        name="mla_rope_quantize_fp8",
        op_type="rope",
        twin={"num_qo_heads": 4, "head_dim_ckv": 32, "head_dim_kpe": 16},
        plan=PLAN,
        make_inputs=make_inputs,
        strided=PARTS,
        isolated=PARTS,
        oracle=oracle,
        compare={f"{name}_out": CODES for name in PARTS},
        kernels=(Kernel("flashinfer.rope.mla_rope_quantize_fp8", run_flashinfer, limits={"num_tokens": (1, 1 << 20)}),),
        faults=(
            with_inputs("the scales exchanged", lambda inputs, trial: exchanged_scales(inputs)),
            with_inputs("the position before", lambda inputs, trial: position_before(inputs)),
        ),
    ),
)
