"""Manifold-constrained hyper-connections (DeepSeek-V4): residual streams mixed around a layer, and at the end.

Normalizing rows or columns does not enlarge differences of the logarithms of a matrix (Hilbert's projective metric), so
an error of the entries passes through any number of Sinkhorn steps as it is, and each step adds its own roundings.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.rmsnorm_gated import SMALLEST, sigmoid_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

U = unit_roundoff(torch.float32)
EPS, REPEAT = 1e-6, 20
#: Roundings of one division by a sum of four, twice, since the entry and the sum may lean to different sides.
ROUNDINGS_OF_STEP = 24
#: Scales of the mixes: ``sharp`` ones saturate sigmoids, and leave few entries of a matrix above epsilon.
SCALES = {"usual": 1.0, "sharp": 20.0, "faint": 0.01}
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}
PLAN = RowPlans(
    {"num_tokens": Count(24, 512)},
    {"values": VALUE_KINDS, "mixes": tuple(SCALES)},
    special=[{"num_tokens": 1}, *({"mixes": kind} for kind in SCALES), {"values": "huge"}, {"values": "minute"}],
    many_rows=300,
)


def streams_of(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    axes = definition.const_axes
    return draws.values([plan["num_tokens"], axes["hc"], axes["hidden_size"]], torch.bfloat16, plan["values"])


def post_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Mixes from 0 to 2, and matrices of any positive entries: nothing here needs their sums to be 1."""
    axes, tokens = definition.const_axes, plan["num_tokens"]
    scale = SCALES[plan["mixes"]]
    return {
        "x": draws.values([tokens, axes["hidden_size"]], torch.bfloat16, plan["values"]),
        "residual": streams_of(definition, plan, draws),
        "post_layer_mix": draws.uniform([tokens, axes["hc"]], 0, 2) * scale,
        "comb_res_mix": draws.uniform([tokens, axes["hc"], axes["hc"]], 0, 1) * scale,
    }


def mixed(weights: torch.Tensor, rows: torch.Tensor, relative: torch.Tensor) -> Expected:
    """Sums of rows [tokens, n, features] with weights [tokens, m, n] that are off by `relative`, the same shape."""
    value = torch.einsum("tmn,tnh->tmh", weights, rows)
    error = torch.einsum("tmn,tnh->tmh", weights.abs() * (relative + (rows.shape[1] + 1) * U), rows.abs())
    return Expected(value, {"error": error})


def post_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """One product of a matrix with the output of the layer and the streams below each other."""
    mix, matrix = inputs["post_layer_mix"].double(), inputs["comb_res_mix"].double()
    weights = torch.cat((mix.unsqueeze(2), matrix.mT), dim=2)
    rows = torch.cat((inputs["x"].unsqueeze(1), inputs["residual"]), dim=1).double()
    return {"output": mixed(weights, rows, torch.zeros_like(weights))}


def pre_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Projections whose size goes with that of the streams, and sums of squares that fit them."""
    tokens, mix = plan["num_tokens"], definition.const_axes["mix"]
    residual = streams_of(definition, plan, draws)
    squares = residual.double().square().sum(dim=(1, 2))
    root = (squares / residual[0].numel() if tokens else squares).sqrt().unsqueeze(1)
    return {
        "dot_mix": (draws.normal([tokens, mix]).double() * root).float(),
        "sqrsum": squares.float(),
        "residual": residual,
        "mhc_scale": (draws.uniform([definition.const_axes["num_scales"]], 0.5, 1.5)) * SCALES[plan["mixes"]],
        "mhc_base": draws.normal([mix]),
    }


def gated(v: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sigmoid of a number that is off by `off`, and its relative error."""
    sigmoid, relative = sigmoid_of(v)
    return sigmoid, relative + off * (1 - sigmoid) * (1 + off)


def balanced(logits: torch.Tensor, off: torch.Tensor) -> Expected:
    """Sinkhorn's matrix by scaling vectors: rows and columns of one matrix are divided, never its entries."""
    matrix = (logits - torch.logsumexp(logits, dim=2, keepdim=True)).exp() + EPS
    rows, columns = torch.ones_like(matrix[:, :, :1]), torch.ones_like(matrix[:, :1])
    for step in range(REPEAT):
        if step:
            rows = rows / (rows * (matrix @ columns.mT) + EPS)
        columns = columns / (columns * (rows.mT @ matrix) + EPS)
    depth = (logits.amax(dim=2, keepdim=True) - logits).amax(dim=(1, 2), keepdim=True)
    entry = off.amax(dim=(1, 2), keepdim=True) + (2.4 * depth + 16) * U
    relative = 4 * entry + 2 * REPEAT * ROUNDINGS_OF_STEP * U
    return Expected(matrix * rows * columns, {"error": matrix * rows * columns * relative})


def pre_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    axes, hc = definition.const_axes, definition.const_axes["hc"]
    root = (inputs["sqrsum"].double() / (hc * axes["hidden_size"]) + EPS).sqrt().unsqueeze(1)
    scale = torch.repeat_interleave(inputs["mhc_scale"].double(), torch.tensor([hc, hc, hc * hc], device=root.device))
    product = inputs["dot_mix"].double() / root * scale
    v = product + inputs["mhc_base"].double()
    off = 8 * U * product.abs() + U * v.abs()
    pre, of_pre = gated(v[:, :hc], off[:, :hc])
    post, of_post = gated(v[:, hc : 2 * hc], off[:, hc : 2 * hc])
    square = (len(v), hc, hc)
    found = mixed((pre + EPS).unsqueeze(1), inputs["residual"].double(), (of_pre + U).unsqueeze(1))
    return {
        "post_mix": Expected(2 * post, {"error": 2 * post * (of_post + 2 * U) + SMALLEST}),
        "comb_mix": balanced(v[:, 2 * hc :].reshape(square), off[:, 2 * hc :].reshape(square)),
        "layer_input": Expected(found.value.squeeze(1), {"error": found.parts["error"].squeeze(1)}),
    }


