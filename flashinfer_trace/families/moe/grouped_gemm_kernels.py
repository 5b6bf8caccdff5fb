"""The kernels of grouped products: CUTLASS in sgl-kernel, and DeepGEMM."""

from __future__ import annotations

import torch

from flashinfer_trace.families.moe.pipeline import WORKSPACE_BYTES
from flashinfer_trace.families.moe.products import TRUNCATED
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs

#: An empty product has no launch.
ROWS = {"total_rows": (1, 65536)}
#: Rows of one tile of DeepGEMM's contiguous layout: each expert's rows are padded to a multiple of it.
DEEP_GEMM_ROWS = 128


def filled(count: int, value: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int64, device=device)


def problem_sizes(inputs: Inputs, columns: int, depth: int, transposed: bool = False) -> torch.Tensor:
    """int32 [num_experts, 3]: rows, columns out and columns in; columns out first for the transposed product."""
    rows = inputs["expert_offsets"].diff()
    sizes = [rows, torch.full_like(rows, columns), torch.full_like(rows, depth)]
    return torch.stack([sizes[1], sizes[0], sizes[2]] if transposed else sizes, dim=1).contiguous()


def run_fp8(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The kernel fills pointers and layouts itself; weights and their scales are passed as transposed views."""
    import sgl_kernel

    experts, n, k = inputs["b"].shape
    device = inputs["a"].device
    layouts = [torch.zeros(experts, 5, dtype=torch.int32, device=device) for _ in range(2)]
    sgl_kernel.fp8_blockwise_scaled_grouped_mm(
        outputs["output"],
        *[filled(experts, 0, device) for _ in range(5)],
        inputs["a"],
        inputs["b"].transpose(1, 2),
        inputs["a_scale"],
        inputs["b_scale"].transpose(1, 2),
        filled(experts, k, device),
        filled(experts, k, device),
        filled(experts, n, device),
        *layouts,
        problem_sizes(inputs, n, k),
        inputs["expert_offsets"][:-1],
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
    )
    return outputs


def run_expert_specialized(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    experts, n, k = inputs["b"].shape
    device = inputs["a"].device
    sgl_kernel.es_fp8_blockwise_scaled_grouped_mm(
        outputs["output"],
        inputs["a"],
        inputs["b"].transpose(1, 2),
        inputs["a_scale"],
        inputs["b_scale"].transpose(1, 2),
        filled(experts, k, device),
        filled(experts, k, device),
        filled(experts, n, device),
        problem_sizes(inputs, n, k),
        inputs["expert_offsets"][:-1],
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
    )
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


def run_w4a8(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Scales are interleaved by 4 blocks where k has a multiple of these, as SGLang prepares them."""
    import sgl_kernel

    axes, scales = definition.const_axes, inputs["b_scale"]
    experts, n, blocks = scales.shape
    together = 4 if blocks % 4 == 0 else 1
    interleaved = scales.view(experts, n, blocks // together, together).permute(0, 2, 1, 3).contiguous()
    device, k = scales.device, axes["k"]
    stride_in = torch.full((experts, 3), k, dtype=torch.int64, device=device)
    stride_out = torch.full((experts, 3), n, dtype=torch.int64, device=device)
    sgl_kernel.cutlass_w4a8_moe_mm(
        outputs["output"],
        inputs["a"],
        inputs["b"],
        inputs["a_scale"],
        interleaved.view(experts, blocks // together, n * together),
        inputs["expert_offsets"][:-1],
        problem_sizes(inputs, n, k, transposed=True),
        stride_in,
        stride_in,
        stride_out,
        stride_out,
        128,
        8,
    )
    return outputs


def hopper(path: str, call: KernelCall) -> Kernel:
    """A kernel that Hopper's tensor cores run."""
    return Kernel(path, call, limits=ROWS, compare={"output": TRUNCATED})


FP8 = (
    hopper("sgl_kernel.fp8_blockwise_scaled_grouped_mm", run_fp8),
    hopper("sgl_kernel.es_fp8_blockwise_scaled_grouped_mm", run_expert_specialized),
    hopper("deep_gemm.m_grouped_fp8_gemm_nt_contiguous", run_contiguous),
    hopper("deep_gemm.fp8_m_grouped_gemm_nt_masked", run_masked),
)
W4A8 = (hopper("sgl_kernel.cutlass_w4a8_moe_mm", run_w4a8),)
