"""How SGLang's attention for decode is called, on emulations that split keys and round as the kernels' sources do."""

from __future__ import annotations

import math

import pytest
import torch
from emulated_runs import assert_adapter_passes, install

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import evaluate, kernel_outputs

TRITON = "sglang.kernels.ops.attention.decode_attention"
EXTEND = "sglang.kernels.ops.attention.extend_attention"
FLASH = "flash_mla"
FA3 = "sgl_kernel.flash_attn"
#: Parts of keys are multiples of this.
SMALLEST_PART = 32


def weighted(q, keys, values, scale, cap=0.0, sinks=None):
    """Output and natural lse of q [heads, dim] over keys [n, kv_heads, dim]; weights are rounded after their sum.
    Beside values in fp8, weights and queries are rounded to it."""
    if values.dtype == torch.float8_e4m3fn:
        q = q.float().clamp(-448, 448).to(values.dtype)
    group = q.shape[0] // keys.shape[1]
    k, v = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    logits = torch.einsum("hd,nhd->hn", q.float(), k) * scale
    if cap:
        logits = cap * (2 * torch.sigmoid(2 * (logits / cap)) - 1)
    maximum = logits.amax(dim=1, keepdim=True)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks.unsqueeze(1) - maximum)
    rounded = weights.to(values.dtype if values.dtype == torch.float8_e4m3fn else torch.bfloat16).float()
    output = torch.einsum("hn,nhd->hd", rounded, v) / total
    return output, (maximum + total.log()).squeeze(1)


def fake_decode(
    q, keys, values, o, kv_indptr, kv_indices, parts, lse, splits, most, scale, k_scale, v_scale,
    logit_cap=0.0, sinks=None, has_mla=False,
):  # fmt: skip
    assert has_mla == (keys.shape[-1] != values.shape[-1])
    assert not has_mla or keys.data_ptr() == values.data_ptr()
    assert kv_indices.dtype == torch.int64
    assert splits.dtype == kv_indptr.dtype == torch.int32
    assert parts.is_contiguous()
    scale *= k_scale
    for b in range(len(q)):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        length = math.ceil(math.ceil(len(slots) / int(splits[b])) / SMALLEST_PART) * SMALLEST_PART
        for part in range(most):
            own = slots[part * length : (part + 1) * length]
            if len(own):
                parts[b, :, part], lse[b, :, part] = weighted(q[b], keys[own], values[own], scale, logit_cap)
        written = parts[b].masked_fill((lse[b] == -math.inf).unsqueeze(2), 0.0)
        most_logit = lse[b].amax(dim=1, keepdim=True)
        weights = torch.exp(lse[b] - most_logit)
        total = weights.sum(dim=1, keepdim=True)
        if sinks is not None:
            total += torch.exp(sinks.unsqueeze(1) - most_logit)
        o[b] = ((weights / total).unsqueeze(2) * written).sum(dim=1) * v_scale


def fake_metadata():
    return "filled by the first call", None


