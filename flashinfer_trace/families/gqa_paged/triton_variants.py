"""SGLang's Triton attention for decode with capped logits or sinks, and how far its caps and sinks may be off.

`attention.triton` and `gqa_paged.extend` say what these kernels do otherwise. From their source (SGLang 0.5.23,
kernels/ops/attention/decode_attention.py and extend_attention.py):

- tanh x is 2 sigmoid(2 x) - 1, so that its error does not become smaller with x: see `CAP_ERROR`.
- A sink adds exp(sink - m) to the denominator, where m is the largest logit of a key, or the largest lse of a part.
  Where that exceeds float32's range, the output is 0: see `attention.variants.below_the_sink`.
- SGLang passes sinks in bf16, the dtype of its models; kernels widen them to float32.
- A window is none of the decode kernel's business: SGLang gives it the slots of the keys in the window only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.attention import triton
from flashinfer_trace.families.attention.rounding import FLOAT32, LOG2_E
from flashinfer_trace.families.attention.variants import with_error, with_flushed_weights
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import ErrorBound, Expected, Policy

#: Absolute error of a capped logit, as a multiple of the cap. Each of these is a bound in units of 2^-24: the quotient
#: logit / cap is within 2 ulp, 4 |x|, of which tanh leaves less than 2; sigmoid(y) = 1 / (1 + exp(-y)) is within
#: (4 + 2 |y|) s (1 - s) < 1.5 from exp, 1 from the sum and 4 from the quotient, all of it doubled; and 1 from the
#: difference with 1. The product with the cap is among the roundings that the oracle counts.
CAP_ERROR = 16 * FLOAT32


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
    """What errors d of the capped logits do to an output o: at most the sum of p |d| |v - o|."""
    return (expected.parts["weighted"] + expected.value.abs()) * (expected.parts["cap"] * CAP_ERROR)


CAPPED = "tanh(x) as 2 sigmoid(2 x) - 1 is within 2^-20, times the cap"


def with_cap_error(policy: ErrorBound) -> ErrorBound:
    """A policy of outputs that allows for `cap_error`."""
    return with_error(policy, cap_error, CAPPED)


def with_cap_error_of_lse(policy: ErrorBound) -> ErrorBound:
    """A policy of a base-2 lse that allows for errors of the capped logits."""
    return with_error(policy, lambda expected: LOG2_E * CAP_ERROR * expected.parts["cap"], CAPPED)


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    keys, values = (inputs[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    arguments = inputs["kv_indptr"], inputs["kv_indices"], float(inputs["sm_scale"]), outputs["output"]
    cap = float(definition.const_axes.get("logits_soft_cap", 0))
    return triton.attend(inputs["q"], keys, values, *arguments, logit_cap=cap, sinks=inputs.get("sinks"))


def decode_kernel(variant: str) -> Kernel:
    """The kernel of one variant without a window."""
    kernel = triton.decode_kernel(run_triton)
    output, lse = (kernel.compare[name] for name in ("output", "lse"))
    assert isinstance(output, ErrorBound)
    assert isinstance(lse, ErrorBound)
    if variant == "softcap":
        output, lse = with_cap_error(output), with_cap_error_of_lse(lse)
    if variant == "sinks":
        output = with_flushed_weights(output)
    policies: dict[str, Policy] = {"output": output, "lse": lse}
    return replace(kernel, compare=policies)
