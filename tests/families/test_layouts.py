"""Kernels that take rows for dense, and kernels that let one row into another, are refused; references are not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from whole_dataset import FAMILIES, FIRST

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness import far
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.family import FamilyError
from flashinfer_trace.harness.inputs import clone_inputs
from flashinfer_trace.harness.layouts import APART, FAR, LAYOUT, NAN_ROW, STRIDED, rows_apart
from flashinfer_trace.harness.power import stand_in
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.judgment import judged

#: Families without strided inputs, by op_type or name, and why.
DENSE_ONLY = {
    "activation": "kernels ignore strides (docs/kernel_findings.md)",
    "batch": "they are vectors of integers",
    "cutlass_scaled_fp4_mm": "operands are packed",
    "bmm_fp8": "operands are packed",
    "fp8_": "kernels take packed codes",
    "int8_scaled_mm": "kernels take packed codes",
    "l2norm": "its callers make rows dense",
    "fused_qkvzba": "kernels take dense projections",
    "qserve": "kernels take packed codes",
    "_k_cache": "rows are bytes of several parts",
    "layernorm": "its kernel takes dense rows",
    "merge_state": "its kernel takes dense states",
    "mhc": "kernels take dense streams",
    "moe": "rows are made by the kernel before, densely; quantizers take dense rows",
    "quant": "quantizers take dense rows",
    "renorm": "kernels take dense rows of probabilities",
    "sampling": "kernels take dense rows of probabilities",
    "softmax": "kernels take dense rows of logits",
    "sparse_attention": "scores have more columns than keys in every case",
    "speculative": "trees are dense",
}
#: Families in which no row is NaN, and why.
NOT_ISOLATED = {
    "decode": "sequences share a pool of states",
    "causal_conv1d": "sequences share a pool of states",
    "prefill": "tokens of a sequence share its state",
    "rope_gate": "gates of any bits are copied",
    **dict.fromkeys(
        ("mul_clamp", "situ_and_mul", "swiglu_oai"), "what their kernels do to rows of NaN has not been read"
    ),
    "batch": "they are integers",
    "silu_and_mul_clamp": "a clamp may take the limit for NaN",
    "swiglu_oai": "a clamp may take the limit for NaN",
    "qk_gemma_rmsnorm_rope_gate": "gates are copies of any bits",
    "concat": "copies of any bits are compared bit for bit",
    "fused_qkvzba": "copies of any bits are compared bit for bit",
    "kv_cache": "copies of any bits are compared bit for bit",
    "cutlass_scaled_fp4_mm": "no kernel of it has run",
    "gdn_verify": "sequences share a pool of states",
    "qserve": "codes are integers, and activations have sums of their own",
    "moe": "rows of other kernels, sums over several rows, and integers",
    "renorm": "kernels search until a sum of probabilities is met",
    "sampling": "kernels draw again until a token is accepted",
    "softmax": "its kernel reduces a row in several blocks",
    "sparse_attention": "the order of NaN among scores is not defined",
    "speculative": "kernels compare with random numbers, and integers",
    "rope_with_cos_sin": "heads come before tokens, or caches are written",
    **dict.fromkeys(
        ("silu_and_mul_clamp", "situ_and_mul", "swiglu_oai", "_gate"),
        "what its kernels do to rows of NaN has not been read",
    ),
}


def reason(reasons, name, family):
    return next((why for key, why in reasons.items() if key in name or key == family.op_type), "")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_each_layout_or_a_reason(name):
    definition, family = FIRST[name], FAMILIES[name]
    layouts = family.layouts(definition)
    for layout, reasons in ((STRIDED, DENSE_ONLY), (NAN_ROW, NOT_ISOLATED)):
        assert layout in layouts or reason(reasons, name, family), f"{name} is never {layout}, and nothing says why"
    found = [plan.get(LAYOUT) for plan in Job(definition, family).corners]
    assert set(layouts) <= set(found)


def verdict(name, wrong):
    """The report on a kernel that computes the reference of what `wrong` makes of its inputs and outputs."""
    definition = flashinfer_trace.load(name)
    family = family_of(definition)

    def call(sized, inputs, outputs):
        return wrong(family, inputs, lambda given: reference_outputs(sized, given, 0))

    return verify(Job(definition, family, dataclasses.replace(stand_in(None), call=call)), examples=0)


def takes_rows_for_dense(family, inputs, run):
    """Reads memory from the first element on, whatever the strides are."""
    names = [name for name in family.strided if name in inputs]
    flat = {name: inputs[name].as_strided(inputs[name].shape, dense_strides(inputs[name])) for name in names}
    return run({**inputs, **{name: value.clone() for name, value in flat.items()}})


def dense_strides(value):
    return torch.empty(value.shape, device="meta").stride()


def masks_by_zero(family, inputs, run):
    """Adds all rows of its inputs, or all values of attention, times 0: what a product with a mask does."""
    if "v_cache" in inputs:
        rows = [inputs["v_cache"][inputs["kv_indices"].long()]]
    else:
        rows = [inputs["v"]] if "v" in inputs else [inputs[name] for name in family.isolated if name in inputs]
    every = sum(one.float().sum() for one in rows) * 0
    return {name: value + every.to(value.dtype) for name, value in run(inputs).items()}


OF_STRIDES = [
    "rmsnorm_h512",
    "fused_qknorm_h16_kv2_d128",
    "rope_with_cos_sin_cache_neox_style_h32_kv8_d128_rd128",
    "concat_mla_k_h128_nope128_kpe64",
    "gdn_packed_decode_qk4_v8_d128",
    "kda_prefill_qk8_v8_d128",
    "mamba_ssu_decode_h16_d64_s128_ng1",
    "causal_conv1d_c2048_w4",
    "gemm_bf16_n102400_k2048",
    "moe_bf16_expert_gemm_topk8_r8_e32_n7168_k2048",
    "gqa_paged_decode_h16_kv2_d128_ps64",
    "mla_paged_decode_h16_ckv512_kpe64_ps64",
]
OF_ROWS = [
    "rmsnorm_h512",
    "silu_and_mul_i176",
    "gdn_decode_qk4_v8_d128_k_last",
    "rmsnorm_silu_gate_d128",
    "gemm_n128_k2048",
    "fp8_blockwise_scaled_mm_n12288_k1536",
    "moe_bf16_expert_gemm_topk8_r8_e32_n7168_k2048",
    "moe_fp8_block_scale_grouped_gemm_e32_n7168_k2048",
    "gqa_paged_decode_h10_kv2_d128_ps1",
    "gqa_extend_causal_h16_kv16_qk192_vo128",
]


@pytest.mark.parametrize("name", OF_STRIDES)
def test_a_kernel_that_takes_rows_for_dense_is_refused(name):
    report = verdict(name, takes_rows_for_dense)
    assert report.status == "failed" and f'"{LAYOUT}":"{STRIDED}"' in report.message


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_kernel_that_multiplies_other_rows_by_zero_is_refused(name):
    report = verdict(name, masks_by_zero)
    assert report.status == "failed" and f'"{LAYOUT}":"{NAN_ROW}"' in report.message


def test_a_mixture_that_multiplies_by_experts_that_nobody_chose_is_refused():
    def dense(family, inputs, run):
        every = inputs["gemm2_weights"].float().sum()
        return {name: value + (every * 0).to(value.dtype) for name, value in run(inputs).items()}

    report = verdict("moe_bf16_softmax_routing_topk2_e8_h4096_i14336", dense)
    assert report.status == "failed" and f'"{LAYOUT}":"{NAN_ROW}"' in report.message


def test_memory_between_rows_is_nan_and_is_copied():
    inputs = {"x": torch.arange(12.0).view(3, 2, 2), "n": 1}
    apart = rows_apart(inputs, ["x"])
    assert torch.equal(apart["x"], inputs["x"]) and apart["x"].stride() == (4 + APART // 4, 2, 1)
    copy = clone_inputs(apart)["x"]
    assert torch.equal(copy, inputs["x"]) and copy.stride() == apart["x"].stride() and copy.data_ptr() != 0
    assert copy.as_strided((4 + APART // 4,), (1,))[4:].isnan().all()


def with_far_rows(monkeypatch, name, kernel):
    """The report on a kernel on the far plan of a Definition, at the small twin: as few rows as that has are far."""
    monkeypatch.setattr(far, "FAR_ELEMENTS", 1 << 12)
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    job = Job(definition, family, dataclasses.replace(stand_in(None), call=kernel, in_place=IN_PLACE.get(name, ())))
    plan = family.far_plan(dataclasses.replace(job.request, large=True))
    return verify(job, plan=plan)


def right(definition, inputs, outputs):
    """The reference, into whose cache, if it has one, others look: as in place as it can be."""
    computed = reference_outputs(definition, inputs, 0)
    return {name: inputs[of].copy_(computed[name]) if (of := CACHES.get(name)) else computed[name] for name in computed}


def wraps(bits):
    """A kernel whose offsets into inputs are kept in so many bits."""

    def call(definition, inputs, outputs):
        found = {}
        for name, value in inputs.items():
            found[name] = value
            if isinstance(value, torch.Tensor) and value.numel() > 1 << bits:
                flat = value.reshape(-1).view(torch.uint8 if value.itemsize == 1 else value.dtype)
                read = torch.arange(value.numel()) % (1 << bits)
                found[name] = flat[read].view(value.dtype).view(value.shape)
        return reference_outputs(definition, found, 0)

    return call


CACHES = {"k_cache_out": "k_cache", "v_cache_out": "v_cache", "state_out": "state", "kv_buffer_out": "kv_buffer"}
IN_PLACE = {"store_cache_d1024": ("k_cache", "v_cache"), "set_mla_kv_buffer_ckv512_kpe64": ("kv_buffer",)}
OF_FAR = [
    "fused_store_index_k_cache_d128_ps64",
    *("moe_fp8_block_scale_grouped_gemm_e32_n7168_k2048", "gqa_ragged_prefill_causal_h32_kv8_d128"),
    *("mla_ragged_prefill_causal_h128_qk192_vo128", "gqa_ragged_prefill_causal_h32_kv16_d128_window1024"),
    *("rmsnorm_h2048", "silu_and_mul_i1024", "gemm_n10240_k8192", "fp8_scaled_mm_n2112_k7168", "merge_state_h16_d128"),
    *("gqa_paged_decode_h10_kv2_d128_ps64", "mla_paged_prefill_causal_h128_ckv512_kpe64_ps1", "moe_shuffle_rows_h2048"),
    *("dsa_sparse_attention_h128_ckv512_kpe64_topk2048_ps64", "gqa_extend_causal_h128_kv128_qk192_vo128"),
    *(
        "causal_conv1d_update_c2048_w4",
        "top_k_renorm_probs_v102400",
        "rope_with_cos_sin_cache_neox_style_h32_kv8_d128_rd128",
    ),
    *("mla_paged_decode_page_table_h128_ckv512_kpe64_ps128", *IN_PLACE),
]


@pytest.mark.parametrize("name", OF_FAR)
def test_offsets_that_wrap_around_are_refused_on_far_rows(monkeypatch, name):
    report = with_far_rows(monkeypatch, name, right)
    assert report.status == "passed" and report.cases == 1, report.message
    report = with_far_rows(monkeypatch, name, wraps(12))
    assert report.status == "failed" and f'"{LAYOUT}":"{FAR}"' in report.message


def test_a_kernel_that_spoils_its_far_rows_is_refused(monkeypatch):
    def spoils(definition, inputs, outputs):
        found = right(definition, inputs, outputs)
        inputs["hidden_states"][-1, 0] += 1
        return found

    report = with_far_rows(monkeypatch, "rmsnorm_h2048", spoils)
    assert "changed input hidden_states" in report.message


def test_far_rows_take_a_gpu():
    definition = flashinfer_trace.load("rmsnorm_h2048")
    job = Job(definition, family_of(definition))
    assert all(each.get(LAYOUT) != FAR for each in job.corners)
    with pytest.raises(FamilyError, match="it takes a GPU"):
        assert job.far_plan
    assert Job(definition, job.family, device="cuda").far_plan[LAYOUT] == FAR
    assert far.rows_before(definition) * 2048 >= 1 << 31
    definition = flashinfer_trace.load("gemm_bf16_n256_k7168")
    family = family_of(definition)
    kernels = {kernel.label: kernel for kernel in family.kernels}
    plans = {
        label: family.far_plan(Job(definition, family, kernel, "cuda").request) for label, kernel in kernels.items()
    }
    assert plans["torch.matmul[cuBLAS]"] and not plans["sgl_kernel.dsv3_router_gemm"], "it takes 16 rows"
    definition = flashinfer_trace.load("merge_state_h16_d128")
    (kernel,) = family_of(definition).kernels
    assert Job(definition, family_of(definition), kernel, "cuda").far_plan[LAYOUT] == FAR, "it takes no empty batch"


def test_rows_that_are_not_judged_may_be_anything():
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    expected = Expected(value, unjudged=torch.tensor([False, True]))
    actual = torch.tensor([[1.0, 2.0], [torch.nan, 7.0]])
    assert torch.equal(judged(actual, expected), value.float())
    assert judged(actual[:1], expected).shape == (1, 2)