def fake_sparse_fp8(q, k_cache, width, scale, indices):
    """Scales, and their products with codes, are rounded to bf16; the rest of a row is bf16 already."""
    assert k_cache.dtype == torch.float8_e4m3fn
    assert q.shape[1:3] == (1, 64)
    rows = k_cache.flatten(0, 2)
    scales = rows[:, width : width + 8].view(torch.float32).to(torch.bfloat16).repeat_interleave(width // 2, dim=1)
    values = rows[:, :width].to(torch.bfloat16) * scales
    keys = torch.cat((values, rows[:, width + 8 :].view(torch.bfloat16)), dim=1).unsqueeze(1)
    found = []
    for row, chosen in zip(q[:, 0], indices[:, 0], strict=True):
        own = keys[chosen[chosen >= 0].long()]
        found.append(weighted(row, own, own[..., :width], scale))
    outputs, sums = (torch.stack(each) for each in zip(*found, strict=True))
    return outputs.to(q.dtype).unsqueeze(1), sums.unsqueeze(2)


def fake_flash(
    *, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, softmax_scale, use_legacy,
    causal=False, is_fp8_kvcache=False, indices=None,
):  # fmt: skip
    assert use_legacy
    assert tile_scheduler_metadata == fake_metadata()[0]
    assert is_fp8_kvcache == (indices is not None)
    if indices is not None:
        assert block_table.shape == (len(q), 0)
        return fake_sparse_fp8(q, k_cache, head_dim_v, softmax_scale, indices)
    assert causal
    assert block_table.dtype == torch.int32
    outputs, sums = [], []
    for b, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[b, : math.ceil(length / k_cache.shape[1])]
        keys = k_cache[pages].flatten(0, 1)[:length]
        output, lse = weighted(q[b, 0], keys, keys[..., :head_dim_v], softmax_scale)
        outputs.append(output)
        sums.append(lse)
    return torch.stack(outputs).to(q.dtype).unsqueeze(1), torch.stack(sums).unsqueeze(2)


def fake_extend(
    q, k, v, o, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, mask, causal, mask_indptr, most, *rest,
    sm_scale, logit_cap=0.0, sliding_window_size=-1, sinks=None,
):  # fmt: skip
    assert mask is mask_indptr is None
    assert causal
    assert rest == (1.0, 1.0)
    assert qo_indptr.dtype == kv_indices.dtype == torch.int64
    assert most == int(qo_indptr.diff().max())
    assert sinks is None or sinks.dtype == torch.bfloat16
    for b in range(len(qo_indptr) - 1):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        first, end = int(qo_indptr[b]), int(qo_indptr[b + 1])
        for row in range(first, end):
            # Key j is masked where the query's position exceeds j + sliding_window_size.
            start = max(0, len(slots) + row - first - sliding_window_size) if sliding_window_size > 0 else 0
            keys = torch.cat((k_buffer[slots], k[first : row + 1]))[start:]
            values = torch.cat((v_buffer[slots], v[first : row + 1]))[start:]
            o[row] = weighted(q[row], keys, values, sm_scale, logit_cap, sinks)[0]


def fake_flash_attention(
    *, q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, num_splits, softmax_scale, causal,
    window_size, softcap, return_softmax_lse, k_descale=None, v_descale=None, sinks=None, scheduler_metadata=None,
):  # fmt: skip
    """FlashAttention 3 over a table of slots; with a cache in fp8, it also takes scales [requests, key heads]."""
    assert (num_splits, causal, return_softmax_lse) == (0, True, True)
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert sinks is None or sinks.dtype == torch.bfloat16
    if scheduler_metadata is not None:
        assert torch.equal(scheduler_metadata, cache_seqlens)
        assert window_size == (-1, -1)
    one = torch.ones(len(page_table), k_cache.shape[2])
    if k_cache.dtype == torch.float8_e4m3fn:
        assert k_descale.shape == v_descale.shape == one.shape
        assert k_descale.dtype == v_descale.dtype == torch.float32
    of_keys, of_values = (one if each is None else each for each in (k_descale, v_descale))
    outputs, sums = [], []
    for b, length in enumerate(cache_seqlens.tolist()):
        keys, values = (cache[page_table[b].long()].flatten(0, 1) for cache in (k_cache, v_cache))
        first, end = cu_seqlens_q[b : b + 2].tolist()
        for row in range(first, end):
            last = length - (end - row)
            seen = slice(max(0, last - window_size[0]) if window_size[0] >= 0 else 0, last + 1)
            scale = softmax_scale * float(of_keys[b, 0])
            output, lse = weighted(q[row], keys[seen], values[seen], scale, softcap, sinks)
            outputs.append(output * float(of_values[b, 0]))
            sums.append(lse)
    return torch.stack(outputs).to(torch.bfloat16), torch.stack(sums).T


def fake_sparse(q, kv, indices, scale, width, *, use_legacy, return_log2_lse):
    """Heads in whole blocks; the output, the largest logits and the lse of base 2."""
    assert use_legacy
    assert return_log2_lse
    assert q.shape[1] % 64 == 0
    assert indices.dtype == torch.int32
    assert indices.shape[1] == kv.shape[1] == 1
    found = []
    for row, chosen in zip(q, indices[:, 0], strict=True):
        keys = kv[chosen[chosen >= 0].long()]
        found.append(weighted(row, keys, keys[..., :width], scale))
    outputs, sums = (torch.stack(each) for each in zip(*found, strict=True))
    return outputs.to(q.dtype), sums, sums / math.log(2)


def fake_scheduler(
    *, batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens, qkv_dtype, cu_seqlens_q,
    page_size, causal, has_softcap, num_splits,
):  # fmt: skip
    """Instead of a schedule, the lengths that it is for."""
    assert (max_seqlen_q, page_size, causal, has_softcap, num_splits) == (1, 1, True, False, 0)
    assert qkv_dtype == torch.float8_e4m3fn
    assert batch_size == len(cache_seqlens) == len(cu_seqlens_q) - 1
    assert max_seqlen_k == int(cache_seqlens.max())
    assert (num_heads % num_heads_k, headdim % 8) == (0, 0)
    return cache_seqlens


FAKES = {
    f"{FLASH}.flash_mla_sparse_fwd": fake_sparse,
    f"{EXTEND}.extend_attention_fwd": fake_extend,
    f"{TRITON}.decode_attention_fwd": fake_decode,
    f"{FLASH}.flash_mla_with_kvcache": fake_flash,
    f"{FLASH}.get_mla_metadata": fake_metadata,
    f"{FA3}.flash_attn_with_kvcache": fake_flash_attention,
    f"{FA3}.get_scheduler_metadata": fake_scheduler,
}


@pytest.fixture
def kernels(monkeypatch):
    install(monkeypatch, FAKES)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gqa_paged_decode_h32_kv8_d128_ps1", f"{TRITON}.decode_attention_fwd"),
        ("mla_paged_decode_h128_ckv512_kpe64_ps1", f"{TRITON}.decode_attention_fwd"),
        ("dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps1", f"{FLASH}.flash_mla_sparse_fwd"),
        ("gqa_extend_causal_h32_kv8_qk128_vo128", f"{EXTEND}.extend_attention_fwd"),
        ("gqa_extend_causal_h16_kv8_qk256_vo256_softcap50", f"{EXTEND}.extend_attention_fwd"),
        ("gqa_extend_causal_h16_kv8_qk256_vo256_softcap50_window4096", f"{EXTEND}.extend_attention_fwd"),
        ("gqa_extend_causal_h8_kv4_qk256_vo256_window1024", f"{EXTEND}.extend_attention_fwd"),
        ("gqa_extend_causal_h64_kv8_qk64_vo64_sinks", f"{EXTEND}.extend_attention_fwd"),
        ("gqa_extend_causal_h64_kv8_qk64_vo64_sinks_window128", f"{EXTEND}.extend_attention_fwd"),
        ("gqa_extend_causal_h32_kv8_qk128_vo128", f"{FA3}.flash_attn_with_kvcache"),
        ("gqa_extend_causal_h16_kv8_qk256_vo256_softcap50_window4096", f"{FA3}.flash_attn_with_kvcache"),
        ("gqa_extend_causal_h64_kv8_qk64_vo64_sinks_window128", f"{FA3}.flash_attn_with_kvcache"),
        ("mla_paged_decode_h16_ckv512_kpe64_ps64", f"{FLASH}.flash_mla_with_kvcache"),
        ("dsa_sparse_attention_fp8_cache_h128_ckv512_kpe64_topk2048_ps64", f"{FLASH}.flash_mla_with_kvcache"),
        ("gqa_paged_decode_fp8_cache_h32_kv8_d128_ps1", f"{TRITON}.decode_attention_fwd"),
        ("gqa_paged_decode_fp8_cache_h32_kv8_d128_ps1", f"{FA3}.flash_attn_with_kvcache"),
    ],
)
def test_kernels_are_called_as_their_libraries_want(name: str, path: str, kernels, monkeypatch):
    monkeypatch.setattr("flashinfer_trace.families.mla_paged.sglang_kernels.PAGE_SIZE", 4)
    assert_adapter_passes(name, path)


