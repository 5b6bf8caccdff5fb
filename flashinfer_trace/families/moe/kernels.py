"""Shared by the kernels of all routings: bounds, limits, records, sgl-kernel's pipeline, and the call of trtllm-gen.

trtllm-gen's single call runs on Blackwell. The pipeline computes the experts on Hopper, in the order of SGLang's
cutlass_fused_experts_fp8. Rows are sorted by expert, multiplied group by group, put through silu_and_mul, multiplied
again and summed by token. The gate is the second half of gemm1's output here, but the first half of silu_and_mul's
input, so halves are swapped.

Ids of experts on other ranks become -1, which prepare_moe_input skips. It does not write their slots in the
permutations, so these are filled beforehand: slots of inputs with token 0, whose rows belong to no expert; slots of
outputs with the last row, which is written only if every id is local. Their factors are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.families.calls import called
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Expected, host_figures, rounding_error

#: A case fits only one scale, but judges up to millions of elements: 2 exp(-5^2 / 2) is 7e-6, 2 exp(-8^2 / 2) is 3e-14.
GAIN_CONFIDENCE = 5.0
#: Dropped bits shrink a sum of products coherently: by half a unit of 2^-13 for each of at most sqrt(128) + 4 times the
#: size of the sum, which is below 2^-10 per product; up, gate and down contribute this much each.
TRUNCATION_GAIN = 3 * 2.0**-10


def bound(model: str, reason: str, shrink: float | None = None, rounds_alike: bool = False) -> ErrorBound:
    """The policy of one of the oracle's error models. With `shrink`, the scale of the whole output is judged as well,
    and dropped bits may shrink it by this; `rounds_alike`: tokens may have the same weight, or only one expert."""

    def elements(expected: Expected) -> torch.Tensor:
        inside = CONFIDENCE * expected.parts[f"{model}_variance"].sqrt()
        return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-7) + inside

    def gain(expected: Expected) -> float:
        shift, variance = host_figures(expected.parts["rounding_shift"], expected.parts[f"{model}_gain"])
        alike = abs(shift) if rounds_alike else 0.0
        return (shrink or 0.0) + alike + GAIN_CONFIDENCE * math.sqrt(variance)

    return ErrorBound(elements, reason, gain=None if shrink is None else gain)


REFERENCE = bound(
    "float32",
    "one bf16 rounding, u = 2^-8, and 8 standard deviations of float32 sums of n terms, n u sqrt(sum of squares) each, "
    "carried through silu and W2",
)
HOPPER = bound(
    "hopper",
    "8 standard deviations of what the pipeline rounds: gemm1, silu * up, results and weights to bf16, the activation "
    "to e4m3 in groups of 128, and fp8 sums to 13 bits; for the scale of all elements, 5 standard deviations and "
    "3 * 2^-10 for dropped bits",
    TRUNCATION_GAIN,
)
BLACKWELL = bound(
    "blackwell",
    "8 standard deviations of what trtllm-gen rounds: gemm1's output and the activation to e4m3 in groups of 128, "
    "and results to bf16; for the scale of all elements, 5 standard deviations and 3 * 2^-10 for dropped bits",
    TRUNCATION_GAIN,
)

GROUPED_PRODUCT = "sgl_kernel.fp8_blockwise_scaled_grouped_mm"
TRTLLM_FP8 = "flashinfer.fused_moe.trtllm_fp8_block_scale_moe"
#: No kernel can be launched for zero tokens, because an empty grid is an error in CUDA.
LAUNCHABLE = {"seq_len": (1, 8192)}


def experts_kernel(
    path: str, call: KernelCall, policy: ErrorBound, variant: str = "", options: object | None = None
) -> Kernel:
    """A single call, or a pipeline of kernels around the grouped product at `path`: `variant` names the others."""
    return Kernel(path, call, variant, limits=LAUNCHABLE, plan_options=options, compare={"output": policy})


#: The arguments from a Definition for flashinfer's single calls of trtllm-gen, and for those of DeepSeek's routing.
TRTLLM = (
    "routing_logits= routing_bias=|None hidden_states= hidden_states_scale= num_experts= top_k= intermediate_size= "
    "local_expert_offset= local_num_experts=num_local_experts"
)
DEEPSEEK = "n_group= topk_group= routed_scaling_factor="


def trtllm_gen(text: str, method: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """flashinfer's single call for fp8; weights are neither shuffled nor blocked, but passed as in the Definition."""
    from flashinfer.fused_moe import Fp8QuantizationType, RoutingMethodType

    weights = " ".join(f"{name}= {name}_scale=" for name in ("gemm1_weights", "gemm2_weights"))
    plain = "use_shuffled_weight=False weight_layout=0 routing_method_type=method fp8_quantization_type=kind"
    chosen = {"method": getattr(RoutingMethodType, method).value, "kind": Fp8QuantizationType.DeepSeekFp8}
    return {"output": called(TRTLLM_FP8, f"{TRTLLM} {weights} {text} {plain}", definition, {**inputs, **chosen})}


WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Order:
    """Which rows each local expert computes, int32: (rows, columns out, columns in) of its two products [experts, 3];
    its first row, and the end of the last [experts + 1]; the token of each row [tokens * top_k], 0 for those of
    nobody."""

    sizes1: torch.Tensor
    sizes2: torch.Tensor
    offsets: torch.Tensor
    to_expert: torch.Tensor


#: (inputs, order) -> the result of each row, bfloat16 [tokens * top_k, hidden_size]; finite in rows of no expert.
Products = Callable[[Inputs, Order], torch.Tensor]


def run_experts(
    definition: Definition,
    inputs: Inputs,
    outputs: Outputs,
    weights: torch.Tensor,
    ids: torch.Tensor,
    products: Products,
) -> Outputs:
    """Computes the experts that a kernel chose: weights float32 and ids int32, both [tokens, top_k]."""
    experts, rows = definition.const_axes["num_local_experts"], ids.numel()
    local = ids - int(inputs["local_expert_offset"])
    here = (local >= 0) & (local < experts)
    factors = torch.where(here, weights, 0.0).to(torch.bfloat16)

    def new(shape: tuple[int, ...], fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=ids.device)

    order = Order(new((experts, 3)), new((experts, 3)), new((experts + 1,)), new((rows,)))
    given = {"local": torch.where(here, local, -1).to(torch.int32), "to_token": new((rows,), rows - 1), **vars(order)}
    text = "local offsets sizes1 sizes2 to_expert to_token num_local_experts intermediate_size hidden_size"
    called("sgl_kernel.prepare_moe_input", text, definition, given)
    given |= {"rows": products(inputs, order), "factors": factors}
    called("sgl_kernel.apply_shuffle_mul_sum", "rows output to_token factors", definition, {**outputs, **given})
    return outputs


def activated(up_gate: torch.Tensor) -> torch.Tensor:
    import sgl_kernel

    result: torch.Tensor = sgl_kernel.silu_and_mul(up_gate.roll(up_gate.shape[1] // 2, dims=1))
    return result


def filled(count: int, value: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int64, device=device)


def workspaces(experts: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The tensors that sgl_kernel's grouped products fill themselves: pointers, layouts, and a workspace."""
    pointers = [filled(experts, 0, device) for _ in range(5)]
    layouts = [torch.zeros(experts, 5, dtype=torch.int32, device=device) for _ in range(2)]
    return pointers, layouts, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def fp8_products(inputs: Inputs, order: Order) -> torch.Tensor:
    """Both products by sgl_kernel.fp8_blockwise_scaled_grouped_mm; the activation is quantized between them."""
    import sgl_kernel

    hidden, rows = inputs["hidden_states"], len(order.to_expert)
    device, experts = hidden.device, len(order.sizes1)
    common = workspaces(experts, device)

    def grouped_product(a: torch.Tensor, a_scales: torch.Tensor, name: str, shapes: torch.Tensor) -> torch.Tensor:
        w, w_scales = inputs[f"{name}_weights"], inputs[f"{name}_weights_scale"]
        product = torch.zeros(rows, w.shape[1], dtype=torch.bfloat16, device=device)
        stride_in, stride_out = (filled(experts, w.shape[axis], device) for axis in (2, 1))
        strides = (stride_in, stride_in, stride_out)
        pointers, layouts, workspace = common
        operands = (a, w.transpose(1, 2), a_scales, w_scales.transpose(1, 2))
        where = (shapes, order.offsets[:-1], workspace)
        sgl_kernel.fp8_blockwise_scaled_grouped_mm(product, *pointers, *operands, *strides, *layouts, *where)
        return product

    a = sgl_kernel.shuffle_rows(hidden, order.to_expert, (rows, hidden.shape[1]))
    token_scales = inputs["hidden_states_scale"].T.contiguous()
    a_scales = sgl_kernel.shuffle_rows(token_scales, order.to_expert, (rows, token_scales.shape[1]))
    activation = activated(grouped_product(a, a_scales, "gemm1", order.sizes1))
    codes = torch.empty_like(activation, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, activation.shape[1] // 128, dtype=torch.float32, device=device)
    sgl_kernel.sgl_per_token_group_quant_fp8(activation, codes, scales, 128, 1e-10, -448.0, 448.0, enable_v2=True)
    return grouped_product(codes, scales, "gemm2", order.sizes2)


def bf16_products(inputs: Inputs, order: Order) -> torch.Tensor:
    """Both products by torch.nn.functional.grouped_mm, which leaves rows after the last group unwritten."""
    import sgl_kernel

    rows = len(order.to_expert)
    ends = order.offsets[1:].contiguous()
    nobody = torch.arange(rows, device=ends.device) >= ends[-1]

    def grouped_product(a: torch.Tensor, name: str) -> torch.Tensor:
        product = torch.nn.functional.grouped_mm(a, inputs[f"{name}_weights"].transpose(1, 2), offs=ends)
        return product.masked_fill_(nobody.unsqueeze(1), 0)

    a = sgl_kernel.shuffle_rows(inputs["hidden_states"], order.to_expert, (rows, inputs["hidden_states"].shape[1]))
    return grouped_product(activated(grouped_product(a, "gemm1")), "gemm2")
