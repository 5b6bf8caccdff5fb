"""Short causal convolutions of linear attention and state space models, with silu, over a pool of the last tokens.

The kernels work as follows, from the source of SGLang 0.5.23:

- The CUDA kernels (mamba/causal_conv1d.cuh) compute in float32, with fast math on Hopper. They write over the input, so
  padding keeps its row.
- The Triton kernels (causal_conv1d_triton.py) multiply bfloat16 by bfloat16, which rounds each product, and add up in
  float32. They write nothing for padding, so they are given none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr, sizes
from flashinfer_trace.harness.plans import FLAG, SPREAD, Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    ErrorBound,
    Expected,
    rounding_error,
    summation_error,
    unit_roundoff,
)
from flashinfer_trace.verdict.copies import SameBits

U, BF16 = unit_roundoff(torch.float32), unit_roundoff(torch.bfloat16)
SMALLEST = torch.finfo(torch.float32).smallest_normal
#: Elements; ``large`` ones saturate the sigmoid, and exp of them overflows.
VALUES = ("normal", "integers", "large", "tiny", SPREAD)
COPIES = SameBits("copies, bit for bit; states that no sequence names stay")


@dataclass(frozen=True)
class PaddingOptions:
    """Choices that plans can draw for a kernel: sequences whose slot is -1."""

    padding: bool = True


def update_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Distinct slots in any order; every third may be padding."""
    const, rows = definition.const_axes, plan["batch_size"]
    indices = draws.permutation(max(rows, plan["num_states"]))[:rows].to(torch.int32)
    if plan["padding"]:
        indices[1::3] = -1
    return {
        "x": draws.values([rows, const["conv_dim"]], torch.bfloat16, plan["values"]),
        "conv_state": states(definition, plan, rows, draws),
        "weight": draws.normal([const["conv_dim"], const["width"]], torch.bfloat16, 0.5),
        "conv_state_indices": indices,
    }


def states(definition: Definition, plan: Plan, rows: int, draws: Draws) -> torch.Tensor:
    const = definition.const_axes
    shape = [max(rows, plan["num_states"]), const["conv_dim"], const["state_len"]]
    return draws.values(shape, torch.bfloat16, plan["values"])


