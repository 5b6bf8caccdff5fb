"""Wrong references of matrix products and of the indexer's top-k: corners reject each of them, whatever is drawn."""

from __future__ import annotations

import pytest
from changed_references import changed

from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify

#: Products of bf16 matrices, which float16 cannot hold.
BF16 = ("gemm_bf16_n64_k2048", "gemm_float32_out_n64_k7168", "bmm_bf16_b16_n128_k512", "gemm_bf16_bias_n10240_k8192")
#: Changes that lose numbers that are too small or too large for float16.
NARROW = ("{0}.half().float()", "torch.where({0}.abs() < 1e-5, 0.0, {0}.float())", "{0}.float().clamp(-65504, 65504)")

FP8 = ("bmm_fp8_b16_n128_k512", "fp8_scaled_mm_n4608_k7168", "fp8_blockwise_scaled_mm_n7168_k1024")
FP4 = "cutlass_scaled_fp4_mm_n7168_k256"
CHANNELS, GROUPS = "qserve_w4a8_per_chn_gemm_n7168_k2048", "qserve_w4a8_per_group_gemm_n3072_k1536"
FLUSHED = "torch.where({0}.abs() < 6e-5, 0.0, {0})"
HADAMARD = "hadamard_transform_d128"
INDEXER = [f"fast_topk_{name}_topk2048" for name in ("v2", "transform_fused", "transform_ragged_fused")]
SLOTS = "slots[sequence[:, None], positions + 1]"
OFFSET = "topk_indices_offset[:, None])"
DRAFT = "fast_topk_topk4_v129280"

MUTANTS = [
    *((name, (f"{matrix}.float()", change.format(matrix))) for name in BF16 for matrix in "AB" for change in NARROW),
    *(
        (name, (f"{matrix}.float()", f"torch.where({matrix}.float().abs() < 2**-6, 0.0, {matrix}.float())"))
        for name in FP8
        for matrix in "AB"
    ),
    *((FP4, ("scales.float()", f"scales.float().clamp({ends})")) for ends in ("max=240", "max=64", "min=2**-4")),
    (FP4, ("scales.float()", "torch.where(scales.float() < 2**-6, 0.0, scales.float())")),
    (CHANNELS, ("a_sums.float()", "(A.double().sum(1) * a_scales).half().float()")),
    (CHANNELS, ("* w_scales\n", f"* {FLUSHED.format('w_scales')}\n")),
    (CHANNELS, ("product * a_scales", f"product * {FLUSHED.format('a_scales')}")),
    (CHANNELS, ("w_szeros).to", f"{FLUSHED.format('w_szeros')}).to")),
    (GROUPS, ("* w_scales).to", f"* {FLUSHED.format('w_scales')}).to")),
    (GROUPS, ("* a_scales[:, None]", f"* {FLUSHED.format('a_scales')}[:, None]")),
    (HADAMARD, ("* scale)", "* float(torch.tensor(scale).bfloat16()))")),
    (HADAMARD, ("(values.view(x.shape) * scale)", "(values.view(x.shape).bfloat16() * scale)")),
    *(
        (name, change)
        for name in INDEXER
        for change in (
            ("own = scores.gather", "own = scores.half().float().gather"),
            ("own = scores.gather", "own = scores.clamp(-65504, 65504).gather"),
            ("~exists, -torch.inf", "~exists, -1e30"),
            (".clamp_max(columns - 1)", ".clamp_max(columns - 2)"),
            ("(exists, best,", "(exists, best & 0x7FFF,"),
            ("(exists, best,", "(exists, best & 0xFFFF,"),
        )
    ),
    (INDEXER[1], (SLOTS, f"{SLOTS}.to(torch.int16).to(torch.int32)")),
    (INDEXER[1], (SLOTS, f"torch.where(positions < 0, -1, {SLOTS} & 0xFFFF)")),
    (INDEXER[2], (OFFSET, OFFSET.replace(")", ".to(torch.int16))"))),
    (INDEXER[2], (OFFSET, OFFSET.replace(")", " & 0xFFFF)"))),
    (DRAFT, ("values.argsort", "values.half().argsort")),
    (DRAFT, ("values.argsort", "torch.where(values < 1e-30, 0.0, values).argsort")),
]


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_corner_rejects_it_whatever_is_drawn(name, change):
    definition = changed(name, *change)
    assert verify(Job(definition, family_of(definition)), examples=0).status == "failed"
