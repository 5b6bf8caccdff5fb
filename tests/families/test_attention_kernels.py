"""Attention kernels: bounds against models of them, declared answers for rows without keys, and how they are called."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention import kernels as attention_kernels
from flashinfer_trace.families.attention import ragged
from flashinfer_trace.families.attention.cases import LOGIT_KINDS, ROWS_WITHOUT_KEYS
from flashinfer_trace.families.attention.kernels import CUDA_CORES, EMPTY, FA2, FA3, MASKED
from flashinfer_trace.families.attention.policies import LSE, kernel_policies
from flashinfer_trace.families.gqa_paged import kernels as paged_kernels
from flashinfer_trace.families.gqa_paged.plans import own_requests
from flashinfer_trace.harness.case import evaluate, run_case
from flashinfer_trace.harness.compare import Expected
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import prepare

from .attention_models import attention_model, paged_requests, ragged_requests
from .test_gqa import CAUSAL, DECODE, NAMES, PAGED, PREFILL, RAGGED, case

VARIANTS = {"CUDA cores": CUDA_CORES, "fa2": FA2, "fa3": FA3}
LENGTHS = {"kv_lens": [300, 0, 430, 33, 2], "q_lens": [3, 1, 2, 5, 2]}


def model(name, inputs, rounding, **options):
    """The model's outputs for these inputs of a family."""
    requests = own_requests(inputs, options.pop("page_size")) if name in PAGED else ragged.own_requests(inputs)
    value_dim = inputs["v_cache" if name in PAGED else "v"].shape[-1]
    return attention_model(
        inputs["q"], requests, value_dim, inputs["sm_scale"], "qo_indptr" in inputs, rounding, **options
    )


def long_case(name, logits):
    pages = {"num_pages": 800} if name in PAGED else {}
    family, definition, inputs = case(name, **LENGTHS, logits=logits, **pages)
    options = {"page_size": definition.const_axes["page_size"]} if name in PAGED else {}
    return family, family.oracle(definition, inputs), inputs, options


