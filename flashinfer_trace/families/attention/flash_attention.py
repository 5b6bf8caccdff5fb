"""FlashAttention 3 as SGLang's fa3 backend calls it, its default on Hopper: over pages, and over ragged tensors; and
FlashAttention 4 over ragged tensors.

From its source (sglang-kernel 0.4.10, which builds FlashAttention's hopper/), and SGLang 0.5.23's
flashattention_backend.py:

- Masked logits are -inf. Weights are summed in float32 before they are rounded to bf16 for the product with the values.
- The keys of a request are split where the GPU is not full (num_splits 0 asks for its own choice). Partial outputs stay
  in float32.
- The lse is natural. A row without keys has an output of 0 and an lse of -inf.
- A window counts the keys before a query's own one; tanh of capped logits is tanh.approx.
- Sinks are bf16. One adds exp(sink - m) to the denominator, where m is the largest logit of a key: beyond float32's
  range the output is 0 and the lse inf.
- Latent attention passes the rotary parts as q and k, and the compressed ones as qv and v. Pages of 64 tokens are whole
  tiles, which are loaded whole: a NaN after the last key of a request comes out, as 0 times NaN. Seen on an H200, for
  decode and prefill. So are pages of 128 tokens of grouped heads where a request has more rows of queries than a tile
  (`single_keys` of the table); others are loaded key by key. SGLang's caches are finite.

FlashAttention 4 (flash-attn-4 4.0.0b18, flash_attn/cute) rounds alike, and splits nothing on Hopper. Latent attention
through qv and caches in fp8 need Blackwell. It takes a table of pages as well, which SGLang does not use on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flashinfer_trace.families.attention import kernels
from flashinfer_trace.families.attention.cases import AttentionOptions, kv_lengths
from flashinfer_trace.families.attention.policies import LOG2_E, Rounding, kernel_policies
from flashinfer_trace.families.attention.variants import SINKS_NEED_KEYS, InfiniteBelowTheSink, with_flushed_weights
from flashinfer_trace.families.calls import called
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs
from flashinfer_trace.verdict.compare import ErrorBound

PAGED_PATH = "sgl_kernel.flash_attn.flash_attn_with_kvcache"
RAGGED_PATH = "sgl_kernel.flash_attn.flash_attn_varlen_func"
CUTE_PATH = "flash_attn.cute.flash_attn_varlen_func"
#: For latent attention: the rest of a page after the last key is multiplied by 0.
FINITE = AttentionOptions(nan_unused=False)
ROUNDING = Rounding(weights=True, sum=False, partial=0)


def options(definition: Definition, inputs: Inputs) -> dict[str, Any]:
    asked = kernels.masking(definition)
    window = int(asked.get("window_left", -1))
    found: dict[str, Any] = {
        "softmax_scale": float(inputs["sm_scale"]),
        "causal": True,
        "window_size": (window, -1 if window < 0 else 0),
        "softcap": asked.get("logits_soft_cap", 0.0),
        "return_softmax_lse": True,
    }
    return found | ({"sinks": inputs["sinks"].to(torch.bfloat16)} if "sinks" in inputs else {})


def over_pages(
    definition: Definition, inputs: Inputs, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **more: Any
) -> Outputs:
    """Runs the kernel on a list of pages: q [tokens, heads, dim], caches [pages, page_size, kv_heads, dim]."""
    page_size = definition.const_axes["page_size"]
    where = kernels.table_of(inputs, page_size), kv_lengths(inputs, page_size)
    return on_table(definition, inputs, q, (keys, values), *where, **more)


def on_table(
    definition: Definition,
    inputs: Inputs,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    lengths: torch.Tensor,
    **more: Any,
) -> Outputs:
    """As `over_pages`, with an int32 table of pages [requests, width], and the tokens of each request, int32."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    offsets, asked = inputs.get("qo_indptr"), options(definition, inputs)
    if offsets is None:
        offsets = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        if "qv" not in more and asked["window_size"] == (-1, -1):
            more["scheduler_metadata"] = scheduled(definition, q, caches[0], lengths, offsets, asked["softcap"] > 0)
    output, lse, *_ = flash_attn_with_kvcache(
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=offsets,
        max_seqlen_q=int(offsets.diff().max()),
        num_splits=0,
        **asked,
        **more,
    )
    return {"output": output, "lse": lse.T * LOG2_E}


