"""Around the recurrence of a gated delta net: projections that are split, and queries and keys of unit length."""

from __future__ import annotations

import functools
import math

import torch

from flashinfer_trace.families import concat, rmsnorm
from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.copies import SameBits

PROJECTIONS = "sglang.kernels.ops.attention.triton_gdn_fused_proj"
L2NORM = "sglang.kernels.ops.attention.fla.l2norm"
EPS = 1e-6
TWIN = {"num_k_heads": 3, "num_v_heads": 9, "head_size": 8, "qkv_size": 120}


def indexed(source: torch.Tensor, columns: list[int], *shape: int) -> Expected:
    """The features of each token with these numbers, one after the other."""
    index = torch.tensor(columns, device=source.device)
    return Expected(source[:, index].view(len(source), *shape))


def split_qkvzba(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    axes = definition.const_axes
    heads, all_values, size = axes["num_k_heads"], axes["num_v_heads"], axes["head_size"]
    each = all_values // heads
    step, pairs = size * (2 + 2 * each), range(all_values)
    starts = {"q": 0, "k": size, "v": 2 * size, "z": (2 + each) * size}
    one = {name: [head * step + starts[name] + i for head in range(heads) for i in range(size)] for name in "qk"}
    own = {
        name: [pair // each * step + starts[name] + pair % each * size + i for pair in pairs for i in range(size)]
        for name in "vz"
    }
    gates = [[pair // each * 2 * each + offset + pair % each for pair in pairs] for offset in (0, each)]
    b, a = (indexed(inputs["mixed_ba"], gate, all_values) for gate in gates)
    qkv = one["q"] + one["k"] + own["v"]
    return {
        "mixed_qkv": indexed(inputs["mixed_qkvz"], qkv, len(qkv)),
        "z": indexed(inputs["mixed_qkvz"], own["z"], all_values, size),
        "b": b,
        "a": a,
    }


def split_qkv(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    axes, found, start = definition.const_axes, {}, 0
    for name, axis in (("q", "num_k_heads"), ("k", "num_k_heads"), ("v", "num_v_heads")):
        count = axes[axis] * axes["head_size"]
        columns = list(range(start, start + count))
        found[name] = indexed(inputs["mixed_qkv"], columns, axes[axis], axes["head_size"])
        start += count
    return found


def run_split_qkv(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.triton_gdn_fused_proj import fused_qkv_split_gdn_prefill

    heads, values, size = (definition.const_axes[axis] for axis in ("num_k_heads", "num_v_heads", "head_size"))
    found = fused_qkv_split_gdn_prefill(inputs["mixed_qkv"], heads, heads, values, size, size, size)
    return {name: each.squeeze(0) for name, each in zip(outputs, found, strict=True)}


def norm_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    x = draws.values([plan["num_rows"], definition.const_axes["head_size"]], torch.bfloat16, plan["values"])
    if plan["zero_row"]:
        x[plan["num_rows"] // 2 :][:1] = 0
    return {"x": x}


def norm_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """An RMSNorm whose mean is multiplied by the number of features again."""
    size = definition.const_axes["head_size"]
    weight = torch.full([size], 1 / math.sqrt(size), dtype=torch.float64, device=inputs["x"].device)
    return {"y": rmsnorm.normalize(inputs["x"].double(), weight, EPS / size)}


copies = functools.partial(Family, op_type="gdn", plan=concat.PLAN, make_inputs=concat.make_inputs)

FAMILIES = (
    copies(
        name="fused_qkvzba_split_reshape_cat",
        twin={**TWIN, "qkvz_size": 192, "ba_size": 18},
        oracle=split_qkvzba,
        compare=dict.fromkeys(("mixed_qkv", "z", "b", "a"), SameBits()),
        kernels=(
            calling(
                f"{PROJECTIONS}.fused_qkvzba_split_reshape_cat",
                "mixed_qkvz mixed_ba num_k_heads num_v_heads head_size head_size",
                limits=concat.LAUNCHABLE,
            ),
        ),
    ),
    copies(
        name="fused_qkv_split_gdn_prefill",
        twin=TWIN,
        oracle=split_qkv,
        compare=dict.fromkeys("qkv", SameBits()),
        strided=("mixed_qkv",),
        kernels=(Kernel(f"{PROJECTIONS}.fused_qkv_split_gdn_prefill", run_split_qkv, limits=concat.LAUNCHABLE),),
    ),
    Family(
        name="l2norm",
        op_type="gdn",
        twin={"head_size": 64},
        plan=RowPlans({"num_rows": Count(40, 4096)}, rmsnorm.PLAN.choices, rmsnorm.PLAN.special),
        make_inputs=norm_inputs,
        oracle=norm_oracle,
        compare={"y": rmsnorm.NORMALIZED},
        isolated=("x",),
        kernels=(calling(f"{L2NORM}.l2norm_fwd", "x 1e-06", limits={"num_rows": (1, 1 << 20)}),),
    ),
)
