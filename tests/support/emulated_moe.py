"""The kernels of single steps of a mixture of experts, emulated in torch on a CPU, with the real ones' signatures.

They check what the real ones require of their arguments, write only what these write, and reverse every order that
atomics leave open. sgl_kernel, deep_gemm, flashinfer, triton and sglang are stood in for by `modules`.
"""

from __future__ import annotations

import math
from types import ModuleType

import emulated_nvfp4
import torch
from emulated_nvfp4 import rows_of

from flashinfer_trace.families.quantized import dequantized, quantize_groups

INT32, FLOAT32 = torch.int32, torch.float32


def sigmoid_route(scores, choice, groups, kept, top_k):
    """The ids and scores of chosen experts, best first."""
    if groups > 1:
        inside = choice.view(len(choice), groups, -1)
        best = inside.topk(2, dim=2).values.sum(2).argsort(dim=1, descending=True, stable=True)[:, :kept]
        dropped = torch.ones(len(choice), groups, dtype=torch.bool).scatter(1, best, False)
        choice = inside.masked_fill(dropped.unsqueeze(2), -math.inf).flatten(1)
    ids = choice.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    return ids, scores.gather(1, ids)


def moe_fused_gate(
    input_tensor, bias, num_expert_group, topk_group, topk, num_fused_shared_experts=0, routed_scaling_factor=0,
    apply_routed_scaling_factor_on_output=False,
):  # fmt: skip
    assert input_tensor.dtype == bias.dtype == FLOAT32
    scores = torch.sigmoid(input_tensor)
    routed = topk - num_fused_shared_experts
    ids, chosen = sigmoid_route(scores, scores + bias, num_expert_group, topk_group, routed)
    total = chosen.sum(1, keepdim=True)
    shared = torch.arange(num_fused_shared_experts) + input_tensor.shape[1]
    ids = torch.cat([ids, shared.expand(len(ids), -1)], dim=1)
    own = (total / routed_scaling_factor).expand(len(ids), num_fused_shared_experts)
    weights = torch.cat([chosen, own], dim=1) / total
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    return weights, ids.to(INT32)


def sglang_moe_fused_gate(
    scores, bias, topk, scoring_func="sigmoid", num_fused_shared_experts=0, renormalize=True, routed_scaling_factor=1.0,
    apply_routed_scaling_factor_on_output=False, moe_softcapping=0.0, num_expert_group=1, topk_group=1,
):  # fmt: skip
    """SGLang's Triton router: shared experts have their weight whatever the others have."""
    assert (scoring_func, renormalize, moe_softcapping) == ("sigmoid", True, 0.0)
    sigmoid, routed = torch.sigmoid(scores), topk - num_fused_shared_experts
    ids, chosen = sigmoid_route(sigmoid, sigmoid + bias.float(), num_expert_group, topk_group, routed)
    factor = routed_scaling_factor if apply_routed_scaling_factor_on_output else 1.0
    shared = (torch.arange(num_fused_shared_experts) + scores.shape[1]).expand(len(ids), -1)
    own = torch.full(shared.shape, factor / routed_scaling_factor)
    weights = torch.cat([chosen / chosen.sum(1, keepdim=True) * factor, own], dim=1)
    return weights, torch.cat([ids, shared], dim=1).to(INT32)


def route_radix(scores, bias, top_k, renormalize, factor, on_output, sorted):
    """One group; SGLang lists the choices best first if it is told to."""
    assert sorted
    return sglang_moe_fused_gate(scores, bias, top_k, "sigmoid", 0, renormalize, factor, on_output)


def fused_topk_deepseek(
    scores, bias, n_group, topk_group, topk, routed_scaling_factor, topk_values, topk_indices, launch_with_pdl=True,
):  # fmt: skip
    assert (topk_values.dtype, topk_indices.dtype) == (FLOAT32, INT32)
    sigmoid = 0.5 * torch.tanh(0.5 * scores) + 0.5
    ids, chosen = sigmoid_route(sigmoid, sigmoid + bias, n_group, topk_group, topk)
    topk_values.copy_(chosen * routed_scaling_factor / (chosen.sum(1, keepdim=True) + 1e-20))
    topk_indices.copy_(ids)


def grouped_topk(scores, bias, num_expert_group, topk_group, topk, renormalize, scaling_factor):
    assert (num_expert_group, topk_group, renormalize) == (1, 1, True)
    assert scores.dtype == bias.dtype == FLOAT32
    sigmoid = torch.sigmoid(scores)
    choice = sigmoid + bias
    assert len(choice) == 0 or (choice.amax(dim=1) >= 0).all(), "the kernel orders negative numbers by magnitude"
    ids, chosen = sigmoid_route(sigmoid, choice, 1, 1, topk)
    return chosen * scaling_factor / (chosen.sum(1, keepdim=True) + 1e-20), ids.to(INT32)


