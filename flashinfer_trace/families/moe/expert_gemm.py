"""One product of the experts that tokens chose, in bf16 and in fp8 blocks: what plans draw, and the records."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from flashinfer_trace.families.moe.inputs import drawn_ids
from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.families.moe.products import (
    PRODUCT,
    QUANTIZED,
    TRUNCATED,
    Weights,
    e4m3_groups,
    products,
    reshaped,
    scaled,
)
from flashinfer_trace.families.moe.rows import TRITON_MODULE
from flashinfer_trace.families.moe.sorting import CHOICES
from flashinfer_trace.families.quantized import BLOCK, CODE_SIGMA, dequantized, normal_codes, varied_scales
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import SCALES_SPREAD, Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import Expected

#: ``positive``: activations of one sign. ``integers``: sums are exact in float32, so a kernel must round correctly.
#: ``spread``: rows, and scales of rows of weights, of very different magnitude.
KINDS = ("normal", "large", "tiny", "positive", "integers", "spread")
#: ``vanishing``: far below the smallest scale, so that codes have few bits left.
FP8_KINDS = ("normal", "large", "tiny", "positive", "vanishing", "spread")

#: How tokens choose on a GPU. Most cases are of few experts: where all are chosen, the weights of all are read several
#: times, although each expert is judged by itself.
CHOICES_OF_MANY = (*CHOICES, *("neighbors",) * 7)
#: About 7 times the smallest e4m3 number, in units of the smallest scale, 1e-10 / 448.
VANISHING = 3e-15
#: Rows of one expert, more than tiles of kernels have.
MANY = 300


def plans_of(kinds: tuple[str, ...], on_cpu: Sequence[Plan] = ()) -> RowPlans:
    """Plans whose activations are of these kinds.

    The corners are one token; on a CPU also values beyond float16's range, of which it was never seen what kernels
    make, and `MANY` rows of one expert: a GPU draws up to 300.
    """
    return RowPlans(
        {"seq_len": Count(24, 300)},
        {
            "choice": lambda request: CHOICES_OF_MANY if request.large else CHOICES,
            "values": kinds,
            "zero_row": FLAG,
            "mul": FLAG,
        },
        special=[{"seq_len": 1, "mul": True}],
        on_cpu=[
            {"seq_len": 5, "values": "huge", "choice": "elsewhere", "mul": True},
            {"seq_len": MANY, "choice": "one_expert", "mul": True},
            *on_cpu,
        ],
        many_rows=300,
    )


PLAN = plans_of(KINDS)
#: Activations far below the smallest scale as well, with and without routing weights; a GPU draws them often.
FP8_PLAN = plans_of(FP8_KINDS, [{"seq_len": 9, "values": "vanishing", "mul": mul} for mul in FLAG])


def drawn_activations(shape: list[int], kind: str, zero_row: bool, draws: Draws) -> torch.Tensor:
    """bfloat16 rows whose blocks differ in magnitude; on request, one row is zero."""
    if kind == "integers":
        rows = draws.values(shape, torch.bfloat16, kind)
    else:
        blocks = torch.exp2(draws.uniform([*shape[:-1], -(-shape[-1] // BLOCK)], -0.5, 0.5))
        if kind == "vanishing":
            normal = draws.normal(shape, scale=VANISHING)
        else:
            normal = draws.values(shape, torch.float32, "normal" if kind == "positive" else kind)
        values = normal * blocks.repeat_interleave(BLOCK, dim=-1)[..., : shape[-1]]
        rows = (values.abs() if kind == "positive" else values).to(torch.bfloat16)
    if zero_row and len(rows):
        rows[len(rows) // 2] = 0
    return rows


def routed_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """What does not depend on the format of weights; integers have weights that are powers of two."""
    axes, count = definition.const_axes, plan["seq_len"]
    weights = draws.uniform([count, axes["top_k"]], 0.05, 2.5)
    if plan["values"] == "integers":
        weights = torch.exp2(draws.integers(weights.shape, -3, 1).float())
    shape = [count, axes["rows_per_token"], axes["k"]]
    return {
        "hidden_states": drawn_activations(shape, plan["values"], plan["zero_row"], draws),
        "topk_weights": weights,
        "topk_ids": drawn_ids(count, axes["top_k"], axes["num_experts"], plan["choice"], draws),
        "mul_routed_weight": plan["mul"],
    }


def bf16_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    known = routed_inputs(definition, plan, draws)
    kind = plan["values"] if plan["values"] in ("integers", "spread") else "normal"
    shape = [axes["num_experts"], axes["n"], axes["k"]]
    known["weights"] = draws.matrices(shape, torch.bfloat16, kind, axes["k"] ** -0.5)
    return {name: known[name] for name in definition.inputs}


def fp8_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    known = routed_inputs(definition, plan, draws)
    known["weights"] = normal_codes(draws, [axes["num_experts"], axes["n"], axes["k"]])
    shape = [axes["num_experts"], axes["num_n_blocks"], axes["num_k_blocks"]]
    spread = SCALES_SPREAD if plan["values"] == "spread" else (0, 0)
    known["weights_scale"] = varied_scales(draws, shape, 1 / (CODE_SIGMA * axes["k"] ** 0.5), spread)
    return {name: known[name] for name in definition.inputs}


def expected_output(
    definition: Definition,
    inputs: Inputs,
    rows: torch.Tensor,
    weights: Weights,
    spread: torch.Tensor | None = None,
    exact: bool = False,
) -> dict[str, Expected]:
    """The products of all pairs, and their routing weights if they count; activations in fp8 have a spread."""
    axes, ids = definition.const_axes, inputs["topk_ids"]
    choices = axes["top_k"] // axes["rows_per_token"]
    order = ids.flatten().argsort(stable=True)
    # The first count is of -1. Experts are not asked one by one which pairs are theirs: each would wait for the GPU.
    ends = torch.bincount(ids.flatten() + 1, minlength=axes["num_experts"] + 1).cumsum(0).tolist()
    pairs = [(expert, order[first:end]) for expert, (first, end) in enumerate(itertools.pairwise(ends)) if end > first]
    to_from = [(expert, own, own // choices) for expert, own in pairs]
    found = products(rows, to_from, weights, (ids.numel(), axes["n"]), spread, squared=spread is not None)
    if inputs["mul_routed_weight"]:
        found = scaled(found, inputs["topk_weights"].double().flatten().unsqueeze(1))
    return {"output": reshaped(found, (*ids.shape, axes["n"]), exact)}


def bf16_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Small integers have exact sums; powers of two as routing weights keep them exact."""
    rows, weights = inputs["hidden_states"].flatten(0, 1).double(), inputs["weights"]
    whole = bool((rows == rows.round()).all()) and bool((weights == weights.round()).all())
    small = whole and rows.numel() > 0 and float(rows.abs().max()) * 4 * rows.shape[1] < 2**24
    powers = bool((torch.frexp(inputs["topk_weights"]).mantissa == 0.5).all())
    exact = small and (powers or not inputs["mul_routed_weight"])
    return expected_output(definition, inputs, rows, lambda expert: weights[expert].double(), exact=exact)