def scheduled(
    definition: Definition,
    q: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    has_softcap: bool,
) -> Any:
    """The schedule of a decode step: SGLang computes it once for all layers without a window, but not for MLA."""
    given = {
        **{"q": q, "keys": keys, "lengths": lengths, "offsets": offsets, "has_softcap": has_softcap},
        **dict(zip(("batch", "heads", "dim"), (len(lengths), *q.shape[1:]), strict=True)),
        **{"longest": int(lengths.max()), "page_size": keys.shape[1], "kv_heads": keys.shape[2]},
    }
    text = (
        "batch_size=batch max_seqlen_q=1 max_seqlen_k=longest num_heads=heads num_heads_k=kv_heads headdim=dim "
        "cache_seqlens=lengths qkv_dtype=keys.dtype cu_seqlens_q=offsets page_size= causal=True has_softcap= "
        "num_splits=0"
    )
    return called("sgl_kernel.flash_attn.get_scheduler_metadata", text, definition, given)


def run_paged(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return over_pages(definition, inputs, inputs["q"], inputs["k_cache"], inputs["v_cache"], out=outputs["output"])


def run_latent(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The parts of one cache of 576 features, as models store it."""
    cache = torch.cat((inputs["ckv_cache"], inputs["kpe_cache"]), dim=-1).unsqueeze(2)
    latent = definition.const_axes["head_dim_ckv"]
    ckv, kpe = cache[..., :latent], cache[..., latent:]
    return over_pages(definition, inputs, inputs["q_pe"], kpe, ckv, qv=inputs["q_nope"])


def run_ragged(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    return over_tensors(flash_attn_varlen_func, inputs, out=outputs["output"], **options(definition, inputs))


def run_cute(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flash_attn.cute import flash_attn_varlen_func

    asked = kernels.masking(definition)
    return over_tensors(
        flash_attn_varlen_func,
        inputs,
        softmax_scale=float(inputs["sm_scale"]),
        causal=True,
        window_size=(int(asked["window_left"]), 0) if "window_left" in asked else (None, None),
        softcap=asked.get("logits_soft_cap", 0.0),
        return_lse=True,
    )


def over_tensors(function: Callable[..., Any], inputs: Inputs, **more: Any) -> Outputs:
    queries, keys = inputs["qo_indptr"], inputs["kv_indptr"]
    output, lse, *_ = function(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        cu_seqlens_q=queries,
        cu_seqlens_k=keys,
        max_seqlen_q=int(queries.diff().max()),
        max_seqlen_k=int(keys.diff().max()),
        **more,
    )
    return {"output": output, "lse": lse.T * LOG2_E}


def kernel(path: str, call: KernelCall, takes: AttentionOptions, common: AttentionOptions | None, *more: str) -> Kernel:
    limits = {
        **kernels.BATCHES,
        **(kernels.PAGES if "pages" in more else {}),
        **(kernels.QUERIES if "queries" in more else {}),
    }
    return Kernel(path, call, limits=limits, plan_options=takes, common=common, compare=kernel_policies(ROUNDING))


def with_sinks(plain: Kernel) -> Kernel:
    """The kernel with sinks: where a query sees no key, its lse is not the sink; far above the keys, it is inf."""
    output, lse = plain.compare["output"], plain.compare["lse"]
    assert isinstance(lse, ErrorBound)
    reason = f"{lse.reason}; inf where a sink is so far above the keys that exp of the difference is"
    policies = {"output": with_flushed_weights(output), "lse": InfiniteBelowTheSink(lse.bound, reason, lse.gain)}
    return replace(plain, plan_options=SINKS_NEED_KEYS, common=None, compare=policies)


DECODE = kernel(PAGED_PATH, run_paged, AttentionOptions(), kernels.WITH_KEYS, "pages")
PREFILL = kernel(PAGED_PATH, run_paged, AttentionOptions(), kernels.SEEING, "pages", "queries")
LATENT_DECODE = kernel(PAGED_PATH, run_latent, FINITE, None, "pages")
LATENT_PREFILL = kernel(PAGED_PATH, run_latent, FINITE, None, "pages", "queries")
RAGGED = (
    kernel(RAGGED_PATH, run_ragged, kernels.SOME_KEYS, kernels.SEEING, "queries"),
    kernel(CUTE_PATH, run_cute, AttentionOptions(False, False, False), None, "queries"),
)
