"""Grouped products of rows that are sorted by expert, in fp8 blocks and with int4 weights."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import called, function_at
from flashinfer_trace.families.moe.expert_gemm import (
    MANY,
    PRODUCT,
    TRUNCATED,
    Weights,
    drawn_activations,
    products,
    reshaped,
)
from flashinfer_trace.families.moe.kernels import filled, workspaces
from flashinfer_trace.families.quantized import (
    CODE_SIGMA,
    blocks_of,
    dequantized,
    nibbles,
    normal_codes,
    quantize_groups,
    varied_scales,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, KernelCall, Outputs, Plan
from flashinfer_trace.harness.inputs import SCALES_SPREAD, Draws, indptr, split
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import Expected

#: An empty product has no launch.
ROWS = {"total_rows": (1, 65536)}
#: Rows of one tile of DeepGEMM's contiguous layout: each expert's rows are padded to a multiple of it.
DEEP_GEMM_ROWS = 128


def problem_sizes(inputs: Inputs, columns: int, depth: int, transposed: bool = False) -> torch.Tensor:
    rows = inputs["expert_offsets"].diff()
    sizes = [rows, torch.full_like(rows, columns), torch.full_like(rows, depth)]
    return torch.stack([sizes[1], sizes[0], sizes[2]] if transposed else sizes, dim=1).contiguous()


def run_cutlass(function: str, with_layouts: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """sgl_kernel's products, which fill pointers and layouts; weights and their scales are transposed views."""
    experts, n, k = len(inputs["b"]), definition.const_axes["n"], definition.const_axes["k"]
    device = inputs["a"].device
    pointers, layouts, workspace = workspaces(experts, device)
    operands = (inputs["a"], inputs["b"].mT, inputs["a_scale"], inputs["b_scale"].mT)
    strides = (filled(experts, k, device), filled(experts, k, device), filled(experts, n, device))
    where = (problem_sizes(inputs, n, k), inputs["expert_offsets"][:-1], workspace)
    if with_layouts:
        function_at(function)(outputs["output"], *pointers, *operands, *strides, *layouts, *where)
    else:
        function_at(function)(outputs["output"], *operands, *strides, *where)
    return outputs


def run_w4a8(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Scales are interleaved by 4 blocks where k has a multiple of these, as SGLang prepares them."""
    scales, axes = inputs["b_scale"], definition.const_axes
    experts, n, blocks = scales.shape
    together = 4 if blocks % 4 == 0 else 1
    interleaved = scales.view(experts, n, blocks // together, together).permute(0, 2, 1, 3).contiguous()
    strides = (torch.full((experts, 3), axes[axis], dtype=torch.int64, device=scales.device) for axis in "kn")
    given = {
        "scales": interleaved.view(experts, blocks // together, n * together),
        **{"sizes": problem_sizes(inputs, n, axes["k"], transposed=True), "first": inputs["expert_offsets"][:-1]},
        **dict(zip(("stride_in", "stride_out"), strides, strict=True)),
    }
    text = "output a b a_scale scales first sizes stride_in stride_in stride_out stride_out 128 8"
    called(W4A8_PATH, text, definition, {**inputs, **outputs, **given})
    return outputs


def padded_places(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert of each row of DeepGEMM's layout, int32 [padded rows], and the place of each row there, int64."""
    lengths = offsets.diff().long()
    padded = (lengths + DEEP_GEMM_ROWS - 1) // DEEP_GEMM_ROWS * DEEP_GEMM_ROWS
    numbers = torch.arange(len(lengths), device=offsets.device)
    shift = (padded.cumsum(0) - padded) - offsets[:-1]
    rows = torch.arange(int(offsets[-1]), device=offsets.device)
    return numbers.repeat_interleave(padded).to(torch.int32), rows + shift.repeat_interleave(lengths)


def spread_out(values: torch.Tensor, place: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows put into their places of a tensor of zeros; fp8 as its bytes."""
    result = torch.zeros(*shape, values.shape[1], dtype=values.dtype, device=values.device)
    if values.dtype.itemsize == 1:
        result.view(torch.uint8).view(-1, values.shape[1])[place] = values.view(torch.uint8)
    else:
        result.view(-1, values.shape[1])[place] = values
    return result


def run_contiguous(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The rows of each expert are padded to whole tiles, as SGLang pads them."""
    import deep_gemm

    experts, place = padded_places(inputs["expert_offsets"])
    a, scales = (spread_out(inputs[name], place, (len(experts),)) for name in ("a", "a_scale"))
    product = a.new_zeros((len(experts), inputs["b"].shape[1]), dtype=torch.bfloat16)
    weights = (inputs["b"], inputs["b_scale"])
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scales), weights, product, experts)
    return {"output": product[place]}