def fp8_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    codes, scales = inputs["weights"], inputs["weights_scale"]
    rows, spread = e4m3_groups(inputs["hidden_states"].flatten(0, 1))

    def weights(expert: int) -> torch.Tensor:
        return dequantized(codes[expert], scales[expert], torch.float64)

    return expected_output(definition, inputs, rows, weights, spread)


#: The choices of a token, and its rows, are the Definition's own: whether choices share a row shows at no other sizes.


# The kernels


def default_config(tokens: int, experts: int, fp8: bool) -> dict[str, int]:
    """The tiles that SGLang takes where it has no tuned ones (get_default_config)."""
    if fp8:
        tiles = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": BLOCK, "BLOCK_SIZE_K": BLOCK, "GROUP_SIZE_M": 32}
        return {**tiles, "num_warps": 4, "num_stages": 3}
    if tokens <= experts:
        return {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}


def run_fused_moe(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The rows are sorted by expert first, in blocks of the kernel's tiles."""
    import triton.language as tl
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    axes, ids, scales = definition.const_axes, inputs["topk_ids"], inputs.get("weights_scale")
    fp8 = scales is not None
    config: dict[str, Any] = default_config(len(ids), axes["num_experts"], fp8)
    sorted_ids, expert_ids, padded = moe_align_block_size(ids, config["BLOCK_SIZE_M"], axes["num_experts"])
    rows: torch.Tensor = inputs["hidden_states"].flatten(0, 1)
    invoke_fused_moe_kernel(
        A=rows,
        B=inputs["weights"],
        bias=None,
        C=outputs["output"],
        A_scale=None,
        B_scale=scales,
        B_zp=None,
        topk_weights=inputs["topk_weights"],
        topk_ids=ids,
        sorted_token_ids=sorted_ids,
        expert_ids=expert_ids,
        num_tokens_post_padded=padded,
        mul_routed_weight=bool(inputs["mul_routed_weight"]),
        top_k=axes["top_k"] // axes["rows_per_token"],
        config=config,
        compute_type=tl.bfloat16,
        use_fp8_w8a8=fp8,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
        block_shape=[BLOCK, BLOCK] if fp8 else None,
        filter_expert=True,
    )
    return outputs


BF16 = Kernel(f"{TRITON_MODULE}.fused_moe_kernel", run_fused_moe, limits=LAUNCHABLE)
FP8 = Kernel(
    f"{TRITON_MODULE}.fused_moe_kernel",
    run_fused_moe,
    variant="fp8 blocks",
    limits=LAUNCHABLE,
    compare={"output": TRUNCATED},
)


TWIN = {"num_experts": 11}
FAMILIES = (
    Family(
        name="moe_bf16_expert_gemm",
        op_type="moe",
        twin={**TWIN, "n": 24, "k": 80},
        plan=PLAN,
        make_inputs=bf16_inputs,
        strided=("hidden_states",),
        isolated=("hidden_states",),
        oracle=bf16_oracle,
        compare={"output": PRODUCT},
        kernels=(BF16,),
    ),
    Family(
        name="moe_fp8_block_scale_expert_gemm",
        op_type="moe",
        twin={**TWIN, "n": 256, "k": 384, "num_n_blocks": 2, "num_k_blocks": 3},
        plan=FP8_PLAN,
        make_inputs=fp8_inputs,
        isolated=("hidden_states",),  # its quantizer takes dense rows
        oracle=fp8_oracle,
        compare={"output": QUANTIZED},
        kernels=(FP8,),
    ),
)
