"""The kernels of experts in nvfp4, emulated in torch on a CPU: see `emulated_moe`."""

from __future__ import annotations

import math

import torch

FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rows_of(offsets, sizes, rows):
    """(expert, its rows), checked against the sizes."""
    for expert, count in enumerate(sizes[:, rows].tolist()):
        yield expert, slice(int(offsets[expert]), int(offsets[expert]) + count)


def scale_place(row, block, blocks):
    """Where a scale is in memory: tiles of 128 rows and 4 blocks, with scales [32, 4, 4] each."""
    tile = row // 128 * (blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def scale_places(first, rows, blocks, padded):
    row = torch.arange(first, first + rows).unsqueeze(1)
    return scale_place(row, torch.arange(blocks), padded)


def scaled_fp4_experts_quant(
    input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk, expert_map=None
):
    rows, blocks = len(input_tensor), input_tensor.shape[1] // 16
    padded = -(-blocks // 4) * 4
    levels = torch.tensor(FP4_LEVELS)
    codes = torch.empty(rows, blocks * 8, dtype=torch.uint8)
    scales = torch.full(((rows + 128 * len(input_global_scale)) * padded,), 127, dtype=torch.uint8)
    for expert, factor in enumerate(input_global_scale):
        part = slice(int(expert_offsets[expert]), int(expert_offsets[expert + 1]))
        x = input_tensor[part].float().unflatten(1, (blocks, 16))
        scale = (factor * x.abs().amax(2) / 6).clamp_max(448).to(torch.float8_e4m3fn)
        inverse = torch.where(scale.float() > 0, factor / scale.float(), 0.0).unsqueeze(2)
        distance = ((x * inverse).abs().clamp_max(6).unsqueeze(3) - levels).abs()
        # An even code wins a tie.
        nearest = (distance + torch.tensor([0, 1e-7] * 4)).argmin(3) + 8 * (x < 0)
        pair = nearest.view(len(x), blocks * 8, 2)
        codes[part] = (pair[:, :, 0] + 16 * pair[:, :, 1]).to(torch.uint8)
        places = scale_places(int(blockscale_offsets[expert]), len(x), blocks, padded)
        scales[places.flatten()] = scale.view(torch.uint8).flatten()
    return codes, scales.view(-1, padded).view(torch.float8_e4m3fn)


def fp4_values(codes, scales):
    pair = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()
    values = torch.tensor(FP4_LEVELS)[pair & 7] * torch.where(pair > 7, -1, 1)
    return values * scales.float().repeat_interleave(16, dim=-1)


def cutlass_fp4_group_mm(a_fp4, b_fp4, a_blockscale, b_blockscale, alphas, out_dtype, params):
    experts, n, half = b_fp4.shape
    blocks, padded = half // 8, a_blockscale.shape[1]
    assert a_fp4.dtype == b_fp4.dtype == torch.uint8
    assert (params["ab_strides"] == 2 * half).all()
    assert (params["c_strides"] == n).all()
    assert params["problem_sizes"][:, 1:].tolist() == [[n, 2 * half]] * experts
    assert len(params["expert_offsets"]) == len(params["blockscale_offsets"]) == experts
    output = torch.full((len(a_fp4), n), math.nan, dtype=out_dtype)
    for expert, part in rows_of(params["expert_offsets"], params["problem_sizes"], 0):
        first = int(params["blockscale_offsets"][expert])
        places = scale_places(first, part.stop - part.start, blocks, padded)
        own = a_blockscale.view(torch.uint8).flatten()[places].view(torch.float8_e4m3fn)
        places = scale_places(0, n, blocks, padded)
        weights = b_blockscale[expert].view(torch.uint8).flatten()[places].view(torch.float8_e4m3fn)
        product = fp4_values(a_fp4[part], own) @ fp4_values(b_fp4[expert], weights).T
        output[part] = (product * alphas[expert]).to(out_dtype)
    return output
