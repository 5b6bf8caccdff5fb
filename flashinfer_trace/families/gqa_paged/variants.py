"""Grouped-query attention over a paged cache with capped logits, a window of keys, or sinks.

flashinfer's wrappers take the cap and the window in plan(). Sinks are an argument of
BatchAttentionWithAttentionSinkWrapper, which has one kernel for decode and prefill. From its source
(flashinfer 0.7.2, jit/attention/variants.py):

- fa2 and fa3 add exp2(sink log2(e) - m) to the denominator, and return an lse that includes it. Where the sink is above
  m, they raise m to it, and multiply what the keys gave by ex2.approx.ftz of the difference, which is 0 below 2^-126.
- For a request without keys, fa2 returns 0 and the sink as lse, as the Definitions say. fa3 skips it, and returns an
  lse of -inf.
- The name of the compiled module does not contain the head size: a process must use one head size for each dtype,
  backend, and presence of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flashinfer_trace.families import gqa_paged
from flashinfer_trace.families.attention import flash_attention
from flashinfer_trace.families.attention.kernels import (
    BATCHES,
    FA2,
    FA3,
    PAGES,
    QUERIES,
    SEEING,
    Backend,
    flashinfer_kernels,
    masking,
    wrapper,
)
from flashinfer_trace.families.attention.policies import kernel_policies
from flashinfer_trace.families.attention.variants import (
    SINKS_NEED_KEYS,
    TWINS,
    expected_of_variant,
    variant_family,
    with_flushed_weights,
)
from flashinfer_trace.families.gqa_paged.inputs import memory
from flashinfer_trace.families.gqa_paged.kernels import last_page_len, sizes
from flashinfer_trace.families.gqa_paged.triton_variants import decode_kernel, with_cap
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import Expected

SINK_PATH = "flashinfer.attention.BatchAttentionWithAttentionSinkWrapper"
DECODE, PREFILL = "gqa_paged_decode", "gqa_paged_prefill_causal"


def run_with_sinks(backend: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """flashinfer's wrapper of attention with sinks."""
    from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper

    q, (heads, kv_heads, dim, page_size) = inputs["q"], sizes(definition)
    window = int(masking(definition).get("window_left", -1))
    attention = wrapper(
        BatchAttentionWithAttentionSinkWrapper,
        q.device,
        kv_layout="NHD",
        backend=backend,
        head_dim_qk=dim,
        head_dim_vo=dim,
        window_left=window,
    )
    one_each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    attention.plan(
        inputs.get("qo_indptr", one_each),
        inputs["kv_indptr"],
        inputs["kv_indices"],
        last_page_len(inputs),
        heads,
        kv_heads,
        dim,
        page_size,
        causal=True,
        window_left=window,
        q_data_type=q.dtype,
        kv_data_type=inputs["k_cache"].dtype,
    )
    caches, scale = (inputs["k_cache"], inputs["v_cache"]), float(inputs["sm_scale"])
    attention.run(q, caches, inputs["sinks"], scale, out=outputs["output"], lse=outputs["lse"], return_lse=True)
    return outputs


def sink_kernels(decode: bool) -> tuple[Kernel, ...]:
    """FlashAttention 3, and one kernel per backend of flashinfer.

    The lse of a request without keys is the sink, or there are no such requests.
    """
    limits = {**BATCHES, **PAGES, **({} if decode else QUERIES)}
    kernels = flashinfer_kernels(SINK_PATH, run_with_sinks, (FA2, FA3), limits=limits, plan_options=SEEING)
    backends: Sequence[Backend] = (FA2, FA3)
    policies = [kernel_policies(backend.rounding) for backend in backends]
    flash = flash_attention.with_sinks(flash_attention.DECODE if decode else flash_attention.PREFILL)
    return flash, *(
        replace(
            kernel,
            compare={**compare, "output": with_flushed_weights(compare["output"])},
            plan_options=SINKS_NEED_KEYS if backend is FA3 else kernel.plan_options,
            common=None if backend is FA3 else SINKS_NEED_KEYS,
        )
        for kernel, backend, compare in zip(kernels, backends, policies, strict=True)
    )


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output and lse; where logits are capped, their parts have the cap as well."""
    page_size = definition.const_axes["page_size"]
    found = expected_of_variant(definition, inputs, memory(inputs, page_size), "qo_indptr" in inputs)
    return with_cap(definition, found)


def family(plain: Family, variant: str) -> Family:
    """The record of one variant, which has one family for all page sizes."""
    decode = plain.name == DECODE
    kernels = sink_kernels(decode) if "sinks" in variant else plain.kernels
    found = variant_family(plain, variant, kernels, oracle)
    if decode and variant in ("softcap", "sinks"):
        found = replace(found, kernels=(*found.kernels, decode_kernel(variant)))
    return found


FAMILIES = tuple(
    family(plain, variant) for plain in gqa_paged.FAMILIES if plain.name in (DECODE, PREFILL) for variant in TWINS
)
