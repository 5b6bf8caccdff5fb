"""sgl_kernel's steps of a mixture of experts, emulated in torch on a CPU, as measured on the real ones.

The emulation includes their roundings, their unwritten slots and the requirements on their arguments.
"""

from __future__ import annotations

import math

import torch

from flashinfer_trace.families.quantized import dequantized, quantize_groups


def prepare_moe_input(ids, offsets, sizes1, sizes2, to_expert, to_token, experts, n, k):
    assert all(tensor.dtype == torch.int32 for tensor in (ids, offsets, sizes1, sizes2, to_expert, to_token))
    slot = 0
    for expert in range(experts):
        offsets[expert] = slot
        where = (ids.flatten() == expert).nonzero().flatten().tolist()
        # The order inside an expert is not fixed, because the kernel uses atomics.
        for index in reversed(where):
            to_expert[slot], to_token[index] = index // ids.shape[1], slot
            slot += 1
        sizes1[expert] = torch.tensor([len(where), 2 * n, k])
        sizes2[expert] = torch.tensor([len(where), k, n])
    offsets[experts] = slot


def shuffle_rows(values, rows, shape):
    assert rows.dtype == torch.int32
    assert values.is_contiguous()
    assert values.shape[1] * values.element_size() % 16 == 0
    return values[rows.long()].reshape(shape)


def fp8_blockwise_scaled_grouped_mm(output, *arguments):
    a, b, a_scales, b_scales, stride_a, stride_b, stride_c = arguments[5:12]
    sizes, offsets, workspace = arguments[14:]
    assert a_scales.is_contiguous()
    assert workspace.dtype == torch.uint8
    for expert, (rows, n, k) in enumerate(sizes.tolist()):
        assert (stride_a[expert], stride_b[expert], stride_c[expert]) == (k, k, n)
        assert b[expert].stride() == (1, k)
        part = slice(int(offsets[expert]), int(offsets[expert]) + rows)
        x = a[part].float() * a_scales[part].repeat_interleave(128, dim=1)
        output[part] = (x @ dequantized(b[expert].T, b_scales[expert].T, torch.float32).T).to(torch.bfloat16)


def silu_and_mul(values):
    gate, up = values.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)


def sgl_per_token_group_quant_fp8(values, codes, scales, group, eps, low, high, enable_v2):
    assert (group, eps, low, high, enable_v2) == (128, 1e-10, -448.0, 448.0, True)
    quantized = quantize_groups(values.float())
    codes.copy_(quantized[0])
    scales.copy_(quantized[1])


def apply_shuffle_mul_sum(values, output, rows, factors):
    assert factors.dtype == output.dtype
    terms = values[rows.long()].float().unflatten(0, (len(output), -1)) * factors.float().unsqueeze(2)
    output.copy_(terms.sum(1).to(output.dtype))


def topk_softmax(weights, ids, logits, renormalize=False):
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    probabilities = torch.softmax(logits.float(), dim=1)
    order = probabilities.argsort(dim=1, descending=True, stable=True)[:, : ids.shape[1]]
    chosen = probabilities.gather(1, order)
    weights.copy_(chosen / chosen.sum(1, keepdim=True) if renormalize else chosen)
    ids.copy_(order)


def grouped_mm(a, b, *, offs):
    """torch.nn.functional.grouped_mm on CUDA, which leaves rows after the last group as they were."""
    assert offs.dtype == torch.int32
    assert a.is_contiguous()
    assert b[0].stride() == (1, b.shape[1])
    assert int(offs[-1]) <= len(a)
    product = torch.full((len(a), b.shape[2]), math.nan, dtype=torch.bfloat16)
    first = 0
    for expert, last in enumerate(offs.tolist()):
        product[first:last] = (a[first:last].float() @ b[expert].float()).to(torch.bfloat16)
        first = last
    return product
