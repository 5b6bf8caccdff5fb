"""Copies and sums of rows that were sorted by expert: what plans draw, oracles, bounds, kernels and records."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error
from flashinfer_trace.verdict.copies import SameBits
from flashinfer_trace.verdict.tensors import as_integers, torch_dtype

#: ``positive``: no term cancels another, so that a missing one shows.
KINDS = ("normal", "integers", "large", "tiny", "positive", "spread")
FACTORS = (2.5, 1.0, 0.75)
#: Which row each place of a copy takes: ``repeated`` takes few rows many times, ``reversed`` each once. In traffic,
#: ``routed``, each comes equally often, in any order.
MAPS = ("random", "repeated", "reversed")
FUSED_MOE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
#: With more tokens SGLang calls sgl_kernel.moe_sum_reduce.
MOST_TORCH_TOKENS = 32
TRITON_MODULE = "sglang.kernels.ops.moe.fused_moe_triton_kernels"


def drawn_rows(shape: list[int], kind: str, draws: Draws) -> torch.Tensor:
    """bfloat16 values of a kind."""
    if kind == "positive":
        return draws.normal(shape).abs_().to(torch.bfloat16)
    return draws.values(shape, torch.bfloat16, kind)


# Sums


#: More than 256 tokens, because sgl-kernel then launches another kernel. The corners have values beyond float16's
#: range, and a factor below it: float32 sums and products have the same relative errors.
SUM_PLAN = RowPlans(
    {"seq_len": Count(40, 600)},
    {"values": KINDS, "factor": FACTORS},
    special=[{"values": "huge"}, {"factor": 1e-6}],
    many_rows=300,
)


def reduce_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    shape = [plan["seq_len"], axes["top_k"], axes["hidden_size"]]
    return {"hidden_states": drawn_rows(shape, plan["values"], draws), "routed_scaling_factor": plan["factor"]}


def shuffle_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows sorted by expert, twice as many as pairs at least; with ``integers``, the factors are powers of two."""
    axes, count = definition.const_axes, plan["seq_len"]
    rows = 2 * count * axes["top_k"] + 1
    weights = draws.uniform([count, axes["top_k"]], 0.1, 1.0) * plan["factor"]
    if plan["values"] == "integers":
        weights = torch.exp2(draws.integers(weights.shape, -2, 2).float())
    return {
        "hidden_states": drawn_rows([rows, axes["hidden_size"]], plan["values"], draws),
        "permutation": draws.permutation(rows)[: count * axes["top_k"]].view(count, -1).to(torch.int32)
        if count
        else torch.zeros(0, axes["top_k"], dtype=torch.int32, device=draws.device),
        "factors": weights.to(torch.bfloat16),
    }


def weighted_sum(terms: torch.Tensor, exact: bool) -> dict[str, Expected]:
    """The sum over dimension 1 of float64 terms."""
    parts = {"magnitude": terms.abs().sum(dim=1), "length": torch.tensor(float(terms.shape[1] + 1))}
    return {"output": Expected(terms.sum(dim=1), parts, exact and terms.numel() > 0)}


def is_integer(values: torch.Tensor) -> bool:
    return bool((values == values.round()).all())


def reduce_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Each term is multiplied by the factor, before the sum. Small integers, and their sums, are exact in float32."""
    rows = inputs["hidden_states"].double()
    small = is_integer(rows) and bool((rows.abs() < 2**10).all())
    return weighted_sum(rows * float(inputs["routed_scaling_factor"]), small)


def shuffle_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Column by column of the permutation. Small integers, times powers of two, have exact sums."""
    rows, factors = inputs["hidden_states"].double(), inputs["factors"].double()
    places = inputs["permutation"].long().T
    terms = torch.stack([rows.index_select(0, place) for place in places], dim=1) * factors.unsqueeze(2)
    small = is_integer(rows) and bool((rows.abs() < 2**10).all()) and is_integer(factors * 4)
    return weighted_sum(terms, small)


def sum_bound(expected: Expected) -> torch.Tensor:
    inside = summation_error(expected.parts["magnitude"], int(expected.parts["length"]))
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


SUM = ErrorBound(
    sum_bound,
    "one bf16 rounding, u = 2^-8, of a float32 sum of k terms times a factor: 8 sqrt(k + 1) 2^-24 of the terms; exact "
    "for small integers",
)


STEPWISE = ErrorBound(
    lambda expected: sum_bound(expected) + rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8),
    f"{SUM.reason}; the sum is rounded to bf16 once more, before it is multiplied by the factor",
)