def kimi_k2_moe_fused_gate(
    input_tensor, bias, topk, renormalize, routed_scaling_factor, apply_routed_scaling_factor_on_output
):
    assert renormalize and apply_routed_scaling_factor_on_output and input_tensor.dtype == FLOAT32
    sigmoid = torch.sigmoid(input_tensor)
    ids, chosen = sigmoid_route(sigmoid, sigmoid + bias.float(), 1, 1, topk)
    return chosen / chosen.sum(1, keepdim=True) * routed_scaling_factor, ids.to(INT32)


def topk_sigmoid(topk_weights, topk_ids, gating_output, renormalize=False, correction_bias=None):
    assert (topk_weights.dtype, topk_ids.dtype, correction_bias.dtype) == (FLOAT32, INT32, FLOAT32)
    choice = torch.sigmoid(gating_output) + correction_bias
    ids, _ = sigmoid_route(choice, choice, 1, 1, topk_ids.shape[1])
    chosen = choice.gather(1, ids) - correction_bias[ids]
    topk_weights.copy_(chosen / chosen.sum(1, keepdim=True) if renormalize else chosen)
    topk_ids.copy_(ids)


def moe_align_block_size(
    topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, cumsum_buffer,
    pad_sorted_token_ids=False,
):  # fmt: skip
    assert all(each.dtype == INT32 for each in (topk_ids, sorted_token_ids, experts_ids, num_tokens_post_pad))
    assert cumsum_buffer.shape == (num_experts + 1,)
    if pad_sorted_token_ids:
        sorted_token_ids.fill_(topk_ids.numel())
    row = 0
    for part in range(num_experts):
        pairs = (topk_ids.flatten() == part - 1).nonzero().flatten().flip(0)
        sorted_token_ids[row : row + len(pairs)] = pairs.to(INT32)
        blocks = -(-len(pairs) // block_size)
        experts_ids[row // block_size : row // block_size + blocks] = part - 1
        row += blocks * block_size
    num_tokens_post_pad.fill_(row)


def moe_align_small_numel(
    topk_ids, num_experts, block_size, sorted_token_ids, expert_ids, num_tokens_post_pad, *,
    write_inactive_prefix_count=False,
):  # fmt: skip
    """It writes no padding after the last part."""
    padded = sorted_token_ids.clone()
    cumsum = torch.empty(num_experts + 1, dtype=INT32)
    moe_align_block_size(
        topk_ids, num_experts, block_size, padded, expert_ids, num_tokens_post_pad, cumsum, pad_sorted_token_ids=True
    )
    count = int(num_tokens_post_pad)
    sorted_token_ids[:count] = padded[:count]


def prepare_moe_input(
    topk_ids, expert_offsets, problem_sizes1, problem_sizes2, input_permutation, output_permutation, num_experts, n, k,
    blockscale_offsets=None,
):  # fmt: skip
    row = scale_row = 0
    for expert in range(num_experts):
        pairs = (topk_ids.flatten() == expert).nonzero().flatten().flip(0)
        count = len(pairs)
        expert_offsets[expert], blockscale_offsets[expert] = row, scale_row
        problem_sizes1[expert] = torch.tensor([count, 2 * n, k])
        problem_sizes2[expert] = torch.tensor([count, k, n])
        input_permutation[row : row + count] = (pairs // topk_ids.shape[1]).to(INT32)
        output_permutation[pairs] = torch.arange(row, row + count, dtype=INT32)
        row, scale_row = row + count, scale_row + -(-count // 128) * 128
    expert_offsets[num_experts], blockscale_offsets[num_experts] = row, scale_row


def get_cutlass_w4a8_moe_mm_data(
    topk_ids, expert_offsets, problem_sizes1, problem_sizes2, input_permutation, output_permutation, num_experts, n, k,
):  # fmt: skip
    assert topk_ids.dtype == INT32
    counts = torch.tensor([int((topk_ids == expert).sum()) for expert in range(num_experts)])
    expert_offsets.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    for expert, count in enumerate(counts.tolist()):
        problem_sizes1[expert] = torch.tensor([2 * n, count, k])
        problem_sizes2[expert] = torch.tensor([k, count, n])


def moe_sum_reduce(input_tensor, output_tensor, routed_scaling_factor=0):
    assert input_tensor.is_contiguous()
    total = torch.zeros(output_tensor.shape)
    for row in input_tensor.unbind(1):
        total += row.float()
    output_tensor.copy_(total * routed_scaling_factor)


def shuffle_rows(input_tensor, dst2src_map, output_tensor_shape):
    assert dst2src_map.dtype == INT32
    assert input_tensor.shape[1] * input_tensor.element_size() % 16 == 0
    copied = input_tensor.view(torch.uint8)[dst2src_map.long()].view(input_tensor.dtype)
    return copied.reshape(output_tensor_shape)


def apply_shuffle_mul_sum(input, output, permutation, factors):
    assert factors.dtype == output.dtype
    assert permutation.ndim == 1
    assert permutation.dtype == INT32
    total = torch.zeros(output.shape)
    for place, factor in zip(permutation.view(len(output), -1).T, factors.view(len(output), -1).T, strict=True):
        total += input[place.long()].float() * factor.float().unsqueeze(1)
    output.copy_(total)


def scaled_rows(a, scales):
    return a.float() * scales.repeat_interleave(128, dim=-1)


def es_fp8_blockwise_scaled_grouped_mm(
    output, a, b, scales_a, scales_b, stride_a, stride_b, stride_d, problem_sizes, expert_offsets, workspace
):
    experts, k, n = b.shape
    assert b.stride() == (k * n, 1, k)
    assert scales_b.stride(1) == 1
    assert scales_a.is_contiguous()
    assert (stride_a == k).all() and (stride_b == k).all() and (stride_d == n).all()
    assert len(stride_a) == len(expert_offsets) == experts
    assert (problem_sizes[:, 1:] == torch.tensor([n, k])).all()
    assert workspace.dtype == torch.uint8
    for expert, part in rows_of(expert_offsets, problem_sizes, 0):
        weights = dequantized(b[expert].T, scales_b[expert].T, FLOAT32)
        output[part] = (scaled_rows(a[part], scales_a[part]) @ weights.T).to(output.dtype)


def fp8_blockwise_scaled_grouped_mm(
    output, a_ptrs, b_ptrs, out_ptrs, a_scales_ptrs, b_scales_ptrs, a, b, scales_a, scales_b, stride_a, stride_b,
    stride_c, layout_sfa, layout_sfb, problem_sizes, expert_offsets, workspace,
):  # fmt: skip
    assert all(each.dtype == torch.int64 for each in (a_ptrs, b_ptrs, out_ptrs, a_scales_ptrs, b_scales_ptrs))
    assert layout_sfa.shape == layout_sfb.shape == (len(b), 5)
    es_fp8_blockwise_scaled_grouped_mm(
        output, a, b, scales_a, scales_b, stride_a, stride_b, stride_c, problem_sizes, expert_offsets, workspace
    )


def cutlass_w4a8_moe_mm(
    d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides,
    chunk_size=128, topk=8,
):  # fmt: skip
    experts, n, k = b.shape[0], b.shape[1], 2 * b.shape[2]
    together = 4 if k % 512 == 0 else 1
    assert b_scales.shape == (experts, k // 128 // together, n * together)
    assert a_strides.shape == (experts, 3)
    assert (a_strides == k).all() and (b_strides == k).all() and (d_strides == n).all() and (s_strides == n).all()
    for expert, part in rows_of(experts_offsets, problem_sizes, 1):
        low, high = b[expert].int() & 15, (b[expert].int() >> 4) & 15
        codes = torch.stack([low, high], dim=2).flatten(1)
        codes = torch.where(codes > 7, codes - 16, codes).float()
        scales = b_scales[expert].view(-1, n, together).transpose(0, 1).flatten(1).float()
        weights = codes * scales.repeat_interleave(128, dim=1)
        d[part] = (a[part].float() @ weights.T * a_scales).to(d.dtype)


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices):
    assert m_indices.dtype == INT32
    assert len(m_indices) % 128 == 0
    for tile in range(0, len(m_indices), 128):
        part = slice(tile, tile + 128)
        expert = int(m_indices[tile])
        assert (m_indices[part] == expert).all()
        d[part] = (scaled_rows(a[0][part], a[1][part]) @ dequantized(b[0][expert], b[1][expert], FLOAT32).T).to(d.dtype)


def fp8_m_grouped_gemm_nt_masked(a, b, d, masked_m, expected_m):
    assert masked_m.dtype == INT32
    assert expected_m > 0
    for expert, count in enumerate(masked_m.tolist()):
        x = scaled_rows(a[0][expert, :count], a[1][expert, :count])
        d[expert, :count] = (x @ dequantized(b[0][expert], b[1][expert], FLOAT32).T).to(d.dtype)


def sglang_moe_align_block_size(topk_ids, block_size, num_experts):
    """SGLang's wrapper: sorted_token_ids, expert_ids, num_tokens_post_pad."""
    pairs = topk_ids.numel()
    length = pairs * block_size if pairs < num_experts + 1 else pairs + (num_experts + 1) * (block_size - 1)
    sorted_ids, experts = torch.empty(length, dtype=INT32), torch.empty(-(-length // block_size), dtype=INT32)
    count = torch.empty(1, dtype=INT32)
    cumsum = torch.empty(num_experts + 2, dtype=INT32)
    moe_align_block_size(topk_ids, num_experts + 1, block_size, sorted_ids, experts, count, cumsum, True)
    return sorted_ids, experts, count


def invoke_fused_moe_kernel(
    A, B, bias, C, A_scale, B_scale, B_zp, topk_weights, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_padded,
    mul_routed_weight, top_k, config, compute_type, use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16,
    per_channel_quant, block_shape=None, filter_expert=True,
):  # fmt: skip
    assert A.is_contiguous()
    assert not (bias or A_scale or B_zp or use_int8_w8a8 or use_int8_w8a16 or use_int4_w4a16 or per_channel_quant)
    assert use_fp8_w8a8 == (B_scale is not None) == (block_shape == [128, 128])
    rows, out, pairs = A.float(), C.view(-1, C.shape[-1]), topk_ids.numel()
    if use_fp8_w8a8:
        rows = scaled_rows(*quantize_groups(rows))
    for row in range(0, int(num_tokens_post_padded), config["BLOCK_SIZE_M"]):
        own = sorted_token_ids[row : row + config["BLOCK_SIZE_M"]].long()
        own, expert = own[own < pairs], int(expert_ids[row // config["BLOCK_SIZE_M"]])
        if expert == -1:
            out[own] = 0
            continue
        weights = dequantized(B[expert], B_scale[expert], FLOAT32) if use_fp8_w8a8 else B[expert].float()
        product = rows[own // top_k] @ weights.T
        if mul_routed_weight:
            product = product * topk_weights.view(-1)[own].unsqueeze(1)
        out[own] = product.to(C.dtype)


def module(name, **members):
    found = ModuleType(name)
    found.__dict__.update(members)
    return found


def modules():
    """sys.modules's entries, by name."""
    own = {name: value for name, value in globals().items() if callable(value)}
    triton_utils = "sglang.srt.layers.moe.moe_runner.triton_utils"
    fused = module("fused", moe_sum_reduce_triton=moe_sum_reduce, invoke_fused_moe_kernel=invoke_fused_moe_kernel)
    return {
        "sgl_kernel": module("sgl_kernel", **own),
        "deep_gemm": module("deep_gemm", **own),
        "flashinfer": module("flashinfer"),
        "flashinfer.fused_moe": module("fused_moe", fused_topk_deepseek=fused_topk_deepseek),
        "triton": module("triton"),
        "triton.language": module("language", bfloat16="bf16"),
        "sglang.kernels.ops.moe.fused_moe_triton_kernels": fused,
        **gates(),
        f"{triton_utils}.moe_align_block_size": module("align", moe_align_block_size=sglang_moe_align_block_size),
        "sglang.jit_kernel": module("jit_kernel"),
        "sglang.jit_kernel.grouped_topk": module("grouped_topk", grouped_topk=grouped_topk),
        "sglang.jit_kernel.nvfp4": emulated_nvfp4,
        **{name: module(name) for name in parents(triton_utils)},
    }


def gates():
    """SGLang's routers, by module."""
    kimi = "sglang.kernels.ops.lora.moe.trtllm_lora_temp.kimi_k2_moe_fused_gate"
    radix = "sglang.kernels.ops.moe.moe_route_radix"
    router, small = "sglang.kernels.ops.moe.moe_fused_gate", "sglang.kernels.ops.moe.moe_align_small_numel"
    return {
        small: module(small, moe_align_small_numel=moe_align_small_numel),
        **{name: module(name) for path in (kimi, router) for name in parents(path)},
        kimi: module(kimi, kimi_k2_moe_fused_gate=kimi_k2_moe_fused_gate),
        router: module(router, moe_fused_gate=sglang_moe_fused_gate),
        radix: module(radix, route_radix=route_radix),
    }


def parents(path):
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
