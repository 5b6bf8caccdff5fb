"""Quantizes keys of DeepSeek Sparse Attention's indexer to fp8 and writes them into the slots that they were given.

A key has one scale: scale = max(max |x|, EPS) / 448 in float32, and code = x / scale rounded to the nearest e4m3
number, ties to even. Slot s is number s % PAGE_SIZE of page s // PAGE_SIZE. Everything else stays. Slots are distinct.

Kernels take one buffer of bytes: a page is the codes of its slots, and then their scales (DeepSeek-V3.2-Exp).
"""

import torch

HEAD_DIM = 128
PAGE_SIZE = 64
E4M3_MAX = 448.0
EPS = 1e-4


def run(
    key: torch.Tensor, code_pages: torch.Tensor, scale_pages: torch.Tensor, out_cache_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """key [num_tokens, head_dim]; code_pages [num_pages, page_size, head_dim] float8_e4m3fn;
    scale_pages [num_pages, page_size] float32; out_cache_loc int64 [num_tokens].

    Returns code_pages_out and scale_pages_out, of the shapes of code_pages and scale_pages.
    """
    assert key.shape[1] == HEAD_DIM
    assert code_pages.shape[1:] == (PAGE_SIZE, HEAD_DIM)
    assert scale_pages.shape[1] == PAGE_SIZE
    values = key.float()
    scales = values.abs().amax(dim=1).clamp_min(EPS) / E4M3_MAX
    codes = (values / scales[:, None]).to(torch.float8_e4m3fn)
    # As bytes: not every fp8 operation can scatter.
    stored = code_pages.view(torch.uint8).flatten(0, 1).index_copy(0, out_cache_loc, codes.view(torch.uint8))
    scale_pages_out = scale_pages.flatten().index_copy(0, out_cache_loc, scales).view(scale_pages.shape)
    return stored.view(code_pages.shape).view(torch.float8_e4m3fn), scale_pages_out
