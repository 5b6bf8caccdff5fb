"""Attention kernels: their bounds against models of them, declared results for rows without keys, and their calls."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from attention_cases import CAUSAL, DECODE, LATENT, NAMES, PAGED, case, plan, queries
from drawn_plans import small_twin
from emulated_attention import attention_model, counted_lengths, paged_requests, ragged_requests, requests_in
from emulated_runs import install

import flashinfer_trace
from flashinfer_trace.families import family_of, gqa_paged
from flashinfer_trace.families.attention import flash_attention as flash_attention_3
from flashinfer_trace.families.attention import kernels as attention_kernels
from flashinfer_trace.families.attention import ragged
from flashinfer_trace.families.attention.cases import LOGIT_KINDS, SCALES
from flashinfer_trace.families.attention.kernels import CUDA_CORES, FA2, FA3, SEEING
from flashinfer_trace.families.attention.policies import kernel_policies
from flashinfer_trace.families.mla_paged import inputs as latent
from flashinfer_trace.families.mla_paged.kernels import BACKENDS as LATENT_BACKENDS
from flashinfer_trace.harness.case import evaluate, run_case
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.errors import ONE_SIDED, RowSigns

ROUNDINGS = {backend.name: backend.rounding for backend in (CUDA_CORES, FA2, FA3)}
LATENT_ROUNDINGS = {backend.name: backend.rounding for backend in LATENT_BACKENDS}
LENGTHS = {"kv_lens": [300, 0, 430, 33, 2], "q_lens": [3, 1, 2, 5, 2]}


def model(definition, inputs, rounding, **options):
    """The model's outputs for these inputs of a family."""
    is_latent, page_size = definition.op_type == "mla_paged", definition.const_axes.get("page_size")
    memory = (latent if is_latent else gqa_paged).memory(inputs, page_size) if page_size else ragged.memory(inputs)
    value_dim = inputs[next(name for name in ("ckv_cache", "v_cache", "v") if name in inputs)].shape[-1]
    return attention_model(
        *(queries(inputs), requests_in(memory), value_dim, inputs["sm_scale"], "qo_indptr" in inputs, rounding),
        **options,
    )


def long_case(name, logits, **rest):
    """(family, twin, inputs, expected) of requests that kernels split."""
    pages = {"num_pages": 800} if name in PAGED else {}
    family, definition, inputs = case(name, **LENGTHS, logits=logits, **pages, **rest)
    return family, definition, inputs, family.oracle(definition, inputs)


def wrappers(family):
    """flashinfer's wrappers. Kernels for Blackwell are emulated in `emulated_speculative`."""
    return [kernel for kernel in family.kernels if kernel.path.endswith("Wrapper")]