def run_sum_reduce(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    factor = float(inputs["routed_scaling_factor"])
    sgl_kernel.moe_sum_reduce(inputs["hidden_states"], outputs["output"], factor)
    return outputs


def run_triton_sum_reduce(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import moe_sum_reduce_triton

    moe_sum_reduce_triton(inputs["hidden_states"], outputs["output"], float(inputs["routed_scaling_factor"]))
    return outputs


def run_torch_sum_reduce(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """What SGLang calls for up to 32 tokens, without its decorator torch.compile."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import moe_sum_reduce_torch_compile

    with torch.compiler.set_stance("force_eager"):
        moe_sum_reduce_torch_compile(inputs["hidden_states"], outputs["output"], float(inputs["routed_scaling_factor"]))
    return outputs


def run_shuffle_mul_sum(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    permutation = inputs["permutation"].view(-1)
    sgl_kernel.apply_shuffle_mul_sum(inputs["hidden_states"], outputs["output"], permutation, inputs["factors"])
    return outputs


# Copies


#: The corners are the only row many times, one row of many, and rows of any bits.
COPY_PLAN = RowPlans(
    {
        "num_rows": Count(40, 600, least=1, corner=40),
        "num_copies": Count(60, 2000, usual=16, corner=60),
    },
    {"map": Drawn(lambda request: st.sampled_from(MAPS), "routed"), "contents": ("normal",)},
    special=[
        {"num_rows": 1, "map": "repeated"},
        {"num_copies": 1, "map": "random"},
        {"map": "random", "contents": "special"},
    ],
    many_rows=300,
)


def copy_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows of values of the planned kind."""
    rows, copies = plan["num_rows"], plan["num_copies"]
    source = draws.integers([copies], 0, rows - 1)
    if plan["map"] == "repeated":
        source = source % min(3, rows)
    elif plan["map"] == "reversed":
        source = torch.arange(copies, 0, -1, device=draws.device) % rows
    elif plan["map"] == "routed":
        source = draws.permutation(copies) % rows
    dtype = torch_dtype(definition.inputs["input"].dtype)
    values = draws.values([rows, definition.const_axes["hidden_size"]], dtype, plan["contents"], 16.0)
    return {"input": values, "dst2src_map": source.to(torch.int32)}


def copy_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    rows = inputs["input"]
    chosen = as_integers(rows).index_select(0, inputs["dst2src_map"].long())
    return {"output": Expected(chosen.view(rows.dtype))}


def run_shuffle_rows(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    rows, source = inputs["input"], inputs["dst2src_map"]
    return {"output": sgl_kernel.shuffle_rows(rows, source, (len(source), rows.shape[1]))}


def shuffle_rows(name: str) -> Family:
    """The record of shuffle_rows for one dtype."""
    return Family(
        name=name,
        op_type="moe",
        twin={"hidden_size": 16},
        plan=COPY_PLAN,
        make_inputs=copy_inputs,
        oracle=copy_oracle,
        compare={"output": SameBits()},
        kernels=(Kernel("sgl_kernel.shuffle_rows", run_shuffle_rows, limits={"num_copies": (1, 65536)}),),
    )


FAMILIES = (
    Family(
        name="moe_sum_reduce",
        op_type="moe",
        twin={"top_k": 5, "hidden_size": 24},
        plan=SUM_PLAN,
        make_inputs=reduce_inputs,
        isolated=("hidden_states",),
        oracle=reduce_oracle,
        compare={"output": SUM},
        kernels=(
            Kernel("sgl_kernel.moe_sum_reduce", run_sum_reduce, limits=LAUNCHABLE),
            Kernel(f"{TRITON_MODULE}.moe_sum_reduce_triton", run_triton_sum_reduce, limits=LAUNCHABLE),
            Kernel(
                f"{FUSED_MOE}.moe_sum_reduce_torch_compile",
                run_torch_sum_reduce,
                variant="eager",
                limits={"seq_len": (1, MOST_TORCH_TOKENS)},
                compare={"output": STEPWISE},
            ),
        ),
    ),
    Family(
        name="moe_apply_shuffle_mul_sum",
        op_type="moe",
        twin={"top_k": 5, "hidden_size": 24},
        plan=SUM_PLAN,
        make_inputs=shuffle_inputs,
        oracle=shuffle_oracle,
        compare={"output": SUM},
        kernels=(Kernel("sgl_kernel.apply_shuffle_mul_sum", run_shuffle_mul_sum, limits=LAUNCHABLE),),
    ),
    shuffle_rows("moe_shuffle_rows"),
    shuffle_rows("moe_shuffle_rows_fp8"),
    shuffle_rows("moe_shuffle_rows_fp32"),
)