@pytest.mark.parametrize(
    "name", ["gqa_paged_decode_h8_kv4_d256_ps1_softcap50", "gqa_paged_decode_h8_kv1_d64_ps1_sinks"]
)
@pytest.mark.parametrize("logits", ["normal", "large", "peaked", "uniform", "positive"])
def test_decode_with_a_cap_or_sinks_takes_slots_of_one_token(name, logits, kernels):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    (kernel,) = (one for one in family.kernels_of(definition) if one.library == "sglang")
    assert kernel.unsupported(flashinfer_trace.load(name.replace("ps1", "ps64"))) == "takes slots: needs page_size 1"
    twin = definition.with_const_axes({**definition.const_axes, **family.twin, "page_size": 1})
    plan = {"kv_lens": [300, 1, 33, 7], "logits": logits, "scale": 1.5, "num_pages": 350}
    plan |= {"shared_prefix": 0, "unused": "nan"}
    inputs = family.inputs(twin, plan, 3, "cpu")
    found, _ = kernel_outputs(twin, kernel, inputs)
    comparisons = evaluate(family.policies(kernel), found, family.oracle(twin, inputs))
    assert all(comparison.passed for comparison in comparisons.values()), comparisons
    worse = {**found, "lse": found["lse"] + 0.01}
    assert not evaluate(family.policies(kernel), worse, family.oracle(twin, inputs))["lse"].passed


