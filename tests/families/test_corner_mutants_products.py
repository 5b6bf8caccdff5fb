"""Wrong references of matrix products and of the indexer's top-k: corners reject each of them, whatever is drawn."""

from __future__ import annotations

import pytest
from changed_references import changed

from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify

#: Products of bf16 matrices, which float16 cannot hold.
BF16 = ("gemm_bf16_n64_k2048", "gemm_float32_out_n64_k7168", "bmm_bf16_b16_n128_k512", "gemm_bf16_bias_n10240_k8192")
#: What loses the numbers that are too small for float16, or too large.
NARROW = ("{0}.half().float()", "torch.where({0}.abs() < 1e-5, 0.0, {0}.float())", "{0}.float().clamp(-65504, 65504)")

MUTANTS = [
    *((name, (f"{matrix}.float()", change.format(matrix))) for name in BF16 for matrix in "AB" for change in NARROW),
]


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_corner_rejects_it_whatever_is_drawn(name, change):
    definition = changed(name, *change)
    assert verify(Job(definition, family_of(definition)), examples=0).status == "failed"
