"""DeepSeek sparse attention: latent attention of every query to the tokens that an indexer chose for it.

Every query head h of a token attends to the same latent keys k_j = [ckv_j | kpe_j] of the chosen slots j, and reads the
values ckv_j: logit_hj = (q_nope_h . ckv_j + q_pe_h . kpe_j) * sm_scale, p_h = softmax_j(logit_h),
output_h = sum_j p_hj ckv_j and lse_h = log2(sum_j exp(logit_hj)) (DeepSeek-V3.2-Exp, "DeepSeek Sparse Attention", with
the key up-projection absorbed into q_nope). sm_scale is that of the heads before absorption: 1/sqrt(128 + 64).

sparse_indices[t] has the slots of token t: page * PAGE_SIZE + place in the page. Negative ones, anywhere in the row,
choose nothing. Slots that no token chooses are never read, so they may hold NaN. A token that chooses nothing has
output 0 and lse -inf. The cache has at least one page. Tokens are computed in blocks whose keys stay in a CPU's cache.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q_nope.
"""

import math

import torch

NUM_QO_HEADS = 16
HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
PAGE_SIZE = 1
TOPK = 2048
BLOCK = 2


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [num_tokens, heads, dim], caches [num_pages, page_size, dim], sparse_indices [num_tokens, topk].

    Returns output, shaped and typed as q_nope, and lse [num_tokens, heads] float32.
    """
    assert q_nope.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_CKV)
    assert q_pe.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_KPE)
    assert ckv_cache.shape[1:] == (PAGE_SIZE, HEAD_DIM_CKV)
    assert kpe_cache.shape[1:] == (PAGE_SIZE, HEAD_DIM_KPE)
    assert sparse_indices.shape[1] == TOPK
    output = torch.zeros_like(q_nope)
    lse = torch.zeros_like(q_nope[:, :, 0], dtype=torch.float32)
    for own in torch.arange(q_nope.shape[0], device=q_nope.device).split(BLOCK):
        slots = sparse_indices[own]
        nothing = slots < 0
        # A slot that is not chosen may hold NaN, and 0 * NaN is NaN: the keys of another one stand in for it.
        largest = slots.amax(dim=1, keepdim=True)
        read = torch.where(nothing, largest, slots).clamp_min(0)
        ckv = ckv_cache.flatten(0, 1).index_select(0, read.flatten()).unflatten(0, read.shape).float()
        kpe = kpe_cache.flatten(0, 1).index_select(0, read.flatten()).unflatten(0, read.shape).float()
        logits = (q_nope[own].float() @ ckv.mT + q_pe[own].float() @ kpe.mT) * sm_scale
        logits = logits.masked_fill(nothing.unsqueeze(1), -math.inf)
        # The softmax of a row without keys is NaN.
        output[own] = (torch.softmax(logits, dim=-1) @ ckv).masked_fill(largest.unsqueeze(2) < 0, 0.0).to(output.dtype)
        lse[own] = torch.logsumexp(logits, dim=-1) * math.log2(math.e)
    return output, lse
