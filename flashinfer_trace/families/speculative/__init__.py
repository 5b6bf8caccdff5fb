"""Speculative decoding: the most probable tokens, which a draft model grows its tree from."""

from __future__ import annotations

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Exact, Expected
from flashinfer_trace.verdict.unordered import TopK

#: ``ties``: many probabilities are equal; ``last``: the most probable token is the last one; ``equal``: all are equal.
#: Only corners have ``close`` ones, which differ by 1e-5 of themselves, and ``faint`` ones, all but the first 1e-35.
KINDS = ("random", "peaked", "ties", "last", "equal")

#: The corners have the largest value in the last place, and rows of equal values; on a CPU, also close values and faint
#: ones.
PLAN = RowPlans(
    {"num_rows": Count(40, 128)},
    {"values": KINDS},
    special=[{"values": values} for values in ("last", "equal")],
    on_cpu=[{"values": values} for values in ("close", "faint")],
    many_rows=300,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    shape = [plan["num_rows"], definition.const_axes["vocab_size"]]
    logits = draws.normal(shape, scale=6.0 if plan["values"] == "peaked" else 1.0)
    if plan["values"] == "ties":
        logits = draws.integers(shape, 0, 2).float()
    elif plan["values"] == "last":
        logits[:, -1] = 8.0
    elif plan["values"] == "equal":
        logits = torch.zeros_like(logits)
    elif plan["values"] == "close":
        logits *= 1e-5
    elif plan["values"] == "faint":
        logits[:, 1:] -= 80.0
    return {"values": torch.softmax(logits, dim=1)}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    values, top_k = inputs["values"].double(), definition.const_axes["top_k"]
    ordered = values.sort(dim=1, descending=True, stable=True)
    return {
        "topk_values": Expected(ordered.values[:, :top_k]),
        "topk_indices": Expected(ordered.indices[:, :top_k], {"scores": values}),
    }


def places_agree(definition: Definition, inputs: Inputs, outputs: Outputs) -> list[str]:
    found = inputs["values"].gather(1, outputs["topk_indices"])
    wrong = found != outputs["topk_values"]
    return [f"{int(wrong.sum())} indices are not those of the values beside them"] if wrong.any() else []


FAMILIES = (
    Family(
        name="fast_topk",
        op_type="speculative",
        twin={"vocab_size": 48},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={
            "topk_values": Exact("copies, in descending order"),
            "topk_indices": TopK("equal values may come in any order; nothing is computed", ordered=True),
        },
        kernels=(calling("sgl_kernel.fast_topk", "values top_k dim=-1"),),
        relations=(places_agree,),
    ),
)