@pytest.mark.parametrize("chunk", [128, 137])
@pytest.mark.parametrize("logits", LOGIT_KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_the_kernels_hold_for_a_model_of_them(name, logits, chunk):
    """And they are not idle: outputs use a good part of theirs, and fa2's lse is too coarse for the others' bounds."""
    family, expected, inputs, options = long_case(name, logits)
    for kernel in family.kernels:
        rounding = VARIANTS[kernel.variant]
        split = {"chunk": chunk} if rounding.partial else {}
        outputs = model(name, inputs, rounding, **split, **options)
        for output, comparison in evaluate(family.policies(kernel), outputs, expected).items():
            assert comparison.passed, f"{kernel.label}: {output}: {comparison}"
            assert comparison.ratio > (0.2 if output == "output" else 1e-4), f"{kernel.label}: {output}: {comparison}"
        if logits == "normal":
            lse = kernel_policies(FA3, MASKED)["lse"].compare(outputs["lse"], expected["lse"])
            assert lse.passed == (not rounding.sum)


@pytest.mark.parametrize("name", DECODE)
def test_rounded_weights_do_not_meet_the_bound_of_float32_weights(name):
    family, expected, inputs, options = long_case(name, "large")
    outputs = model(name, inputs, FA2, **options)
    assert not evaluate(family.policies(family.kernels[0]), outputs, expected)["output"].passed


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_keys_are_declared_by_kernel(name):
    """flashinfer's -5e4 passes for its kernels only; a row with keys must have its lse whatever is declared."""
    family, expected, _, _ = long_case(name, "normal")
    want = expected["lse"]
    empty = want.value == -math.inf
    assert empty.any()
    assert not empty.all()
    exact = want.value.float()
    for kernel in (None, *family.kernels):
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
    assert kernel_policies(FA2, MASKED)["lse"].compare(counted, want).passed
    assert not kernel_policies(FA3, EMPTY)["lse"].compare(counted, want).passed
    assert not LSE.compare(counted, want).passed


@pytest.mark.parametrize("name", CAUSAL)
def test_kernels_are_spared_rows_without_keys_that_they_get_wrong_but_the_reference_is_not(name):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    assert {k.variant: k.limits.get(ROWS_WITHOUT_KEYS) for k in family.kernels} == {"fa2": (0, 0), "fa3": (0, 0)}
    plan = {"q_lens": [5], "kv_lens": [2], "logits": "normal", "shared_prefix": 0, "num_pages": 2, "unused": "nan"}
    inputs = family.make_inputs(definition, plan, Draws(0, "cpu"))
    output, lse = definition.run(**inputs)
    assert (output[:3] == 0).all()
    assert (lse[:3] == -math.inf).all()
    assert lse[3:].isfinite().all()


def test_decode_on_cuda_cores_is_for_the_groups_it_is_compiled_for():
    for heads, groups in {
        "h32_kv8": True,
        "h64_kv8": True,
        "h28_kv4": False,
        "h48_kv8": False,
        "h128_kv8": False,
    }.items():
        definition = flashinfer_trace.load(f"gqa_paged_decode_{heads}_d128_ps1")
        labels = [k.variant for k in family_of(definition).kernels_of(definition)]
        assert labels == (["CUDA cores"] if groups else []) + ["fa2", "fa3"]


def test_every_definition_has_the_heads_that_its_models_and_tp_give():
    """48 heads at TP 8 is 6 on one; 28 heads have no TP 8; 4 key-value heads at TP 8 are copied."""
    found = {(d.const_axes["num_qo_heads"], d.const_axes["num_kv_heads"]): d for d in flashinfer_trace.definitions()
             if d.op_type == "gqa_ragged"}  # fmt: skip
    assert (6, 1) in found
    assert {h for h, _ in found if h % 7 == 0} == {28, 14, 7}
    assert "model:qwen3-30b-a3b" in found[4, 1].tags
    for op_type, count in {"gqa_paged": 4, "gqa_ragged": 1}.items():
        assert len([d for d in flashinfer_trace.definitions() if d.op_type == op_type]) == count * len(found)


class Flashinfer:
    """Stands in for a wrapper of flashinfer 0.6.12: the same calls, the model's results."""

    def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
        assert kv_layout == "NHD"
        self.rounding = {"fa2": FA2, "fa3": FA3, "auto": CUDA_CORES}[backend]

    def compute(self, q, requests, value_dim, out, lse, return_lse):
        assert return_lse
        results = attention_model(q, requests, value_dim, self.sm_scale, self.causal, self.rounding)
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
        self.compute(q, paged_requests(*caches, *self.pages), self.sizes[2], out, lse, return_lse)


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


@pytest.fixture
def stand_ins(monkeypatch):
    """A module flashinfer made of the above."""
    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill")}
    modules["flashinfer.decode"].BatchDecodeWithPagedKVCacheWrapper = PagedDecode
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
    """Every adapter, from drawn inputs to compared outputs, on libraries that compute with the arguments they get."""
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    twin = prepare(definition, family, "cpu", full=False)
    pages = {"shared_prefix": 1, "num_pages": 40, "unused": "nan"} if name in PAGED else {}
    plan = {"kv_lens": [9, 0, 4, 3, 5], "logits": "normal", **pages}
    if name not in DECODE:
        plan["q_lens"] = [2, 1, 4, 0, 5]
    assert len(family.kernels) == (3 if name in DECODE else 2)
    for kernel in family.kernels:
        result = run_case(twin, family, plan, 3, "cpu", kernel)
        assert not result.failures, f"{kernel.label}: {result.failures}"
        assert not result.vacuous
        assert set(result.kernel) == {"output", "lse"}


def test_last_pages_are_empty_without_pages():
    inputs = {
        "kv_indptr": torch.tensor([0, 2, 2, 3], dtype=torch.int32),
        "kv_last_page_len": torch.tensor([3, 2, 1], dtype=torch.int32),
    }
    assert paged_kernels.last_page_len(inputs).tolist() == [3, 0, 1]
    del inputs["kv_last_page_len"]
    assert paged_kernels.last_page_len(inputs).tolist() == [1, 0, 1]


def test_prefill_and_ragged_names_are_what_they_say():
    assert [n for n in NAMES if "ragged" in n] == RAGGED
    assert [n for n in NAMES if "paged_prefill" in n] == PREFILL
