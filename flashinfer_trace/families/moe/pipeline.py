"""The experts as sgl-kernel computes them on Hopper, in the order of SGLang's cutlass_fused_experts_fp8.

Rows are sorted by expert, multiplied group by group, put through silu_and_mul, multiplied again and summed by token.
The gate is the second half of gemm1's output here, but the first half of silu_and_mul's input, so halves are swapped.

Ids of experts on other ranks become -1, which prepare_moe_input skips. It does not write their slots in the
permutations, so these are filled beforehand: slots of inputs with token 0, whose rows belong to no expert; slots of
outputs with the last row, which is written only if every id is local. Their factors are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs

WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Order:
    """Which rows each local expert computes.

    Attributes:
        sizes1, sizes2: (rows, columns out, columns in) of each expert's two products, int32 [experts, 3].
        offsets: first row of each expert, and the end of the last, int32 [experts + 1].
        to_expert: the token of each row, int32 [tokens * top_k]; rows after those of the last expert have token 0.
    """

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
    import sgl_kernel

    axes = definition.const_axes
    experts, rows = axes["num_local_experts"], ids.numel()
    local = ids - int(inputs["local_expert_offset"])
    here = (local >= 0) & (local < experts)
    local = torch.where(here, local, -1).to(torch.int32)
    factors = torch.where(here, weights, 0.0).to(torch.bfloat16)

    def new(shape: tuple[int, ...], fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=ids.device)

    order = Order(new((experts, 3)), new((experts, 3)), new((experts + 1,)), new((rows,)))
    to_token = new((rows,), rows - 1)
    sgl_kernel.prepare_moe_input(
        local,
        order.offsets,
        order.sizes1,
        order.sizes2,
        order.to_expert,
        to_token,
        experts,
        axes["intermediate_size"],
        axes["hidden_size"],
    )
    sgl_kernel.apply_shuffle_mul_sum(products(inputs, order), outputs["output"], to_token, factors)
    return outputs


def activated(up_gate: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows [up, gate]."""
    import sgl_kernel

    result: torch.Tensor = sgl_kernel.silu_and_mul(up_gate.roll(up_gate.shape[1] // 2, dims=1))
    return result


def fp8_products(inputs: Inputs, order: Order) -> torch.Tensor:
    """Both products by sgl_kernel.fp8_blockwise_scaled_grouped_mm; the activation is quantized between them."""
    import sgl_kernel

    hidden, rows = inputs["hidden_states"], len(order.to_expert)
    device, experts = hidden.device, len(order.sizes1)

    def filled(shape: tuple[int, ...], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    pointers = [filled((experts,), torch.int64) for _ in range(5)]
    layouts = [filled((experts, 5), torch.int32) for _ in range(2)]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def grouped_product(a: torch.Tensor, a_scales: torch.Tensor, name: str, shapes: torch.Tensor) -> torch.Tensor:
        w, w_scales = inputs[f"{name}_weights"], inputs[f"{name}_weights_scale"]
        product = torch.zeros(rows, w.shape[1], dtype=torch.bfloat16, device=device)
        stride_in = filled((experts,), torch.int64, w.shape[2])
        stride_out = filled((experts,), torch.int64, w.shape[1])
        sgl_kernel.fp8_blockwise_scaled_grouped_mm(
            product,
            *pointers,
            a,
            w.transpose(1, 2),
            a_scales,
            w_scales.transpose(1, 2),
            stride_in,
            stride_in,
            stride_out,
            *layouts,
            shapes,
            order.offsets[:-1],
            workspace,
        )
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