def run_masked(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Each expert has as many rows as the one with most, rounded up to whole tiles; only its own ones count."""
    import deep_gemm

    offsets = inputs["expert_offsets"]
    lengths = offsets.diff()
    most = -(-int(lengths.max()) // DEEP_GEMM_ROWS) * DEEP_GEMM_ROWS
    experts = torch.arange(len(lengths), device=offsets.device)
    rows = torch.arange(int(offsets[-1]), device=offsets.device)
    place = rows + (experts * most - offsets[:-1]).repeat_interleave(lengths.long())
    a, scales = (spread_out(inputs[name], place, (len(lengths), most)) for name in ("a", "a_scale"))
    product = a.new_zeros((len(lengths), most, inputs["b"].shape[1]), dtype=torch.bfloat16)
    weights = (inputs["b"], inputs["b_scale"])
    expected = max(1, len(rows) // len(lengths))
    deep_gemm.fp8_m_grouped_gemm_nt_masked((a, scales), weights, product, lengths.contiguous(), expected)
    return {"output": product.flatten(0, 1)[place]}


def hopper(path: str, call: KernelCall) -> Kernel:
    return Kernel(path, call, limits=ROWS, compare={"output": TRUNCATED})


CUTLASS = {"sgl_kernel.fp8_blockwise_scaled_grouped_mm": True, "sgl_kernel.es_fp8_blockwise_scaled_grouped_mm": False}
FP8 = (
    *(hopper(path, functools.partial(run_cutlass, path, layouts)) for path, layouts in CUTLASS.items()),
    hopper("deep_gemm.m_grouped_fp8_gemm_nt_contiguous", run_contiguous),
    hopper("deep_gemm.fp8_m_grouped_gemm_nt_masked", run_masked),
)
W4A8_PATH = "sgl_kernel.cutlass_w4a8_moe_mm"
W4A8 = (hopper(W4A8_PATH, run_w4a8),)

#: ``integers``: small codes, and scales that are powers of two: every sum is exact, in any kernel.
#: ``spread``: rows, and scales of rows of weights, whose magnitudes differ widely.
KINDS = ("normal", "large", "tiny", "integers", "spread")
#: ``one``: all rows belong to one expert; ``even``: as evenly as they can be; ``uneven``: some experts have none.
#: Traffic has ``routed`` ones: each row chose its expert by chance.
GROUPS = ("uneven", "even", "one")
#: On a GPU, most cases are of a few experts, as in `expert_gemm`: only ``neighbors`` have rows, NEIGHBORS in a row.
GROUPS_OF_MANY = (*GROUPS, *("neighbors",) * 5)
NEIGHBORS = 16
#: How many times larger than others the scales of int4 weights of huge values are: beyond float16's range.
HUGE_SCALES = 2.0**30

#: The corners are one row; on a CPU also values beyond float16's range, where no kernel has been run,
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
    shape = [plan["total_rows"], definition.const_axes["k"]]
    return drawn_activations(shape, plan["values"], plan["zero_row"], draws).float()


def powers(shape: list[int], draws: Draws) -> torch.Tensor:
    return torch.exp2(draws.integers(shape, -1, 1).float())


def spread_of(plan: Plan) -> tuple[int, int]:
    return SCALES_SPREAD if plan["values"] == "spread" else (0, 0)


def fp8_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Offsets are drawn before the weights, so a seed has the same ones for weights of any size."""
    axes, rows = definition.const_axes, activations(definition, plan, draws)
    offsets = offsets_of(definition, plan, draws)
    shape = [axes["num_experts"], axes["n"], axes["k"]]
    scales = [axes["num_experts"], axes["num_n_blocks"], axes["num_k_blocks"]]
    if plan["values"] == "integers":
        own = (rows.to(torch.float8_e4m3fn), powers([len(rows), axes["num_k_blocks"]], draws))
        weights = (draws.integers(shape, -4, 4, torch.int8).to(torch.float8_e4m3fn), powers(scales, draws))
    else:
        own = quantize_groups(rows)
        typical = 1 / (CODE_SIGMA * axes["k"] ** 0.5)
        weights = (normal_codes(draws, shape), varied_scales(draws, scales, typical, spread_of(plan)))
    return {"a": own[0], "a_scale": own[1], "b": weights[0], "b_scale": weights[1], "expert_offsets": offsets}


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
    groups = [(expert, start, end) for expert, (start, end) in enumerate(itertools.pairwise(ends)) if end > start]
    places = [(expert, torch.arange(start, end, device=rows.device)) for expert, start, end in groups]
    shape = (len(rows), definition.const_axes["n"])
    found = products(rows, [(expert, own, own) for expert, own in places], weights, shape, squared=True)
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
    """int8 [..., n] -> float64 [..., 2n]: the remainder by 16 is the even element, the quotient the odd one."""
    halves = nibbles(packed)
    return torch.where(halves >= 8, halves - 16, halves)


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
        kernels=FP8,
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
        kernels=W4A8,
    ),
)
