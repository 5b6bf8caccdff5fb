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

SGLang's Triton kernel for decode (SGLang 0.5.23, kernels/ops/attention/decode_attention.py) takes a cap or sinks:

- tanh x is 2 sigmoid(2 x) - 1, so its error does not become smaller with x: see `TRITON_CAP_ERROR`.
- A sink adds exp(sink - m) to the denominator, where m is the largest logit of a key, or the largest lse of a part.
  Where that exceeds float32's range, the output is 0: see `attention.variants.below_the_sink`.
- SGLang passes sinks in bf16, the dtype of its models; kernels widen them to float32.
- For a window, SGLang passes only the slots in it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from flashinfer_trace.families import gqa_paged
from flashinfer_trace.families.attention import flash_attention, kernels, triton, variants
from flashinfer_trace.families.attention.policies import FLOAT32, LOG2_E, kernel_policies
from flashinfer_trace.families.gqa_paged import DTYPES, SIZES, memory
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import ErrorBound, Expected, Policy

#: Absolute error of a capped logit, as a multiple of the cap. Each of these is a bound in units of 2^-24: the quotient
#: logit / cap is within 2 ulp, 4 |x|, and tanh leaves less than 2 of that; sigmoid(y) = 1 / (1 + exp(-y)) is within
#: (4 + 2 |y|) s (1 - s) < 1.5 from exp, 1 from the sum and 4 from the quotient, all of it doubled; and 1 from the
#: difference with 1. The product with the cap is among the roundings that the oracle counts.
TRITON_CAP_ERROR = 16 * FLOAT32


def with_cap(definition: Definition, expected: dict[str, Expected]) -> dict[str, Expected]:
    """Expected outputs whose parts have the cap of the logits, where a Definition has one."""
    cap = definition.const_axes.get("logits_soft_cap")
    if cap is None:
        return expected
    return {
        name: replace(one, parts={**one.parts, "cap": one.value.new_tensor(float(cap))})
        for name, one in expected.items()
    }


def cap_error(expected: Expected) -> torch.Tensor:
    return (expected.parts["weighted"] + expected.value.abs()) * (expected.parts["cap"] * TRITON_CAP_ERROR)


TRITON_CAPPED = "tanh(x) as 2 sigmoid(2 x) - 1 is within 2^-20, times the cap"


def with_cap_error(policy: ErrorBound) -> ErrorBound:
    """A policy of outputs that allows for `cap_error`."""
    return variants.with_error(policy, cap_error, TRITON_CAPPED)


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    keys, values = (inputs[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    arguments = inputs["kv_indptr"], inputs["kv_indices"], float(inputs["sm_scale"]), outputs["output"]
    cap = float(definition.const_axes.get("logits_soft_cap", 0))
    return triton.attend(inputs["q"], keys, values, *arguments, logit_cap=cap, sinks=inputs.get("sinks"))


def decode_kernel(variant: str) -> Kernel:
    kernel = triton.decode_kernel(run_triton)
    output, lse = (kernel.compare[name] for name in ("output", "lse"))
    assert isinstance(output, ErrorBound)
    assert isinstance(lse, ErrorBound)
    if variant == "softcap":
        error = LOG2_E * TRITON_CAP_ERROR
        lse = variants.with_error(lse, lambda expected: error * expected.parts["cap"], TRITON_CAPPED)
        output = with_cap_error(output)
    if variant == "sinks":
        output = variants.with_flushed_weights(output)
    policies: dict[str, Policy] = {"output": output, "lse": lse}
    return replace(kernel, compare=policies)


PLAIN_DECODE, PLAIN_PREFILL = "gqa_paged_decode", "gqa_paged_prefill_causal"


SINKS_PLANNED = kernels.Planned(
    "flashinfer.attention.BatchAttentionWithAttentionSinkWrapper",
    f"offsets kv_indptr kv_indices last {SIZES} causal=True window_left=window {DTYPES}",
    f"q caches sinks sm_scale {kernels.RESULTS}",
    "backend= head_dim_qk=head_dim head_dim_vo=head_dim window_left=window",
)


def sink_kernels(decode: bool) -> tuple[Kernel, ...]:
    """FlashAttention 3, and flashinfer's kernel by backend."""
    limits = {**kernels.BATCHES, **kernels.PAGES, **({} if decode else kernels.QUERIES)}
    found = [flash_attention.with_sinks(flash_attention.DECODE if decode else flash_attention.PREFILL)]
    for backend in (kernels.FA2, kernels.FA3):
        policies, keyless = kernel_policies(backend.rounding), backend is kernels.FA2
        kernel = Kernel(
            SINKS_PLANNED.path,
            functools.partial(SINKS_PLANNED.call, backend.name),
            backend.name,
            limits=limits,
            plan_options=kernels.SEEING if keyless else variants.SINKS_NEED_KEYS,
            common=variants.SINKS_NEED_KEYS if keyless else None,
            compare={**policies, "output": variants.with_flushed_weights(policies["output"])},
        )
        found.append(kernel)
    return tuple(found)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    page_size = definition.const_axes["page_size"]
    found = variants.expected_of_variant(definition, inputs, memory(inputs, page_size), "qo_indptr" in inputs)
    return with_cap(definition, found)


def family(plain: Family, variant: str) -> Family:
    decode = plain.name == PLAIN_DECODE
    kernels = sink_kernels(decode) if "sinks" in variant else plain.kernels
    found = variants.variant_family(plain, variant, kernels, oracle)
    if decode and variant in ("softcap", "sinks"):
        found = replace(found, kernels=(*found.kernels, decode_kernel(variant)))
    return found


PLAIN = [plain for plain in gqa_paged.FAMILIES if plain.name in (PLAIN_DECODE, PLAIN_PREFILL)]
FAMILIES = tuple(family(plain, variant) for plain in PLAIN for variant in variants.TWINS)