def fwd_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Distinct slots in any order; each sequence has an initial state or has none, as planned, or by chance."""
    const, rows = definition.const_axes, len(plan["seq_lens"])
    chosen = {"all": torch.ones, "none": torch.zeros}.get(plan["initial"])
    drawn = draws.integers([rows], 0, 1) if chosen is None else chosen(rows, device=draws.device)
    return {
        "x": draws.values([sum(plan["seq_lens"]), const["conv_dim"]], torch.bfloat16, plan["values"]),
        "weight": draws.normal([const["conv_dim"], const["width"]], torch.bfloat16, 0.5),
        "conv_states": states(definition, plan, rows, draws),
        "query_start_loc": indptr(plan["seq_lens"], draws.device),
        "cache_indices": draws.permutation(max(rows, plan["num_states"]))[:rows].to(torch.int32),
        "has_initial_state": drawn.bool(),
    }


def filtered(tokens: torch.Tensor, weight: torch.Tensor) -> Expected:
    """silu of the products of float64 tokens [..., dim, width] with filters [dim, width]. Parts: ``sum``, that of the
    products; ``magnitude``, that of their absolute values; ``root``, of that of their squares; ``slope`` of silu, at
    most 1.1."""
    terms = tokens * weight.double()
    found = terms.sum(-1)
    tail = found.clamp_max(0).exp()
    sigmoid = torch.where(found < -1, tail / (1 + tail), (1 + torch.tanh(found / 2)) / 2)
    slope = (sigmoid * (1 + found * (1 - sigmoid))).abs()
    parts = {
        "sum": found,
        "magnitude": terms.abs().sum(-1),
        "root": terms.norm(dim=-1),
        "slope": slope,
        "sigmoid": sigmoid,
    }
    return Expected(found * sigmoid, {**parts, "slope": slope, "sigmoid": sigmoid})


def update_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    x, weight, after = inputs["x"], inputs["weight"], inputs["conv_state"].clone()
    tokens = torch.zeros(*x.shape, weight.shape[1], dtype=torch.float64, device=x.device)
    padding = torch.zeros_like(x, dtype=torch.bool)
    for row, slot in enumerate(inputs["conv_state_indices"].tolist()):
        if slot < 0:
            padding[row] = True
            continue
        window = torch.cat((inputs["conv_state"][slot], x[row].unsqueeze(1)), dim=1)
        tokens[row], after[slot] = window.double(), window[:, 1:]
    found = filtered(tokens, weight)
    value = torch.where(padding, x.double(), found.value)
    return {"output": Expected(value, {**found.parts, "padding": padding}), "conv_state_out": Expected(after)}


def fwd_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    x, weight, after = inputs["x"], inputs["weight"], inputs["conv_states"].clone()
    tokens = torch.zeros(*x.shape, weight.shape[1], dtype=torch.float64, device=x.device)
    offsets = inputs["query_start_loc"].tolist()
    for sequence, slot in enumerate(inputs["cache_indices"].tolist()):
        window = inputs["conv_states"][slot].clone()
        if not inputs["has_initial_state"][sequence]:
            window.zero_()
        for token in range(offsets[sequence], offsets[sequence + 1]):
            whole = torch.cat((window, x[token].unsqueeze(1)), dim=1)
            tokens[token], window = whole.double(), whole[:, 1:]
        after[slot] = window
    found = filtered(tokens, weight)
    parts = {**found.parts, "padding": torch.zeros_like(x, dtype=torch.bool)}
    return {"output": Expected(found.value, parts), "conv_states_out": Expected(after)}


#: The products of two significands of 8 bits are only 2^14; rounded to 8 bits, they are off by 4.7e-5 of themselves on
#: average if each is as frequent as the others, and by 3.9e-5 if the logarithms are. The rest is independent.
MEAN_OF_PRODUCTS = 2.0**-14


def bound(exponential: float, product: float, expected: Expected) -> torch.Tensor:
    """One bf16 rounding of silu of a sum in float32.

    Args:
        exponential: how many ulp of |y| its exp is off, in addition to 4.
        product: relative error of each product.
    """
    parts = expected.parts
    y, sigmoid = parts["sum"], parts["sigmoid"]
    error = summation_error(parts["magnitude"], 5) + parts["magnitude"] * product
    relative = U * ((4 + exponential * y.abs()) * (1 - sigmoid) + 6)
    # Fast division is 0 where exp(-y) exceeds 2^126. A second-order term of silu, whose curvature is at most 0.5.
    inside = parts["slope"] * error + error.square() / 4 + expected.value.abs() * relative + SMALLEST * (1 + y.abs())
    found = rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside
    return torch.where(parts["padding"], 0.0, found)


def gain(expected: Expected) -> float:
    """The sum along the output of the roundings of products and outputs to bf16: see `MEAN_OF_PRODUCTS`."""
    along = (expected.parts["slope"] * expected.parts["root"] + expected.value.abs()) * expected.value.abs()
    size = float(expected.value.square().sum())
    return CONFIDENCE * BF16 * float(along.norm()) / size + MEAN_OF_PRODUCTS + 64 * U if size else 0.0


SILU = "silu of a sum of 4 products in float32, the exponential within 2 + 1.2 |y| ulp, fast division"
REFERENCE = ErrorBound(
    lambda expected: bound(0.0, 0.0, expected), "one bf16 rounding, u = 2^-8, of silu of a sum of 4 products in float32"
)
FAST = ErrorBound(lambda expected: bound(2.4, 0.0, expected), f"one bf16 rounding, u = 2^-8, of {SILU}")
ROUNDED = ErrorBound(
    lambda expected: bound(2.4, BF16, expected),
    f"one bf16 rounding, u = 2^-8, of {SILU}; each product rounded to bf16",
    gain,
)


def run_update(module: str) -> Callable[[Definition, Inputs, Outputs], Outputs]:
    """An adapter of ``causal_conv1d_update`` of a module, which writes into the state."""

    def run(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
        import importlib

        update = importlib.import_module(module).causal_conv1d_update
        named = {name: inputs[name] for name in ("conv_state", "weight", "conv_state_indices")}
        output = update(inputs["x"], activation="silu", **named)
        return {"output": output, "conv_state_out": inputs["conv_state"]}

    return run


def run_cuda_fwd(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_fn

    names = ("weight", "conv_states", "query_start_loc", "cache_indices", "has_initial_state")
    output = causal_conv1d_fn(inputs["x"].T.contiguous(), **{name: inputs[name] for name in names}, activation="silu")
    return {"output": output.T, "conv_states_out": inputs["conv_states"]}


def run_triton_fwd(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

    names = ("weight", "conv_states", "query_start_loc", "cache_indices", "has_initial_state")
    output = causal_conv1d_fn(
        inputs["x"].T,
        bias=None,
        **{name: inputs[name] for name in names},
        seq_lens_cpu=inputs["query_start_loc"].diff().tolist(),
        activation="silu",
    )
    return {"output": output.T, "conv_states_out": inputs["conv_states"]}


def padding_choices(request: PlanRequest) -> tuple[bool, ...]:
    return FLAG if request.options_of(PaddingOptions).padding else (False,)


def update_corners(request: PlanRequest) -> list[Plan]:
    padded = [{"padding": True, "batch_size": 5}] if request.options_of(PaddingOptions).padding else []
    return [{"batch_size": 1}, {"values": "large"}, {"values": "huge"}, *padded, {"batch_size": 2, "num_states": 2}]


def seq_lens(request: PlanRequest) -> st.SearchStrategy[list[int]]:
    return st.lists(sizes(1, 600 if request.large else 40), min_size=1 if request.limits else 0, max_size=5)


def usual_lengths(definition: Definition, axes: Mapping[str, int]) -> list[int]:
    count = axes.get("num_seqs", axes.get("len_query_start_loc", 3) - 1)
    tokens = axes.get("num_tokens", 12 * count)
    return [tokens // count + (index < tokens % count) for index in range(count)]


def usual_states(definition: Definition, axes: Mapping[str, int]) -> int:
    return max(8, axes.get("batch_size", 8))


#: Slots on a GPU, and sequences.
MOST = 256
POOL = Count(8, MOST, least=1, corner=7, usual=usual_states)
CUDA = "sglang.srt.layers.attention.mamba.causal_conv1d"
TRITON = "sglang.kernels.ops.mamba.causal_conv1d_triton"
TWIN = {"conv_dim": 24, "width": 4, "state_len": 3}

FAMILIES = (
    Family(
        name="causal_conv1d_update",
        op_type="short_conv",
        twin=TWIN,
        plan=RowPlans(
            {"batch_size": Count(6, MOST), "num_states": POOL},
            {"values": VALUES, "padding": padding_choices},
            special=update_corners,
            fit=lambda request, plan: {**plan, "num_states": max(plan["num_states"], plan["batch_size"])},
            many_rows=300,
        ),
        make_inputs=update_inputs,
        oracle=update_oracle,
        compare={"output": REFERENCE, "conv_state_out": COPIES},
        kernels=(
            Kernel(
                f"{CUDA}.causal_conv1d_update",
                run_update(CUDA),
                limits={"batch_size": (1, 1 << 16)},
                in_place=("x", "conv_state"),
                compare={"output": FAST},
            ),
            Kernel(
                f"{TRITON}.causal_conv1d_update",
                run_update(TRITON),
                limits={"batch_size": (1, 1 << 16)},
                plan_options=PaddingOptions(padding=False),
                in_place=("conv_state",),
                compare={"output": ROUNDED},
            ),
        ),
        strided=("x", "conv_state"),
    ),
    Family(
        name="causal_conv1d",
        op_type="short_conv",
        twin=TWIN,
        plan=RowPlans(
            {"num_states": POOL},
            {"seq_lens": Drawn(seq_lens, usual_lengths), "values": VALUES, "initial": ("drawn", "all", "none")},
            special=[
                {"seq_lens": [1, 1], "values": "huge"},
                {"seq_lens": [1, 2, 3], "initial": "all"},
                {"seq_lens": [2, 65], "initial": "none"},
                {"seq_lens": [4, 3], "values": "large"},
                {"seq_lens": [9], "values": "integers"},
            ],
            many_rows=0,
        ),
        make_inputs=fwd_inputs,
        oracle=fwd_oracle,
        compare={"output": REFERENCE, "conv_states_out": COPIES},
        kernels=(
            Kernel(
                f"{CUDA}.causal_conv1d_fn",
                run_cuda_fwd,
                limits={"num_seqs": (1, 1 << 16)},
                in_place=("conv_states", "x"),  # a single token is as the kernel wants it: it writes over it
                compare={"output": FAST},
            ),
            Kernel(
                f"{TRITON}.causal_conv1d_fn",
                run_triton_fwd,
                limits={"num_seqs": (1, 1 << 16)},
                in_place=("conv_states",),
                compare={"output": ROUNDED},
            ),
        ),
        strided=("x", "conv_states"),
    ),
)
