"""Kernels that take rows for dense, and kernels that let one row into another, are refused; references are not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from whole_dataset import FAMILIES, FIRST

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.inputs import Draws, clone_inputs
from flashinfer_trace.harness.layouts import APART, FAR, FAR_ELEMENTS, LAYOUT, NAN_ROW, STRIDED, rows_apart
from flashinfer_trace.harness.power import stand_in
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.judgment import judged

#: Families without strided inputs, by op_type or name, and why.
DENSE_ONLY = {
    "_gate": "what its kernels do to strides has not been read",
    "activation": "kernels ignore strides (docs/kernel_findings.md)",
    "cutlass_scaled_fp4_mm": "operands are packed",
    "bmm_fp8": "operands are packed",
    "fp8_": "kernels take packed codes",
    "int8_scaled_mm": "kernels take packed codes",
    "qserve": "kernels take packed codes",
    "_k_cache": "rows are bytes of several parts",
    "layernorm": "its kernel takes dense rows",
    "merge_state": "its kernel takes dense states",
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
    "_gate": "what its kernels do to rows of NaN has not been read",
    "concat": "copies of any bits are compared bit for bit",
    "kv_cache": "copies of any bits are compared bit for bit",
    "cutlass_scaled_fp4_mm": "no kernel of it has run",
    "qserve": "codes are integers, and activations have sums of their own",
    "moe": "rows of other kernels, sums over several rows, and integers",
    "renorm": "kernels search until a sum of probabilities is met",
    "sampling": "kernels draw again until a token is accepted",
    "softmax": "its kernel reduces a row in several blocks",
    "sparse_attention": "the order of NaN among scores is not defined",
    "speculative": "kernels compare with random numbers, and integers",
    "rope_with_cos_sin": "heads come before tokens, or caches are written",
}


#: op_types whose kernels were read for what they do to rows; families of others have neither layout.
READ = {
    *("activation", "concat", "dsa_paged", "gemm", "gqa_paged", "gqa_ragged", "kv_cache", "layernorm", "merge_state"),
    *("mla_paged", "mla_ragged", "moe", "quantization", "renorm", "rmsnorm", "rope", "sampling", "sparse_attention"),
    "speculative",
}


def reason(reasons, name, family):
    return next((why for key, why in reasons.items() if key in name or key == family.op_type), "")


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.op_type in READ])
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
    "gemm_bf16_n102400_k2048",
    "moe_bf16_expert_gemm_topk8_r8_e32_n7168_k2048",
    "gqa_paged_decode_h16_kv2_d128_ps64",
    "mla_paged_decode_h16_ckv512_kpe64_ps64",
]
OF_ROWS = [
    "rmsnorm_h512",
    "silu_and_mul_i176",
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


def test_far_rows_begin_beyond_what_32_bits_count():
    """Memory that nobody touches costs nothing here."""
    family = FAMILIES["rmsnorm"]
    definition = flashinfer_trace.load("rmsnorm_h512")
    plan = {**family.plan_for_axes(definition, {"batch_size": 3}, Draws(0, "cpu")), LAYOUT: FAR}
    far, near = (
        family.inputs(definition, each, 1, "cpu")["hidden_states"] for each in (plan, {**plan, LAYOUT: STRIDED})
    )
    assert torch.equal(far, near) and 2 * far.stride(0) >= FAR_ELEMENTS
    assert all(LAYOUT not in each or each[LAYOUT] != FAR for each in Job(definition, family).corners)


def test_rows_that_are_not_judged_may_be_anything():
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    expected = Expected(value, unjudged=torch.tensor([False, True]))
    actual = torch.tensor([[1.0, 2.0], [torch.nan, 7.0]])
    assert torch.equal(judged(actual, expected), value.float())
    assert judged(actual[:1], expected).shape == (1, 2)
