"""Both products of a mixture of experts over rows that are sorted by expert, with bf16 or mxfp4 weights.

The first one gathers the rows of tokens; the second one multiplies rows by routing weights and sums those of a token.

The kernel is triton_kernels' matmul (OpenAI's, in sglang-kernel's wheel), as SGLang's backend triton_kernel calls it.

From its source (triton_kernels of sglang-kernel 0.4.10, matmul.py):

- It adds products in float32, adds the bias, applies the activation, multiplies by gamma, and rounds. It writes each
  row to the place of its pair. SGLang adds up the rows of a token with torch.sum, in float32.
- Where there are few tiles and nothing is scattered, the features are split, and a second launch adds float32 parts.
- On Hopper, mxfp4 weights are widened to bf16, times their scales, which is exact. Scales are read in tiles of 128
  features without a mask, so SGLang adds scales of 1 up to whole tiles.
- Without rows it returns before it launches anything; SGLang never calls it so.

Up to sglang-kernel 0.4.2 it was called matmul_ogs, and added up the rows of a token itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.moe.expert_gemm import (
    PRODUCT,
    TERM_ROUNDINGS,
    U32,
    drawn_activations,
    products,
    reshaped,
)
from flashinfer_trace.families.moe.grouped_gemm import GROUPS, GROUPS_OF_MANY, group_lengths
from flashinfer_trace.families.quantized import nibbles
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

#: ``integers``: sums are exact in float32; ``spread``: rows, and scales of rows of weights, of different magnitude.
KINDS = ("normal", "large", "tiny", "positive", "integers", "spread")
#: The range of the exponents that spread scales of weights add to the usual ones.
SCALES_SPREAD = -24, 16
#: The additional arguments of a clamped SwiGLU; the first ones are those of gpt-oss.
ALPHAS, LIMITS = (1.702, 1.0, 0.5), (7.0, 1.5, 20.0)
#: Only a corner has weights of this kind: blocks of features have scales of 2^FAR and 2^-FAR in turn, and activations
#: that undo these. Powers of two scale every product exactly, so the outputs are those of normal values.
FAR = 64
#: Root mean square of random e2m1 codes.
MXFP4_SIGMA = 2.9
#: The derivative of g sigmoid(alpha g) is at most 1.0998, for any alpha.
STEEPEST = 1.1
#: float32's smallest normal number: sigmoids and products below it may be flushed to zero.
SMALLEST = 2.0**-126


def usual_choices(definition: Definition, axes: Mapping[str, int]) -> int:
    """That of gpt-oss, whose experts have biases, or else of Qwen3."""
    if axes.get("num_tokens") and "num_rows" in axes:
        return axes["num_rows"] // axes["num_tokens"]
    return axes.get("top_k", 4 if "bias" in definition.inputs else 8)


def corners(request: PlanRequest) -> list[Plan]:
    """One token with one choice; many choices of one expert; values beyond float16's range, on a CPU only; for a
    clamped SwiGLU, each alpha and limit; for mxfp4 weights, scales far from 1."""
    one = {"num_tokens": 1, "top_k": 1, "groups": "one"}
    many = {**one, "num_tokens": 40, "top_k": 7}
    few = {"groups": "even", "top_k": 3}
    found = [many] if request.large else [one, many, {**few, "groups": "one", "values": "huge"}]
    if "weights_scale" in request.definition.inputs:
        found.append({**few, "values": "far"})
    if "limit" in request.definition.inputs:
        found += [{**few, "alpha": ALPHAS[number], "limit": LIMITS[number]} for number in (1, 2)]
    return found


PLAN = RowPlans(
    {
        "num_tokens": Count(
            16,
            200,
            usual=lambda definition, axes: (
                -(-axes.get("num_rows", 16) // usual_choices(definition, axes if "top_k" in axes else {}))
            ),
            corner=5,
        )
    },
    {
        "top_k": Drawn(
            lambda r: st.integers(*(r.range("top_k", 1, 8, 8) if "gammas" in r.definition.inputs else (1, 8))),
            usual_choices,
        ),
        "groups": Drawn(lambda request: st.sampled_from(GROUPS_OF_MANY if request.large else GROUPS), "routed"),
        "values": KINDS,
        "zero_row": FLAG,
    },
    special=corners,
    many_rows=300,
)
CLAMPED_PLAN = replace(PLAN, choices={**PLAN.choices, "alpha": ALPHAS, "limit": LIMITS})


def choices_of(plan: Plan, experts: int, draws: Draws) -> tuple[list[int], torch.Tensor]:
    """The rows of each expert, and where each choice of each token is among sorted rows, int32 [num_tokens, top_k]: a
    random permutation, but ``routed`` rows are of different experts for each token."""
    tokens, choices = plan["num_tokens"], plan["top_k"]
    rows = tokens * choices
    if plan["groups"] != "routed":
        counts = group_lengths(rows, experts, plan["groups"], draws)
        return counts, draws.uniform([rows], 0.0, 1.0).argsort().int().view(tokens, choices)
    times = -(-choices // experts)  # a token that chooses more than there are has some experts again
    chosen = draws.uniform([tokens, times * experts]).argsort(dim=1)[:, :choices].flatten() % experts
    places = chosen.argsort(stable=True).argsort()
    return torch.bincount(chosen, minlength=experts).tolist(), places.int().view(tokens, choices)


def drawn_weights(definition: Definition, scale: float, kind: str, draws: Draws) -> Inputs:
    """Weights of about this size; mxfp4 ones are random bytes, with scales that differ by powers of two: large ones
    above 1 (a byte above 127), far ones as FAR says."""
    axes, whole = definition.const_axes, kind == "integers"
    experts, n, k = axes["num_experts"], axes["n"], axes["k"]
    if "weights_scale" not in definition.inputs:
        return {"weights": draws.matrices([experts, k, n], torch.bfloat16, "integers" if whole else "normal", scale)}
    typical = 130 if kind == "large" else 127 + round(math.log2(scale / MXFP4_SIGMA))
    codes = draws.integers([experts, n, axes["k_bytes"]], -128, 127, torch.int8)
    exponents = draws.integers([experts, n, axes["num_k_blocks"]], typical - 1, typical + 1)
    if kind == "spread":
        exponents += draws.exponents(experts * n, *SCALES_SPREAD).view(experts, n, 1)
    if kind == "far":
        exponents += far_exponents(axes["num_k_blocks"], draws)
    return {"weights": codes, "weights_scale": exponents.to(torch.int8)}


def far_exponents(blocks: int, draws: Draws) -> torch.Tensor:
    return FAR - 2 * FAR * (torch.arange(blocks, device=draws.device) % 2)


def drawn_rows(definition: Definition, shape: list[int], plan: Plan, draws: Draws) -> torch.Tensor:
    """bfloat16 activations; those of large mxfp4 weights are normal."""
    kind = plan["values"]
    if kind == "far":
        blocks = definition.const_axes["num_k_blocks"]
        undone = torch.exp2(-far_exponents(blocks, draws).double()).repeat_interleave(shape[1] // blocks)
        return (drawn_activations(shape, "normal", plan["zero_row"], draws) * undone).to(torch.bfloat16)
    kind = "normal" if kind == "large" and "weights_scale" in definition.inputs else kind
    return drawn_activations(shape, kind, plan["zero_row"], draws)


def weights_of(inputs: Inputs, expert: int) -> torch.Tensor:
    """float64 [n, k]. A code c of exponent e and mantissa m is 2^(e - 1) (1 + m / 2), or m / 2 where e is 0."""
    own: torch.Tensor = inputs["weights"][expert].double()
    if "weights_scale" not in inputs:
        return own.T
    code = nibbles(own)
    exponent, mantissa = (code % 8 / 2).floor(), code % 2 / 2
    magnitude = torch.where(exponent == 0, mantissa, torch.exp2(exponent - 1) * (1 + mantissa))
    values = torch.where(code >= 8, -magnitude, magnitude)
    scales: torch.Tensor = torch.exp2(inputs["weights_scale"][expert].double() % 256 - 127)
    return values * scales.repeat_interleave(values.shape[1] // scales.shape[1], dim=1)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Some elements exceed the limit of a clamped SwiGLU: large mxfp4 weights meet normal activations, or nearly all
    would."""
    axes, kind = definition.const_axes, plan["values"]
    experts, n, k = axes["num_experts"], axes["n"], axes["k"]
    counts, positions = choices_of(plan, experts, draws)
    rows, whole = positions.numel(), kind == "integers"
    gammas = draws.uniform([rows], 0.05, 2.5)
    gammas = torch.exp2(draws.integers([rows], -3, 1).float()) if whole else gammas
    scale = k**-0.5 * (4.0 if "limit" in definition.inputs else 1.0)
    # A token's rows are those at its positions, so rows in order name tokens in the order of the positions.
    owners = positions.flatten().argsort() // plan["top_k"]
    height = rows if "gammas" in definition.inputs else plan["num_tokens"]
    known: Inputs = {
        "x": drawn_rows(definition, [height, k], plan, draws),
        **drawn_weights(definition, scale, kind, draws),
        "bias": draws.normal([experts, n], scale=2.0).round() if whole else draws.normal([experts, n], scale=2.0),
        "expert_counts": torch.tensor(counts, dtype=torch.int32, device=draws.device),
        "row_tokens": owners.int(),
        "gammas": gammas.to(torch.bfloat16),
        "positions": positions,
        "alpha": plan.get("alpha"),
        "limit": plan.get("limit"),
    }
    return {name: known[name] for name in definition.inputs}


