"""Rotary position embedding of query and key, and writes of the rotated keys and of the values to a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashinfer_trace.families import kv_cache, rope
from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Axis, Definition
from flashinfer_trace.harness.family import Family, Inputs, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.faults import Fault, FaultyCase
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected
from flashinfer_trace.verdict.copies import PartlyCopied, partly_copied
from flashinfer_trace.verdict.wrong_outputs import same_values


def whole_heads(definition: Definition) -> Definition:
    """The same with the axis rotary_dim that records of `rope` read: all features of a head are rotated."""
    rotated = Axis("rotary_dim", definition.const_axes["head_size"])
    return dataclasses.replace(definition, axes={**definition.axes, "rotary_dim": rotated})


def corners(request: PlanRequest) -> list[Plan]:
    """Those of the rotation, with free slots, and those of the slots, with usual states."""
    rotated = [{"spare": 24, **plan} for plan in rope.PLAN.corners(request)]
    return [*rotated, *kv_cache.PLAN.corners(request)]


TOKENS = dataclasses.replace(rope.PLAN.counts["num_tokens"], usual=kv_cache.PLAN.counts["num_tokens"].usual)
PLAN = RowPlans(
    {**rope.PLAN.counts, "num_tokens": TOKENS},
    {**rope.PLAN.choices, **kv_cache.PLAN.choices},
    special=corners,
    fit=rope.in_groups,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    tokens, width = plan["num_tokens"], definition.const_axes["row_dim"]
    slots = tokens if plan["slots"] == "all" else tokens + plan["spare"]
    rows = {"v": tokens, "k_cache": slots, "v_cache": slots}
    inputs: dict[str, Any] = {
        **rope.make_inputs(whole_heads(definition), plan, draws),
        **{name: draws.values([count, width], torch.bfloat16, plan["contents"]) for name, count in rows.items()},
        "out_loc": kv_cache.slots_of(plan, draws),
    }
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    rotated = rope.oracle(True, whole_heads(definition), inputs)
    keys, slots, cache = rotated["k_out"], inputs["out_loc"], inputs["k_cache"]
    none, rows = torch.zeros_like(cache, dtype=torch.float64), keys.value.flatten(1)
    magnitude = kv_cache.written(none, slots, keys.parts["magnitude"].flatten(1)).value
    copied = torch.ones_like(cache, dtype=torch.bool).index_fill(0, slots, False)
    stored = partly_copied(
        kv_cache.written(none, slots, rows).value, {"magnitude": magnitude}, copied, cache, keys.exact
    )
    return {**rotated, "k_cache_out": stored, "v_cache_out": kv_cache.written(inputs["v_cache"], slots, inputs["v"])}


def stored_keys(definition: Definition, inputs: Inputs, outputs: Outputs) -> list[str]:
    """The cache holds the keys that are returned, bit for bit."""
    found = outputs["k_cache_out"][inputs["out_loc"]]
    same = torch.equal(found.view(torch.int16), outputs["k_out"].flatten(1).view(torch.int16))
    return [] if same else ["k_cache_out has other keys at out_loc than k_out"]


def stored_too_early(trial: FaultyCase) -> Outputs | None:
    """The outputs of a kernel that stores the keys before it rotates them."""
    right = trial.outputs["k_cache_out"]
    wrong = right.index_copy(0, trial.inputs["out_loc"], trial.inputs["k"].flatten(1))
    return None if same_values(wrong, right) else {**trial.outputs, "k_cache_out": wrong}


IN_PLACE = ("q", "k", "k_cache", "v_cache")
#: Whole heads are rotated: no feature is a copy.
TURNED = ErrorBound(rope.ROTATED.bound, rope.ROTATION)

FAMILIES = (
    Family(
        name="rope_with_cos_sin_cache_neox_style_store",
        op_type="rope",
        twin={"num_qo_heads": 4, "num_kv_heads": 2, "head_size": 8, "row_dim": 16},
        plan=PLAN,
        make_inputs=make_inputs,
        strided=("q", "k", "v", "k_cache", "v_cache"),
        oracle=oracle,
        compare={
            "q_out": TURNED,
            "k_out": TURNED,
            "k_cache_out": PartlyCopied(
                rope.ROTATED.bound, "rows that are written: the bound of k_out; all others stay, bit for bit"
            ),
            "v_cache_out": kv_cache.COPIES,
        },
        relations=(stored_keys,),
        kernels=(
            # With a cache, as SGLang's models call it: whole heads are rotated, and neither positions nor slots are
            # checked.
            calling(
                f"{rope.JIT}.apply_rope_inplace_with_kvcache",
                "q k v k_cache v_cache cos_sin_cache positions out_loc is_neox=True",
                limits=rope.LAUNCHABLE,
                in_place=IN_PLACE,
            ),
        ),
        faults=(
            kv_cache.slot_before("out_loc", "k_cache"),
            Fault("keys stored before their rotation", stored_too_early),
        ),
    ),
)