def head_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Weights that give normalized streams projections of the size of the scale."""
    axes = definition.const_axes
    size = axes["hc_hidden_size"]
    return {
        "x": streams_of(definition, plan, draws),
        "hc_fn": draws.normal([axes["hc"], size], scale=size**-0.5),
        "hc_scale": draws.uniform([axes["num_scales"]], 0.5, 1.5) * SCALES[plan["mixes"]],
        "hc_base": draws.normal([axes["hc"]]),
    }


def head_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The projection of the normalized streams, whose error passes through a sigmoid."""
    streams = inputs["x"].double()
    flat, weight = streams.flatten(1), inputs["hc_fn"].double()
    size = flat.shape[1]
    root = (torch.einsum("ti,ti->t", flat, flat) / size + EPS).sqrt().unsqueeze(1)
    scale = inputs["hc_scale"].double()
    product = torch.einsum("ti,mi->tm", flat / root, weight) * scale
    of_sum = summation_error((flat / root).abs() @ weight.abs().T * scale.abs(), size)
    of_root = summation_error(product.abs(), size) / 2
    v = product + inputs["hc_base"].double()
    pre, relative = gated(v, of_sum + of_root + 8 * U * product.abs() + U * v.abs())
    found = mixed((pre + EPS).unsqueeze(1), streams, (relative + U).unsqueeze(1))
    return {"output": Expected(found.value.squeeze(1), {"error": found.parts["error"].squeeze(1)})}


def rounded(expected: Expected) -> torch.Tensor:
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + expected.parts["error"] + SMALLEST


POST = ErrorBound(rounded, "one bf16 rounding, u = 2^-8, of a float32 sum of 5 products")
LAYER_INPUT = ErrorBound(
    rounded, "one bf16 rounding, u = 2^-8, of a float32 sum of 4 products with sigmoids, exp within 2 + 1.2 |x| ulp"
)
HEAD = ErrorBound(
    rounded,
    "one bf16 rounding, u = 2^-8, of a float32 sum of 4 products with sigmoids, of projections that are off by 8 "
    "sqrt(n) u |fn| |v|",
)
POST_MIX = ErrorBound(
    lambda expected: expected.parts["error"],
    "a float32 sigmoid, exp within 2 + 1.2 |x| ulp, of an argument that is off by 8 u of a product and u of a sum",
)
COMB_MIX = ErrorBound(
    lambda expected: expected.parts["error"],
    "float32, u = 2^-24: 4 times the error of an entry, whose exponent is rounded, and 24 u for each of 40 divisions",
)


def run_post(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.mhc import mhc_post

    return {"output": mhc_post(*inputs.values())}


def run_pre(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.mhc import mhc_pre_big_fuse

    size = inputs["residual"][0].numel() if len(inputs["residual"]) else 1
    post, comb, layer_input = mhc_pre_big_fuse(
        *inputs.values(),
        size,
        rms_eps=EPS,
        mhc_pre_eps=EPS,
        mhc_sinkhorn_eps=EPS,
        mhc_post_mult_value=2.0,
        sinkhorn_repeat=REPEAT,
    )
    return {"post_mix": post.squeeze(2), "comb_mix": comb, "layer_input": layer_input}


def run_head(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.layernorm.mhc_head import fused_hc_head

    return {"output": fused_hc_head(*inputs.values(), EPS, EPS)}


FAMILIES = (
    Family(
        name="mhc_post",
        op_type="mhc",
        twin={"hc": 4, "hidden_size": 32},
        plan=PLAN,
        make_inputs=post_inputs,
        oracle=post_oracle,
        compare={"output": POST},
        isolated=("x", "residual"),
        kernels=(Kernel("flashinfer.mhc.mhc_post", run_post, limits=LAUNCHABLE),),
    ),
    Family(
        name="mhc_pre_big_fuse",
        op_type="mhc",
        twin={"hc": 4, "hidden_size": 32, "mix": 24, "num_scales": 3},
        plan=PLAN,
        make_inputs=pre_inputs,
        oracle=pre_oracle,
        compare={"post_mix": POST_MIX, "comb_mix": COMB_MIX, "layer_input": LAYER_INPUT},
        isolated=("dot_mix", "sqrsum", "residual"),
        kernels=(Kernel("flashinfer.mhc.mhc_pre_big_fuse", run_pre, limits=LAUNCHABLE),),
    ),
    Family(
        name="hc_head",
        op_type="mhc",
        twin={"hc": 4, "hidden_size": 32, "hc_hidden_size": 128, "num_scales": 1},
        plan=PLAN,
        make_inputs=head_inputs,
        oracle=head_oracle,
        compare={"output": HEAD},
        isolated=("x",),
        kernels=(Kernel("sglang.kernels.ops.layernorm.mhc_head.fused_hc_head", run_head, limits=LAUNCHABLE),),
    ),
)
