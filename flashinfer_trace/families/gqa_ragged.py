"""Causal grouped-query attention over ragged keys and values, plain, with capped logits or with a window of keys.

flashinfer's wrapper takes the cap and the window in plan(), so the kernels of all of them are the same.
"""

from __future__ import annotations

from flashinfer_trace.families.attention.ragged import memory, ragged_family
from flashinfer_trace.families.attention.variants import TWINS, expected_of_variant, variant_family
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.verdict.compare import Expected


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return expected_of_variant(definition, inputs, memory(inputs), True)


#: Three query heads per group, so h // 3, h % 2 and h // 2 differ.
PLAIN = ragged_family("gqa_ragged_prefill_causal", "gqa_ragged", {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64})
FAMILIES = (
    PLAIN,
    *(variant_family(PLAIN, variant, PLAIN.kernels, oracle) for variant in TWINS if "sinks" not in variant),
)
