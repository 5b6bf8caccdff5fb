"""One product of the experts that tokens chose, with 4-bit weights: Marlin's kernel (see `gemm.marlin`).

It rounds a sum to bf16 before it multiplies by the routing weight, which it rounds to bf16 as well.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm.marlin import dequantized, group_scales, packed_numbers
from flashinfer_trace.families.moe.expert_gemm import PLAN, PRODUCT, expected_output, routed_inputs
from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error

#: Rows of a block. Like SGLang, the adapter takes the first number that gives an expert less than a block on average.
BLOCKS = (8, 16, 32, 48, 64)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    known = routed_inputs(definition, plan, draws)
    known["qweight"] = packed_numbers(draws, [axes["num_experts"], axes["k_packed"], axes["n"]])
    shape = [axes["num_experts"], axes["num_groups"], axes["n"]]
    known["scales"] = group_scales(draws, shape, axes["k"], plan["values"])
    return {name: known[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Part ``shift``: by how much rounding the weights to bf16 moves a result. Integers have scales that are powers of
    two: no weight is rounded, and sums of eighths are exact."""
    qweight, scales = inputs["qweight"], inputs["scales"]
    rows = inputs["hidden_states"].flatten(0, 1).double()

    def weights(expert: int) -> torch.Tensor:
        return dequantized(qweight[expert], scales[expert]).T

    def moved(expert: int) -> torch.Tensor:
        own = weights(expert)
        return own.to(torch.bfloat16).double() - own

    shift = expected_output(definition, inputs, rows, moved)["output"].value.abs()
    eighths = rows.numel() > 0 and bool((rows == rows.round()).all()) and not shift.any()
    powers = bool((torch.frexp(inputs["topk_weights"]).mantissa == 0.5).all())
    scaled = bool((torch.frexp(scales.float()).mantissa == 0.5).all())
    small = float(rows.abs().max()) * 8 * rows.shape[1] < 2**20 if eighths else False
    exact = eighths and small and scaled and (powers or not inputs["mul_routed_weight"])
    found = expected_output(definition, inputs, rows, weights, exact=exact)["output"]
    roundings = torch.tensor(3.0 if inputs["mul_routed_weight"] else 1.0)
    return {"output": Expected(found.value, {**found.parts, "shift": shift, "roundings": roundings}, exact)}


def marlin_error(expected: Expected) -> torch.Tensor:
    parts = expected.parts
    off = PRODUCT.bound(expected) - rounding_error(expected.value, torch.bfloat16) + parts["shift"] * (1 + 2**-7)
    once = rounding_error(expected.value.abs() + off, torch.bfloat16)
    return (off + parts["roundings"] * once) * (1 + 2**-6)


MARLIN = ErrorBound(
    marlin_error,
    f"{PRODUCT.reason}; weights are rounded to bf16, which moves a result by rows times what each is rounded by; two "
    "roundings to bf16 more with a routing weight",
)


def run_marlin(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it, after it has reordered weights and scales: experts of other ranks come first, as id -1."""
    from sgl_kernel.scalar_type import scalar_types
    from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace, marlin_permute_scales

    axes, ids = definition.const_axes, inputs["topk_ids"]
    n, k, experts = axes["n"], axes["k"], axes["num_experts"]
    rows = inputs["hidden_states"].flatten(0, 1).contiguous()
    order = torch.empty(0, dtype=torch.int32, device=rows.device)
    weights = torch.stack([gptq_marlin_repack(each, order, k, n, 4) for each in inputs["qweight"]])
    scales = torch.stack([marlin_permute_scales(each, k, n, axes["group_size"]) for each in inputs["scales"]])
    block = next((size for size in BLOCKS if ids.numel() / experts / size < 0.9), BLOCKS[-1])
    sorted_ids, expert_ids, padded = moe_align_block_size(ids, block, experts)
    result = moe_wna16_marlin_gemm(
        rows,
        None,
        weights,
        None,
        scales,
        None,
        None,
        None,
        None,
        marlin_make_workspace(rows.device, 4),
        sorted_ids,
        expert_ids,
        padded,
        inputs["topk_weights"],
        moe_block_size=block,
        top_k=axes["top_k"] // axes["rows_per_token"],
        mul_topk_weights=bool(inputs["mul_routed_weight"]),
        is_ep=False,
        b_q_type=scalar_types.uint4b8,
        size_m=len(rows),
        size_n=n,
        size_k=k,
        use_fp32_reduce=True,
        expert_ids_are_sorted=True,
        zero_inactive_output=True,
    )
    return {"output": result.view(*ids.shape, n)}


FAMILIES = (
    Family(
        name="moe_wna16_expert_gemm",
        op_type="moe",
        twin={"num_experts": 11, "n": 24, "k": 64, "k_packed": 8, "group_size": 16, "num_groups": 4},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": PRODUCT},
        strided=("hidden_states",),
        isolated=("hidden_states",),
        kernels=(
            Kernel(
                "sglang.kernels.ops.moe.moe_wna16_marlin.moe_wna16_marlin_gemm",
                run_marlin,
                limits=LAUNCHABLE,
                compare={"output": MARLIN},
            ),
        ),
    ),
)
