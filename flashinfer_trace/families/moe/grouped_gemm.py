"""Grouped products of rows that are sorted by expert, in fp8 blocks and with int4 weights: plans and records."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.moe import grouped_gemm_kernels as kernels
from flashinfer_trace.families.moe.expert_gemm import MANY, drawn_activations
from flashinfer_trace.families.moe.products import PRODUCT, Weights, products, reshaped
from flashinfer_trace.families.quantized import (
    CODE_SIGMA,
    blocks_of,
    dequantized,
    normal_codes,
    quantize_groups,
    varied_scales,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Plan
from flashinfer_trace.harness.inputs import SCALES_SPREAD, Draws, indptr, split
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import Expected

#: ``integers``: small codes, and scales that are powers of two: every sum is exact, in any kernel.
#: ``spread``: rows, and scales of rows of weights, of very different magnitude.
KINDS = ("normal", "large", "tiny", "integers", "spread")
#: ``one``: all rows belong to one expert; ``even``: as evenly as they can be; ``uneven``: some experts have none.
#: Traffic has ``routed`` ones: each row chose its expert by chance.
GROUPS = ("uneven", "even", "one")
#: On a GPU, most cases are of a few experts, as in `expert_gemm`: only ``neighbors`` have rows, NEIGHBORS in a row.
GROUPS_OF_MANY = (*GROUPS, *("neighbors",) * 5)
NEIGHBORS = 16
#: How many times larger than others the scales of int4 weights of huge values are: beyond float16's range.
HUGE_SCALES = 2.0**30


#: The corners are one row; on a CPU also values beyond float16's range, of which it was never seen what kernels make,
#: and `MANY` rows of one expert: a GPU draws up to 1000.
PLAN = RowPlans(
    {"total_rows": Count(40, 1000, usual=16)},
    {
        "groups": Drawn(lambda request: st.sampled_from(GROUPS_OF_MANY if request.large else GROUPS), "routed"),
        "values": KINDS,
        "zero_row": FLAG,
    },
    special=[{"total_rows": 1, "groups": "one"}],
    on_cpu=[{"total_rows": 7, "groups": "even", "values": "huge"}, {"total_rows": MANY, "groups": "one"}],
    many_rows=300,
)


def group_lengths(total: int, experts: int, kind: str, draws: Draws) -> list[int]:
    """The rows of each expert."""
    if kind == "one":
        chosen = draws.host_integers(1, 0, experts - 1)[0]
        return [total if expert == chosen else 0 for expert in range(experts)]
    if kind == "even":
        return [total // experts + (expert < total % experts) for expert in range(experts)]
    if kind == "routed":
        rows = Counter(draws.host_integers(total, 0, experts - 1))
        return [rows[expert] for expert in range(experts)]
    among = min(experts, NEIGHBORS) if kind == "neighbors" else experts
    first = draws.host_integers(1, 0, experts - among)[0]
    return [0] * first + split(total, among, draws) + [0] * (experts - among - first)


def offsets_of(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    lengths = group_lengths(plan["total_rows"], definition.const_axes["num_experts"], plan["groups"], draws)
    return indptr(lengths, draws.device)


def activations(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    """float32 [total_rows, k]."""
    shape = [plan["total_rows"], definition.const_axes["k"]]
    return drawn_activations(shape, plan["values"], plan["zero_row"], draws).float()


def small_codes(shape: list[int], draws: Draws) -> torch.Tensor:
    """float8_e4m3fn integers from -4 to 4."""
    return draws.integers(shape, -4, 4, torch.int8).to(torch.float8_e4m3fn)


def powers(shape: list[int], draws: Draws) -> torch.Tensor:
    """float32 1/2, 1 or 2."""
    return torch.exp2(draws.integers(shape, -1, 1).float())


def spread_of(plan: Plan) -> tuple[int, int]:
    """The exponents between which scales of weights differ."""
    return SCALES_SPREAD if plan["values"] == "spread" else (0, 0)


def fp8_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Offsets are drawn before the weights, so that a seed has the same ones for weights of any size."""
    axes, rows = definition.const_axes, activations(definition, plan, draws)
    offsets = offsets_of(definition, plan, draws)
    shape = [axes["num_experts"], axes["n"], axes["k"]]
    scales = [axes["num_experts"], axes["num_n_blocks"], axes["num_k_blocks"]]
    if plan["values"] == "integers":
        own = (rows.to(torch.float8_e4m3fn), powers([len(rows), axes["num_k_blocks"]], draws))
        weights = (small_codes(shape, draws), powers(scales, draws))
    else:
        own = quantize_groups(rows)
        typical = 1 / (CODE_SIGMA * axes["k"] ** 0.5)
        weights = (normal_codes(draws, shape), varied_scales(draws, scales, typical, spread_of(plan)))
    known = {**dict(zip(("a", "a_scale"), own, strict=True)), **dict(zip(("b", "b_scale"), weights, strict=True))}
    return {**known, "expert_offsets": offsets}