@pytest.mark.parametrize("backend", ROUNDINGS)
def test_errors_of_a_model_of_a_kernel_do_not_lean(backend):
    """A judgment allows an average of ONE_SIDED: right kernels are far below it."""
    rounding, signs = ROUNDINGS[backend], {name: RowSigns() for name in ("output", "lse")}
    for logits in LOGIT_KINDS:
        _family, definition, inputs, expected = long_case("gqa_paged_decode_h32_kv8_d128_ps1", logits)
        outputs = model(definition, inputs, rounding, chunk=128 if rounding.partial else 10**9)
        for (name, each), output in zip(signs.items(), outputs.values(), strict=True):
            each.add(kernel_policies(rounding)[name], output, expected[name])
    for each in signs.values():
        assert float(torch.cat(each.rows, dim=1).mean(dim=1).abs().max()) < ONE_SIDED / 4


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("logits", LOGIT_KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_the_kernels_hold_for_a_model_of_them(name, logits, long):
    """The bounds are also tight: outputs use a good part of theirs, and fa2's lse exceeds the bounds of the others."""
    family, definition, inputs, expected = long_case(name, logits)
    roundings, chunks = (LATENT_ROUNDINGS, (32, 64)) if name in LATENT else (ROUNDINGS, (128, 137))
    for kernel in wrappers(family):
        rounding = roundings[kernel.variant]
        split = {"chunk": chunks[long]} if rounding.partial else {}
        outputs = model(definition, inputs, rounding, **split)
        for output, comparison in evaluate(family.policies(kernel), outputs, expected).items():
            assert comparison.passed, f"{kernel.label}: {output}: {comparison}"
            assert comparison.ratio > (0.2 if output == "output" else 1e-4), f"{kernel.label}: {output}: {comparison}"
        if logits == "normal":
            lse = kernel_policies(FA3.rounding)["lse"].compare(outputs["lse"], expected["lse"])
            assert lse.passed == (not rounding.sum)


@pytest.mark.parametrize("scale", SCALES[1:])
@pytest.mark.parametrize("logits", ["large", "peaked"])
@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_the_kernels_hold_at_other_scales(name, logits, scale):
    """And only there: at the usual scale, outputs are others."""
    family, definition, inputs, expected = long_case(name, logits, scale=scale)
    roundings = LATENT_ROUNDINGS if name in LATENT else ROUNDINGS
    for kernel in wrappers(family):
        outputs = model(definition, inputs, roundings[kernel.variant])
        comparisons = evaluate(family.policies(kernel), outputs, expected)
        assert all(comparison.passed for comparison in comparisons.values()), comparisons
        usual = model(definition, {**inputs, "sm_scale": inputs["sm_scale"] / scale}, roundings[kernel.variant])
        assert not any(one.passed for one in evaluate(family.policies(kernel), usual, expected).values())


@pytest.mark.parametrize("name", DECODE)
def test_rounded_weights_do_not_meet_the_bound_of_float32_weights(name):
    family, definition, inputs, expected = long_case(name, "normal")
    outputs = model(definition, inputs, FA2.rounding)
    assert not evaluate(family.policies(wrappers(family)[0]), outputs, expected)["output"].passed


@pytest.mark.parametrize("count", [32, 33, 100, 200, 700])
def test_chunks_of_latent_attention_are_those_of_its_plan(count):
    generator = torch.Generator().manual_seed(count)
    p = torch.softmax(3 * torch.randn(2, 3, count, generator=generator, dtype=torch.float64), -1)
    values = torch.randn(1, count, 4, generator=generator, dtype=torch.float64)
    absolute, squared = torch.zeros(2, 3, 4).double(), torch.zeros(2, 3, 4).double()
    for chunk in (32, 64, 128, 192, 256, 512):
        if chunk < count:
            pairs = zip(p.split(chunk, -1), values.split(chunk, 1), strict=True)
            partial = torch.stack([part @ own for part, own in pairs])
            absolute, squared = absolute.maximum(partial.abs().sum(0)), squared.maximum(partial.square().sum(0))
    counts = torch.tensor([count, 32, max(1, count // 2)])
    padded = p.expand(3, *p.shape) * (torch.arange(count) < counts.view(-1, 1, 1, 1))
    every = padded.flatten(0, 1), values.expand(6, -1, -1)
    found = (each.unflatten(0, (3, -1)) for each in latent.planned_chunks(*every, counts))
    for bound, expected in zip(found, (absolute, squared), strict=True):
        torch.testing.assert_close(bound[0], expected)
        assert not bound[1].any(), "32 keys are one chunk, whatever they are padded to"
    assert bool(absolute.any()) is (count > 32)


@pytest.mark.parametrize("name", NAMES)
def test_the_lse_of_a_row_without_keys_is_minus_infinity_and_no_sentinel(name):
    """Nor may a row with keys have that lse."""
    family, _, _, expected = long_case(name, "normal")
    want = expected["lse"]
    empty = want.value == -math.inf
    assert empty.any()
    assert not empty.all()
    exact = want.value.float()
    for kernel in (None, *wrappers(family)):
        policy = family.policies(kernel)["lse"]
        assert policy.compare(exact, want).passed
        for wrong in (-5e4, 0.0, math.inf, math.nan, -1e30):
            assert not policy.compare(torch.where(empty, wrong, exact), want).passed, f"{kernel}: {wrong}"
        assert not policy.compare(torch.full_like(exact, -math.inf), want).passed, kernel
        assert not policy.compare(exact[:-1], want).passed


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in LATENT])
def test_kernels_are_spared_rows_without_keys_that_they_get_wrong_but_the_reference_is_not(name):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    assert {kernel.variant: kernel.plan_options for kernel in wrappers(family)} == {"fa2": SEEING, "fa3": SEEING}
    inputs = family.make_inputs(definition, plan(name, [2], [5]), Draws(0, "cpu"))
    output, lse = definition.run(**inputs)
    assert (output[:3] == 0).all()
    assert (lse[:3] == -math.inf).all()
    assert lse[3:].isfinite().all()


class Flashinfer:
    """A substitute for a wrapper of flashinfer 0.7.2, with the same calls and the results of the model."""

    def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
        assert kv_layout == "NHD"
        self.rounding = {"fa2": FA2, "fa3": FA3, "auto": CUDA_CORES}[backend].rounding

    def compute(self, q, requests, value_dim, out, lse, return_lse):
        assert return_lse
        what = (q, requests, value_dim, self.sm_scale, self.causal, self.rounding)
        results = attention_model(*what)
        out.copy_(results["output"])
        lse.copy_(results["lse"])


class PagedDecode(Flashinfer):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, q_data_type, kv_data_type, sm_scale,
    ):  # fmt: skip
        one_each = torch.arange(len(indptr))
        self.pages, self.causal, self.sm_scale = (one_each, indptr, indices, last_page_len), False, sm_scale
        self.sizes = (page_size, num_kv_heads, head_dim)

    def run(self, q, caches, *, out, lse, return_lse):
        assert all(cache.shape[1:] == self.sizes for cache in caches)
        *indices, last_page_len = self.pages
        lengths = counted_lengths(indices[1], last_page_len, self.sizes[0])
        self.compute(q, paged_requests(*caches, *indices, lengths), self.sizes[2], out, lse, return_lse)


class PagedPrefill(PagedDecode):
    def plan(self, qo_indptr, *rest, causal, **options):
        super().plan(*rest, **options)
        self.pages, self.causal = (qo_indptr, *self.pages[1:]), causal


class RaggedPrefill(Flashinfer):
    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk,
        *, head_dim_vo, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        self.indptrs, self.causal, self.sm_scale = (qo_indptr, kv_indptr), causal, sm_scale
        self.sizes = (num_kv_heads, head_dim_qk), (num_kv_heads, head_dim_vo)

    def run(self, q, k, v, *, out, lse, return_lse):
        assert (k.shape[1:], v.shape[1:]) == self.sizes
        self.compute(q, ragged_requests(k, v, *self.indptrs), v.shape[-1], out, lse, return_lse)


class Latent(Flashinfer):
    def __init__(self, workspace, *, backend):
        self.rounding = LATENT_ROUNDINGS[backend]

    def plan(
        self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
        kv_data_type, query_layout, kv_cache_layout, lse_mode,
    ):  # fmt: skip
        *offsets, kv_len_arr = metadata
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in metadata)
        assert (query_layout, kv_cache_layout, lse_mode) == ("split", "split", "base2")
        assert torch.equal(offsets[1].diff(), -(-kv_len_arr // page_size))
        self.pages, self.causal, self.sm_scale = (*offsets, kv_len_arr.tolist()), causal, sm_scale
        self.sizes = (page_size, head_dim_ckv), (page_size, head_dim_kpe)

    def run(self, *, query, kv_cache, out, lse, return_lse):
        (q_nope, q_pe), (ckv_cache, kpe_cache) = query, kv_cache
        assert (ckv_cache.shape[1:], kpe_cache.shape[1:]) == self.sizes
        keys, values = (x.unsqueeze(2) for x in (torch.cat([ckv_cache, kpe_cache], -1), ckv_cache))
        requests = paged_requests(keys, values, *self.pages)
        self.compute(torch.cat([q_nope, q_pe], -1), requests, ckv_cache.shape[-1], out, lse, return_lse)


def flash_attention(q, requests, value_dim, out, *, softmax_scale, causal, window_size, softcap, return_softmax_lse):
    """FlashAttention 3 of sglang-kernel 0.4.10, with the results of the model: the natural lse is [heads, queries]."""
    assert (causal, window_size, softcap, return_softmax_lse) == (True, (-1, -1), 0.0, True)
    what = (q, requests, value_dim, softmax_scale, causal, flash_attention_3.ROUNDING)
    results = attention_model(*what)
    output = results["output"] if out is None else out.copy_(results["output"])
    return output, results["lse"].T * math.log(2)


def flash_attn_with_kvcache(
    *, q, k_cache, v_cache, qv=None, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, num_splits, out=None,
    scheduler_metadata=None, **options,
):  # fmt: skip
    assert scheduler_metadata is None or scheduler_metadata is cache_seqlens
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert (max_seqlen_q, num_splits) == (int(cu_seqlens_q.diff().max()), 0)
    keys, queries_of = (k_cache, q) if qv is None else (torch.cat([v_cache, k_cache], -1), torch.cat([qv, q], -1))
    rows, width = page_table.shape
    pages = (cu_seqlens_q, torch.arange(rows + 1) * width, page_table.flatten(), cache_seqlens.tolist())
    requests = paged_requests(keys, v_cache, *pages)
    return flash_attention(queries_of, requests, v_cache.shape[-1], out, **options)


def cute_varlen_func(q, k, v, *, window_size, return_lse, **options):
    assert window_size == (None, None)
    return flash_attn_varlen_func(q, k, v, window_size=(-1, -1), return_softmax_lse=return_lse, out=None, **options)


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out, **options):
    longest = [int(offsets.diff().max()) for offsets in (cu_seqlens_q, cu_seqlens_k)]
    assert [max_seqlen_q, max_seqlen_k] == longest
    return flash_attention(q, ragged_requests(k, v, cu_seqlens_q, cu_seqlens_k), v.shape[-1], out, **options)


@pytest.fixture
def stand_ins(monkeypatch):
    stand_ins = {
        "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper": PagedDecode,
        "flashinfer.mla.BatchMLAPagedAttentionWrapper": Latent,
        "flashinfer.mla.MLAPlanMetadata": SimpleNamespace(csr=lambda *tensors: tensors),
        "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper": PagedPrefill,
        "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper": RaggedPrefill,
        "sgl_kernel.flash_attn.flash_attn_with_kvcache": flash_attn_with_kvcache,
        "sgl_kernel.flash_attn.flash_attn_varlen_func": flash_attn_varlen_func,
        "sgl_kernel.flash_attn.get_scheduler_metadata": lambda *, cache_seqlens, **sizes: cache_seqlens,
        "flash_attn.cute.flash_attn_varlen_func": cute_varlen_func,
    }
    install(monkeypatch, stand_ins)
    monkeypatch.setattr(attention_kernels, "WORKSPACE_BYTES", 16)
    attention_kernels.wrapper.cache_clear()
    yield
    attention_kernels.wrapper.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_called_with_what_they_take(name, stand_ins):
    """Every adapter, from inputs to compared outputs, with libraries that compute with the arguments they receive."""
    family, twin = small_twin(name)
    pages = {"shared_prefix": 1, "num_pages": 40} if name in PAGED else {}
    given = plan(name, [9, 0, 4, 3, 5], [2, 1, 4, 0, 5], **pages)
    called = [*wrappers(family), *(kernel for kernel in family.kernels if "flash_attn." in kernel.path)]
    assert len(called) == (4 if name in DECODE or "ragged" in name else 3)
    for kernel in called:
        result = run_case(twin, family, given, 3, "cpu", kernel)
        assert not result.failures, f"{kernel.label}: {result.failures}"
        assert not result.vacuous
        assert set(result.kernel) == {"output", "lse"}


def test_the_wrapper_of_latent_attention_is_called_for_a_table_of_pages(stand_ins):
    family, twin = small_twin("mla_paged_decode_page_table_h16_ckv512_kpe64_ps64")
    given = {"kv_lens": [9, 0, 4, 3, 21], "logits": "normal", "scale": 0.6, "num_pages": 40}
    given |= {"shared_prefix": 1, "unused": "nan"}
    assert {kernel.variant for kernel in wrappers(family)} == {"fa2", "fa3"}
    for kernel in wrappers(family):
        result = run_case(twin, family, given, 3, "cpu", kernel)
        assert not result.failures, f"{kernel.label}: {result.failures}"
        assert not result.vacuous