def expected_rows(inputs: Inputs) -> Expected:
    """x weights + bias of each row, with the parts of `products` and ``inside``, the error of the float32 sums."""
    counts = inputs["expert_counts"].tolist()
    rows = inputs["x"].double()
    source = inputs.get("row_tokens", torch.arange(len(rows), device=rows.device)).long()
    groups, first = [], 0
    for expert, count in enumerate(counts):
        if count:
            own = torch.arange(first, first + count, device=rows.device)
            groups.append((expert, own, source[own]))
        first += count
    n = inputs["weights"].shape[1 if "weights_scale" in inputs else 2]
    found = products(rows, groups, functools.partial(weights_of, inputs), (first, n))
    value, magnitude = found.value, found.parts["magnitude"]
    if "bias" in inputs:
        bias = inputs["bias"].double()
        owner = torch.arange(len(counts), device=rows.device).repeat_interleave(inputs["expert_counts"].long())
        value, magnitude = value + bias[owner], magnitude + bias[owner].abs()
    inside = summation_error(magnitude, rows.shape[1]) + TERM_ROUNDINGS * U32 * magnitude
    return Expected(value, {**found.parts, "magnitude": magnitude, "inside": inside})


def gather_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    found = expected_rows(inputs)
    x, weights = inputs["x"].float(), inputs["weights"][:1].float()
    whole = bool((x == x.round()).all()) and bool((weights == weights.round()).all())
    exact = whole and x.numel() > 0 and float(x.abs().max()) * 4 * x.shape[1] < 2**24
    return {"output": reshaped(found, tuple(found.value.shape), exact and found.value.numel() > 0)}