def test_a_prefix_comes_before_the_new_tokens():
    """One request: a cached token in slot 2, and two new ones; with equal logits, outputs are means of the values."""
    definition = flashinfer_trace.load("gqa_extend_causal_h32_kv8_qk128_vo128")
    small = definition.with_const_axes({"num_qo_heads": 1, "num_kv_heads": 1, "qk_dim": 4, "vo_dim": 2})
    buffer = torch.full((4, 1, 2), math.nan, dtype=torch.bfloat16)
    buffer[2] = 3.0
    inputs = {
        "q": torch.zeros(2, 1, 4, dtype=torch.bfloat16),
        "k": torch.ones(2, 1, 4, dtype=torch.bfloat16),
        "v": torch.tensor([[[5.0, 5.0]], [[10.0, 10.0]]], dtype=torch.bfloat16),
        "k_buffer": torch.cat((buffer, buffer), dim=2),
        "v_buffer": buffer,
        "qo_indptr": torch.tensor([0, 2], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "kv_indices": torch.tensor([2], dtype=torch.int32),
        "sm_scale": 0.5,
    }
    output = small.name_outputs(small.run(**inputs))["output"]
    assert output[:, 0].tolist() == [[4.0, 4.0], [6.0, 6.0]]


def test_requests_without_keys_are_not_given_to_kernels_that_divide_by_nothing():
    definition = flashinfer_trace.load("gqa_paged_decode_h32_kv8_d128_ps1")
    family = family_of(definition)
    for kernel in family.kernels:
        with_keys = kernel.library == "sglang"
        assert kernel.plan_options.keyless_requests is not with_keys, kernel.label


def test_an_fp8_cache_is_dequantized_by_groups():
    """Two groups of two codes with scales of 2 and 0.5; one query that chooses the second slot alone."""
    definition = flashinfer_trace.load("dsa_sparse_attention_fp8_cache_h128_ckv512_kpe64_topk2048_ps64")
    sizes = {"num_qo_heads": 1, "head_dim_ckv": 4, "head_dim_kpe": 2, "num_groups": 2, "bytes_per_token": 16}
    small = definition.with_const_axes({**sizes, "page_size": 2, "topk": 3})
    codes = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, -3.0, 4.0, 448.0]]).to(torch.float8_e4m3fn)
    scales, rotary = torch.tensor([[1.0, 1.0], [2.0, 0.5]]), torch.zeros(2, 2, dtype=torch.bfloat16)
    rows = torch.cat([part.view(torch.uint8) for part in (codes, scales, rotary)], dim=1)
    output, lse = small.run(
        q_nope=torch.zeros(1, 1, 4, dtype=torch.bfloat16),
        q_pe=torch.zeros(1, 1, 2, dtype=torch.bfloat16),
        kv_cache=rows.view(torch.float8_e4m3fn).view(1, 2, 16),
        sparse_indices=torch.tensor([[-1, 1, -1]], dtype=torch.int32),
        sm_scale=0.5,
    )
    assert output.flatten().tolist() == [2.0, -6.0, 2.0, 224.0]
    assert lse.tolist() == [[0.0]]


@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (2.0, 0.5)])
def test_scales_of_an_fp8_cache_multiply_logits_and_outputs(k_scale, v_scale):
    definition = flashinfer_trace.load("gqa_paged_decode_fp8_cache_h32_kv8_d128_ps1")
    small = definition.with_const_axes({"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1})
    output, lse = small.run(
        q=torch.ones(1, 1, 1, dtype=torch.bfloat16),
        k_cache=torch.tensor([3.0, 0.0]).to(torch.float8_e4m3fn).view(2, 1, 1, 1),
        v_cache=torch.tensor([8.0, math.nan]).to(torch.float8_e4m3fn).view(2, 1, 1, 1),
        kv_indptr=torch.tensor([0, 1], dtype=torch.int32),
        kv_indices=torch.tensor([0], dtype=torch.int32),
        k_scale=k_scale,
        v_scale=v_scale,
        sm_scale=math.log(2),
    )
    assert output.item() == 8.0 * v_scale
    assert lse.item() == pytest.approx(3.0 * k_scale)
