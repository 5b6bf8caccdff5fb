"""DeepSeek sparse attention over a cache of packed fp8 keys: latent attention to the tokens that an indexer chose.

A row of the cache is a token: HEAD_DIM_CKV codes in e4m3, NUM_GROUPS float32 scales, and HEAD_DIM_KPE rotary features
in bfloat16, BYTES_PER_TOKEN bytes in all (FlashMLA's format for DeepSeek-V3.2-Exp). Consecutive codes share a scale in
equal groups; the compressed key and value is ckv = code * scale, without rounding.

Every query head h of a token attends to the same latent keys k_j = [ckv_j | kpe_j] of the chosen slots j, and reads the
values ckv_j: logit_hj = (q_nope_h . ckv_j + q_pe_h . kpe_j) * sm_scale, p_h = softmax_j(logit_h),
output_h = sum_j p_hj ckv_j and lse_h = log2(sum_j exp(logit_hj)).

sparse_indices[t] has the slots of token t: page * PAGE_SIZE + place in the page. Negative ones, anywhere in the row,
choose nothing. Slots that no token chooses are never read, so they may hold NaN. A token that chooses nothing has
output 0 and lse -inf. The cache has at least one page. Tokens are computed in blocks, whose keys take 300 MB.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q_nope.
"""

import math

import torch

NUM_QO_HEADS = 128
HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
NUM_GROUPS = 4
BYTES_PER_TOKEN = 656
PAGE_SIZE = 64
TOPK = 2048
BLOCK = 64


def unpacked(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the cache [..., BYTES_PER_TOKEN] as float32 ckv [..., HEAD_DIM_CKV] and kpe [..., HEAD_DIM_KPE]."""
    end = BYTES_PER_TOKEN - 2 * HEAD_DIM_KPE
    scales = rows[..., HEAD_DIM_CKV:end].view(torch.float32)
    codes = rows[..., :HEAD_DIM_CKV].float().unflatten(-1, (NUM_GROUPS, HEAD_DIM_CKV // NUM_GROUPS))
    kpe = rows[..., end:].view(torch.bfloat16)
    return (codes * scales.unsqueeze(-1)).flatten(-2), kpe.float()


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [num_tokens, heads, dim], kv_cache [num_pages, page_size, bytes], sparse_indices [num_tokens, topk].

    Returns output, shaped and typed as q_nope, and lse [num_tokens, heads] float32.
    """
    assert q_nope.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_CKV)
    assert q_pe.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_KPE)
    assert kv_cache.shape[1:] == (PAGE_SIZE, BYTES_PER_TOKEN)
    assert sparse_indices.shape[1] == TOPK
    output = torch.zeros_like(q_nope)
    lse = torch.zeros_like(q_nope[:, :, 0], dtype=torch.float32)
    # Rows of bytes: not every fp8 operation can gather.
    rows = kv_cache.flatten(0, 1).view(torch.uint8)
    for own in torch.arange(q_nope.shape[0], device=q_nope.device).split(BLOCK):
        slots = sparse_indices[own]
        nothing = (slots < 0).unsqueeze(1)
        ckv, kpe = unpacked(rows[slots.clamp_min(0)].view(kv_cache.dtype))
        # What is not chosen is replaced: it may hold NaN, and 0 * NaN is NaN.
        ckv = ckv.masked_fill(nothing.mT, 0.0)
        logits = (q_nope[own].float() @ ckv.mT + q_pe[own].float() @ kpe.mT) * sm_scale
        logits = logits.masked_fill(nothing, -math.inf)
        # The softmax of a row without keys is NaN.
        weights = torch.softmax(logits, dim=-1).masked_fill(nothing, 0.0)
        output[own] = (weights @ ckv).to(output.dtype)
        lse[own] = torch.logsumexp(logits, dim=-1) * math.log2(math.e)
    return output, lse