def clamped_error(value: torch.Tensor, error: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """How far clamping may move a value that is off by `error`: nothing where both ends of the error are cut off."""
    middle = value.clamp(low, high)
    return torch.maximum((value + error).clamp(low, high) - middle, middle - (value - error).clamp(low, high))


def swiglu_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Errors of the two sums move the output by the slopes of both factors."""
    found = expected_rows(inputs)
    alpha, limit = float(inputs["alpha"]), float(inputs["limit"])
    gate, linear, of_gate, of_linear = (
        each[:, odd::2] for each in (found.value, found.parts["inside"]) for odd in (0, 1)
    )
    of_gate = clamped_error(gate, of_gate, -torch.inf, limit)
    of_linear = clamped_error(linear, of_linear, -limit, limit)
    gate, linear = gate.clamp_max(limit), linear.clamp(-limit, limit)
    share = torch.sigmoid(alpha * gate)
    swish = gate * share
    # The slope s (1 + alpha x (1 - s)) at x is at most s (1 + alpha |x|), at the ends of the error.
    steepest = torch.sigmoid(alpha * (gate + of_gate)) * (1 + alpha * (gate.abs() + of_gate))
    # exp(-alpha g) is off by its argument's roundings and 4 of its own; the quotient leaves 1 - share of that.
    roundings = 2 * alpha * gate.abs() * (1 - share) + 12
    inside = (linear + 1).abs() * (steepest.clamp_max(STEEPEST) * of_gate + roundings * U32 * swish.abs())
    inside += swish.abs() * (of_linear + 2 * U32 * (linear.abs() + 1))
    # Gates have no lower limit: a sigmoid that is flushed takes the gate along, as many times as it is large.
    inside += SMALLEST * ((gate.abs() + 1) * (linear + 1).abs() + 1)
    return {"output": Expected(swish * (linear + 1), {"inside": inside})}


def scatter_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    found, positions = expected_rows(inputs), inputs["positions"].long()
    gammas = inputs["gammas"].double().unsqueeze(1)
    weighed = found.value * gammas
    inside = found.parts["inside"] * gammas + 2 * U32 * weighed.abs()
    rows = weighed.abs()[positions].sum(dim=1)
    sums = {"inside": inside[positions].sum(dim=1) + positions.shape[1] * U32 * rows, "rows": rows}
    return {"output": Expected(weighed[positions].sum(dim=1), sums)}


def inside_and_rounding(expected: Expected) -> torch.Tensor:
    inside = expected.parts["inside"]
    return rounding_error(expected.value.abs() + inside, torch.bfloat16) + inside


SWIGLU = ErrorBound(
    inside_and_rounding,
    "one bf16 rounding, u = 2^-8; the float32 sums of gate and linear feature, (8 sqrt(k) + 6) 2^-24 of the terms, "
    "times the slopes of the other factor; exp, quotient and product, any of which may be flushed below 2^-126",
)
SUM = ErrorBound(
    inside_and_rounding,
    "one bf16 rounding, u = 2^-8, of float32 sums: (8 sqrt(k) + 6) 2^-24 of the terms of each row, and 2 + top_k "
    "roundings of the rows",
)

# The kernels

#: SGLang's number of warps, for which scales are laid out.
WARPS = 8
#: Features that share a scale of mxfp4 weights, scales of one tile of features, and the byte of a scale of 1.
MXFP4_BLOCK, TILE_SCALES, ONE = 32, 4, 127
BFLOAT16 = unit_roundoff(torch.bfloat16)


def mxfp4_weights(inputs: Inputs) -> tuple[Any, Any]:
    """Weights [num_experts, k, n] and the configuration with their scales, in the layouts that SGLang chooses."""
    from triton_kernels.matmul import PrecisionConfig
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    codes, scales = (inputs[name].view(torch.uint8) for name in ("weights", "weights_scale"))
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[2] % TILE_SCALES), value=ONE)
    values_as = layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2)
    scales_as = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=WARPS)
    weights = convert_layout(wrap_torch_tensor(codes.mT, dtype=FP4), values_as)
    scale = convert_layout(wrap_torch_tensor(scales.mT), scales_as)
    return weights, PrecisionConfig(b_mx_scale=scale, b_microblock_size=MXFP4_BLOCK)


def product(inputs: Inputs, output: torch.Tensor, **options: Any) -> None:
    """Writes a product of sorted rows, for mxfp4 weights with the constraint that SGLang sets on Hopper."""
    from triton_kernels.matmul import matmul
    from triton_kernels.matmul_details import opt_flags
    from triton_kernels.tensor import make_ragged_tensor_metadata

    weights, counts = inputs["weights"], inputs["expert_counts"]
    constraints = {}
    if "weights_scale" in inputs:
        weights, options["precision_config"] = mxfp4_weights(inputs)
        constraints["split_k"] = 1
    experts = make_ragged_tensor_metadata(counts, int(counts.sum()))
    with opt_flags.scoped_opt_flags_constraints(constraints):
        matmul(inputs["x"], weights, inputs.get("bias"), a_ragged_metadata=experts, c=output, **options)


def run_gather(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from triton_kernels.matmul import FnSpecs, FusedActivation

    options: dict[str, Any] = {"gather_indx": inputs["row_tokens"]}
    if "limit" in inputs:
        from triton_kernels.swiglu import swiglu_fn

        swiglu = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
        options["fused_activation"] = FusedActivation(swiglu, (float(inputs["alpha"]), float(inputs["limit"])))
    product(inputs, outputs["output"], **options)
    return outputs


def run_scatter(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The second product, and the sums of the rows of each token."""
    positions = inputs["positions"]
    rows = inputs["x"].new_full((positions.numel(), definition.const_axes["n"]), torch.nan)
    product(inputs, rows, scatter_indx=positions.flatten().argsort().int(), gammas=inputs["gammas"])
    torch.sum(rows.view(*positions.shape, -1), dim=1, out=outputs["output"])
    return outputs


#: (definition, inputs) -> expected outputs.
Oracle = Callable[[Definition, Inputs], dict[str, Expected]]
TWIN = {"num_experts": 5, "n": 24, "k": 80}
#: More than half as many as models have, so a sum of only half of them shows.
MANY_FEATURES = {"n": 1448}
MXFP4 = {"k": 96, "k_bytes": 48, "num_k_blocks": 3}


def family(name: str, oracle: Oracle, policy: ErrorBound, more: Mapping[str, int] | None = None) -> Family:
    """The record of one family; where rows are summed, the kernel rounds each to bf16 before."""
    gather, limits = "gather" in name, {"num_rows": (1, 1 << 30), "num_tokens": (1, 1 << 30)}
    rounded = ErrorBound(
        lambda expected: policy.bound(expected) + expected.parts["rows"] * (BFLOAT16 * (1 + 2**-7)),
        f"{policy.reason}; each row is rounded to bf16 before the sum, u = 2^-8",
    )
    run, bound = (run_gather, policy) if gather else (run_scatter, rounded)
    return Family(
        name=name,
        op_type="moe",
        twin={**TWIN, **(more or {})},
        plan=CLAMPED_PLAN if "swiglu" in name else PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": policy},
        kernels=(Kernel("triton_kernels.matmul.matmul", run, limits=limits, compare={"output": bound}),),
    )


FAMILIES = (
    family("moe_bf16_gather_gemm", gather_oracle, PRODUCT),
    family("moe_bf16_gather_gemm_swiglu", swiglu_oracle, SWIGLU, {"half_n": 12}),
    family("moe_bf16_scatter_gemm", scatter_oracle, SUM, MANY_FEATURES),
    family("moe_bf16_scatter_gemm_bias", scatter_oracle, SUM, MANY_FEATURES),
    family("moe_mxfp4_gather_gemm_swiglu", swiglu_oracle, SWIGLU, {**MXFP4, "half_n": 12}),
    family("moe_mxfp4_scatter_gemm_bias", scatter_oracle, SUM, {**MXFP4, **MANY_FEATURES}),
)
