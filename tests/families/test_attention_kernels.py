"""Attention kernels: their bounds against models of them, declared results for rows without keys, and their calls."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from attention_cases import CAUSAL, DECODE, LATENT, NAMES, PAGED, case, plan, queries
from emulated_attention import attention_model, counted_lengths, paged_requests, ragged_requests, requests_in

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention import kernels as attention_kernels
from flashinfer_trace.families.attention import ragged
from flashinfer_trace.families.attention.cases import LOGIT_KINDS, SCALES
from flashinfer_trace.families.attention.kernels import CUDA_CORES, EMPTY, FA2, FA3, MASKED, SEEING
from flashinfer_trace.families.attention.policies import LSE, kernel_policies
from flashinfer_trace.families.gqa_paged import inputs as gqa
from flashinfer_trace.families.mla_paged import inputs as latent
from flashinfer_trace.families.mla_paged.kernels import BACKENDS as LATENT_BACKENDS
from flashinfer_trace.harness.case import evaluate, run_case
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import prepare
from flashinfer_trace.verdict.compare import Expected

ROUNDINGS = {backend.name: backend.rounding for backend in (CUDA_CORES, FA2, FA3)}
LATENT_ROUNDINGS = {backend.name: backend.rounding for backend in LATENT_BACKENDS}
LENGTHS = {"kv_lens": [300, 0, 430, 33, 2], "q_lens": [3, 1, 2, 5, 2]}


def model(definition, inputs, rounding, **options):
    """The model's outputs for these inputs of a family."""
    is_latent, page_size = definition.op_type == "mla_paged", definition.const_axes.get("page_size")
    memory = (latent if is_latent else gqa).memory(inputs, page_size) if page_size else ragged.memory(inputs)
    value_dim = inputs[next(name for name in ("ckv_cache", "v_cache", "v") if name in inputs)].shape[-1]
    return attention_model(
        *(queries(inputs), requests_in(memory), value_dim, inputs["sm_scale"], "qo_indptr" in inputs, rounding),
        **options,
        admits_nothing=is_latent,
    )


def long_case(name, logits, **rest):
    """(family, twin, inputs, expected) of requests that kernels split."""
    pages = {"num_pages": 800} if name in PAGED else {}
    family, definition, inputs = case(name, **LENGTHS, logits=logits, **pages, **rest)
    return family, definition, inputs, family.oracle(definition, inputs)


def wrappers(family):
    """flashinfer's wrappers. Kernels for Blackwell are emulated in `emulated_speculative`."""
    return [kernel for kernel in family.kernels if kernel.path.endswith("Wrapper")]


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
            lse = kernel_policies(FA3.rounding, MASKED)["lse"].compare(outputs["lse"], expected["lse"])
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
    family, definition, inputs, expected = long_case(name, "large")
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
def test_rows_without_keys_are_declared_by_kernel(name):
    """-5e4 passes for flashinfer's kernels only; a row with keys must have the correct lse, whatever is declared."""
    family, _, _, expected = long_case(name, "normal")
    want = expected["lse"]
    empty = want.value == -math.inf
    assert empty.any()
    assert not empty.all()
    exact = want.value.float()
    for kernel in (None, *wrappers(family)):
        policy = family.policies(kernel)["lse"]
        declared = kernel is not None
        assert policy.compare(exact, want).passed
        assert policy.compare(torch.where(empty, -5e4, exact), want).passed == declared
        for wrong in (0.0, -4.9e4, -5.1e4, math.inf, math.nan, -1e30):
            assert not policy.compare(torch.where(empty, wrong, exact), want).passed, f"{kernel}: {wrong}"
        for wrong in (-5e4, -math.inf):
            assert not policy.compare(torch.full_like(exact, wrong), want).passed, f"{kernel}: {wrong}"
        assert not policy.compare(exact[:-1], want).passed
        assert ("-50000" in policy.reason) == declared


