"""Causal grouped-query attention on ragged tensors with capped logits or a window of keys.

flashinfer's wrapper takes both in plan(), so its kernels are those of the plain family.
"""

from __future__ import annotations

from flashinfer_trace.families import gqa_ragged
from flashinfer_trace.families.attention.ragged import memory
from flashinfer_trace.families.attention.variants import TWINS, expected_of_variant, variant_family
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.verdict.compare import Expected

__all__ = ["FAMILIES"]


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output and lse."""
    return expected_of_variant(definition, inputs, memory(inputs), True)


FAMILIES = tuple(
    variant_family(plain, variant, plain.kernels, oracle)
    for plain in gqa_ragged.FAMILIES
    for variant in TWINS
    if "sinks" not in variant
)
