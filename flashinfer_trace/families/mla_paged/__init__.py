"""DeepSeek multi-head latent attention over a paged cache: decode and causal prefill, page size 1 and others."""

from __future__ import annotations

from flashinfer_trace.families.attention.cases import paged_family, usual_scale
from flashinfer_trace.families.attention.flash_attention import LATENT_DECODE, LATENT_PREFILL
from flashinfer_trace.families.mla_paged.blackwell import TRTLLM_DECODE
from flashinfer_trace.families.mla_paged.inputs import SCALED_DIM, make_inputs, oracle
from flashinfer_trace.families.mla_paged.kernels import DECODE, PREFILL
from flashinfer_trace.families.mla_paged.sglang_kernels import FLASH_MLA, TRITON_DECODE
from flashinfer_trace.harness.family import Family, Kernel

TWIN = {"num_qo_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16}


def family(name: str, page_size: int, kernels: tuple[Kernel, ...]) -> Family:
    twin = {**TWIN, "page_size": page_size}
    return paged_family(name, "mla_paged", twin, make_inputs, oracle, kernels, (usual_scale(SCALED_DIM),))


FAMILIES = (
    family("mla_paged_decode_ps1", 1, (*DECODE, LATENT_DECODE, TRITON_DECODE)),
    family("mla_paged_decode", 4, (*DECODE, LATENT_DECODE, TRTLLM_DECODE, FLASH_MLA)),
    family("mla_paged_prefill_causal_ps1", 1, (*PREFILL, LATENT_PREFILL)),
    family("mla_paged_prefill_causal", 4, (*PREFILL, LATENT_PREFILL)),
)