def test_a_masked_row_may_count_its_masked_keys_only_where_that_is_declared():
    parts = dict.fromkeys(("lse", "lse_logit", "others", "squared_others"), torch.zeros(1, 1))
    want = Expected(torch.tensor([[-math.inf]], dtype=torch.float64), {**parts, "length": torch.ones(1, 1)})
    counted = torch.tensor([[-5e4 + 9.0]])
    assert kernel_policies(FA2.rounding, MASKED)["lse"].compare(counted, want).passed
    assert not kernel_policies(FA3.rounding, EMPTY)["lse"].compare(counted, want).passed
    assert not LSE.compare(counted, want).passed


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
    """A substitute for a wrapper of flashinfer 0.6.12, with the same calls and the results of the model."""

    admits_nothing = False

    def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
        assert kv_layout == "NHD"
        self.rounding = {"fa2": FA2, "fa3": FA3, "auto": CUDA_CORES}[backend].rounding

    def compute(self, q, requests, value_dim, out, lse, return_lse):
        assert return_lse
        what = (q, requests, value_dim, self.sm_scale, self.causal, self.rounding)
        results = attention_model(*what, admits_nothing=self.admits_nothing)
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
    admits_nothing = True

    def __init__(self, workspace, *, backend):
        self.rounding = LATENT_ROUNDINGS[backend]

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
        causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert kv_len_arr.dtype == torch.int32
        self.pages, self.causal, self.sm_scale = (
            (qo_indptr, kv_indptr, kv_indices, kv_len_arr.tolist()),
            causal,
            sm_scale,
        )
        self.sizes = (page_size, head_dim_ckv), (page_size, head_dim_kpe)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out, lse, return_lse):
        assert (ckv_cache.shape[1:], kpe_cache.shape[1:]) == self.sizes
        keys, values = (x.unsqueeze(2) for x in (torch.cat([ckv_cache, kpe_cache], -1), ckv_cache))
        requests = paged_requests(keys, values, *self.pages)
        self.compute(torch.cat([q_nope, q_pe], -1), requests, ckv_cache.shape[-1], out, lse, return_lse)


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules flashinfer.* that contain the classes above."""
    modules = {
        name: ModuleType(name) for name in ("flashinfer", *(f"flashinfer.{x}" for x in ("decode", "mla", "prefill")))
    }
    modules["flashinfer.decode"].BatchDecodeWithPagedKVCacheWrapper = PagedDecode
    modules["flashinfer.mla"].BatchMLAPagedAttentionWrapper = Latent
    modules["flashinfer.prefill"].BatchPrefillWithPagedKVCacheWrapper = PagedPrefill
    modules["flashinfer.prefill"].BatchPrefillWithRaggedKVCacheWrapper = RaggedPrefill
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention_kernels, "WORKSPACE_BYTES", 16)
    attention_kernels.wrapper.cache_clear()
    yield
    attention_kernels.wrapper.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_called_with_what_they_take(name, stand_ins):
    """Every adapter, from inputs to compared outputs, with libraries that compute with the arguments they receive."""
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    twin = prepare(definition, family, "cpu", full=False)
    pages = {"shared_prefix": 1, "num_pages": 40} if name in PAGED else {}
    given = plan(name, [9, 0, 4, 3, 5], [2, 1, 4, 0, 5], **pages)
    assert len(wrappers(family)) == (3 if name in DECODE else 2)
    for kernel in wrappers(family):
        result = run_case(twin, family, given, 3, "cpu", kernel)
        assert not result.failures, f"{kernel.label}: {result.failures}"
        assert not result.vacuous
        assert set(result.kernel) == {"output", "lse"}


def test_the_wrapper_of_latent_attention_is_called_for_a_table_of_pages(stand_ins):
    definition = flashinfer_trace.load("mla_paged_decode_page_table_h16_ckv512_kpe64_ps64")
    family = family_of(definition)
    twin = prepare(definition, family, "cpu", full=False)
    given = {"kv_lens": [9, 0, 4, 3, 21], "logits": "normal", "scale": 0.6, "num_pages": 40}
    given |= {"shared_prefix": 1, "unused": "nan"}
    assert {kernel.variant for kernel in wrappers(family)} == {"fa2", "fa3"}
    for kernel in wrappers(family):
        result = run_case(twin, family, given, 3, "cpu", kernel)
        assert not result.failures, f"{kernel.label}: {result.failures}"
        assert not result.vacuous
