"""How DeepGEMM's scores of the indexer are called, on an emulation that loses what fp8 tensor cores lose."""

from __future__ import annotations

import math

import pytest
import torch
from emulated_runs import assert_adapter_passes, install
from emulated_tensor_core import truncating_product

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify

NAME = "fp8_mqa_logits_h64_d128"


def fake_logits(q, keys, weights, start, end, clean_logits):
    """Writes numbers where a token sees nothing."""
    codes, scale = keys
    assert not clean_logits
    assert q.dtype == codes.dtype == torch.float8_e4m3fn
    assert start.dtype == end.dtype == torch.int32
    products = truncating_product(q.double().transpose(0, 1), codes.double().expand(q.shape[1], *codes.shape)).float()
    return (products.clamp_min(0) * weights.T.unsqueeze(2)).sum(dim=0) * scale


def fake_paged_logits(q, cache, weights, lengths, table, schedule, longest, clean_logits):
    """Reads the pages of a table, whose scales follow the codes; writes a number beyond the length of a request."""
    assert q.shape[1] == 1
    assert lengths.shape == (len(q), 1)
    assert lengths.dtype == table.dtype == torch.int32
    assert schedule == ("schedule of pages of 64", 132)
    assert (lengths > 0).all()
    assert longest == table.shape[1] * 64
    rows, dim = [], q.shape[-1]
    for row, pages in enumerate(table.long()):
        data = cache[pages].flatten(1)
        codes = data[:, : 64 * dim].contiguous().view(torch.float8_e4m3fn).view(-1, dim)
        scales = data[:, 64 * dim :].contiguous().view(torch.float32).flatten()
        own = fake_logits(q[row], (codes, scales), weights[row : row + 1], lengths[0], lengths[0], clean_logits)
        rows.append(own.masked_fill(torch.arange(longest) >= lengths[row], 7.0))
    return torch.cat(rows)


FAKES = {
    "deep_gemm.fp8_mqa_logits": fake_logits,
    "deep_gemm.fp8_paged_mqa_logits": fake_paged_logits,
    "deep_gemm.get_num_sms": lambda: 132,
    "deep_gemm.get_paged_mqa_logits_metadata": lambda lengths, page, count: (f"schedule of pages of {page}", count),
}


@pytest.mark.parametrize("path", list(FAKES)[:2])
def test_the_kernels_are_called_as_sglang_calls_them(path, monkeypatch):
    install(monkeypatch, FAKES)
    assert_adapter_passes(NAME, path)


def test_scores_without_the_maximum_with_0_are_rejected(monkeypatch):
    def linear(q, keys, weights, start, end, clean_logits):
        products = torch.einsum("thd,jd->htj", q.float(), keys[0].float())
        return (products * weights.T.unsqueeze(2)).sum(dim=0) * keys[1]

    install(monkeypatch, {"deep_gemm.fp8_mqa_logits": linear})
    definition = flashinfer_trace.load(NAME)
    family = family_of(definition)
    assert verify(Job(definition, family, family.kernels[0]), examples=5).status == "failed"


def test_negative_products_do_not_count():
    """Two heads of one feature: products of 6 and -6 with the first key, which count 6 and 0."""
    small = flashinfer_trace.load(NAME).with_const_axes({"num_heads": 2, "head_dim": 1})
    logits = small.run(
        q=torch.tensor([[[2.0], [-2.0]]]).to(torch.float8_e4m3fn),
        k=torch.tensor([[3.0], [-1.0], [math.nan]]).to(torch.float8_e4m3fn),
        k_scale=torch.tensor([0.5, 4.0, math.nan]),
        weights=torch.tensor([[10.0, -1.0]]),
        k_start=torch.tensor([0], dtype=torch.int32),
        k_end=torch.tensor([2], dtype=torch.int32),
    )
    assert logits.tolist() == [[30.0, -8.0, -math.inf]]