def w4a8_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Activations with one scale, of about the same magnitude, and random bytes: each has two weights."""
    axes, experts, n = definition.const_axes, definition.const_axes["num_experts"], definition.const_axes["n"]
    rows = activations(definition, {**plan, "values": "normal"} if plan["values"] == "spread" else plan, draws)
    whole = plan["values"] == "integers"
    scale = torch.ones(1, device=draws.device)
    if not whole and len(rows):
        scale = (rows.abs().max() / 448).clamp_min(1e-10).view(1)
    shape = [experts, n, axes["num_k_blocks"]]
    typical = (HUGE_SCALES if plan["values"] == "huge" else 1.0) / (4.6 * axes["k"] ** 0.5)
    scales = powers(shape, draws) if whole else varied_scales(draws, shape, typical, spread_of(plan))
    return {
        "a": (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn),
        "a_scale": scale,
        "b": draws.integers([experts, n, axes["k_bytes"]], -128, 127, torch.int8),
        "b_scale": scales.to(torch.bfloat16),
        "expert_offsets": offsets_of(definition, plan, draws),
    }


def expected_output(
    definition: Definition, inputs: Inputs, rows: torch.Tensor, weights: Weights, exact: bool
) -> dict[str, Expected]:
    ends = inputs["expert_offsets"].tolist()
    groups = [
        (expert, torch.arange(start, end, device=rows.device))
        for expert, (start, end) in enumerate(itertools.pairwise(ends))
        if end > start
    ]
    shape = (len(rows), definition.const_axes["n"])
    found = products(rows, [(expert, own, own) for expert, own in groups], weights, shape, squared=True)
    return {"output": reshaped(found, shape, exact and len(rows) > 0)}


def are_powers(values: torch.Tensor) -> bool:
    """Whether all are powers of two between 1/2 and 2: sums of small integers times these are exact in float32."""
    between = (values >= 0.5) & (values <= 2)
    return bool((torch.frexp(values.float()).mantissa == 0.5).all() & between.all())


def are_small(codes: torch.Tensor, most: float) -> bool:
    values = codes.float()
    return bool((values == values.round()).all() & (values.abs() <= most).all())


def fp8_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    a, b = inputs["a"], inputs["b"]
    rows = (blocks_of(a.double()) * inputs["a_scale"].double().unsqueeze(-1)).flatten(-2)
    exact = are_powers(inputs["a_scale"]) and are_powers(inputs["b_scale"]) and are_small(a, 4) and are_small(b[0], 4)
    return expected_output(
        definition, inputs, rows, lambda expert: dequantized(b[expert], inputs["b_scale"][expert], torch.float64), exact
    )


def int4_values(packed: torch.Tensor) -> torch.Tensor:
    """int8 [..., n] -> float64 [..., 2n]: the remainder by 16 is the even element, what is left the odd one."""
    byte: torch.Tensor = packed.double() % 256
    pair = torch.stack([byte % 16, (byte / 16).floor()], dim=-1)
    signed: torch.Tensor = torch.where(pair >= 8, pair - 16, pair)
    return signed.flatten(-2)


def w4a8_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    a, scales = inputs["a"], inputs["b_scale"]
    rows = a.double() * inputs["a_scale"].double()

    def weights(expert: int) -> torch.Tensor:
        scaled: torch.Tensor = blocks_of(int4_values(inputs["b"][expert])) * scales[expert].double().unsqueeze(-1)
        return scaled.flatten(-2)

    exact = are_powers(inputs["a_scale"]) and are_powers(scales) and are_small(a, 4)
    return expected_output(definition, inputs, rows, weights, exact)


TWIN = {"num_experts": 5, "num_offsets": 6, "n": 256, "k": 384, "num_k_blocks": 3}
FAMILIES = (
    Family(
        name="moe_fp8_block_scale_grouped_gemm",
        op_type="moe",
        twin={**TWIN, "num_n_blocks": 2},
        plan=PLAN,
        make_inputs=fp8_inputs,
        isolated=("a",),
        oracle=fp8_oracle,
        compare={"output": PRODUCT},
        kernels=kernels.FP8,
    ),
    Family(
        name="moe_w4a8_grouped_gemm",
        op_type="moe",
        twin={**TWIN, "n": 48, "k_bytes": 192},
        plan=PLAN,
        make_inputs=w4a8_inputs,
        isolated=("a",),
        oracle=w4a8_oracle,
        compare={"output": PRODUCT},
        kernels=kernels.W4A8,
    ),
)
