"""Plans, inputs, oracle and kernels of causal attention whose keys and values are ragged tensors.

The families differ only in heads and dimensions, which `Sizes` reads from a Definition.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashinfer_trace.families.attention.cases import (
    Requests,
    add_peaks,
    give_signs,
    query_scale,
    softmax_scale,
    usual_scale,
    value_scale,
)
from flashinfer_trace.families.attention.flash_attention import RAGGED
from flashinfer_trace.families.attention.kernels import (
    BATCHES,
    FA2,
    FA3,
    QUERIES,
    SEEING,
    flashinfer_kernels,
    masking,
    wrapper,
)
from flashinfer_trace.families.attention.oracle import any_chunks, expected_outputs
from flashinfer_trace.families.attention.policies import LSE, OUTPUT
from flashinfer_trace.families.attention.tiles import Memory
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws, indptr
from flashinfer_trace.verdict.compare import Expected

PATH = "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper"


@dataclass(frozen=True)
class Sizes:
    """Heads and dimensions; head_dim is the dimension of keys and of values."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, definition: Definition) -> Sizes:
        axes = definition.const_axes
        key_dim, value_dim = (axes.get(axis, axes.get("head_dim", 0)) for axis in ("qk_dim", "vo_dim"))
        return cls(axes["num_qo_heads"], axes["num_kv_heads"], key_dim, value_dim)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Normal queries, keys and values of the planned kind."""
    sizes, device = Sizes.of(definition), draws.device
    q_lens, kv_lens, kind = plan["q_lens"], plan["kv_lens"], plan["logits"]
    sm_scale, total = softmax_scale(sizes.key_dim, plan["scale"]), sum(kv_lens)
    k = draws.normal([total, sizes.kv_heads, sizes.key_dim], torch.bfloat16, value_scale(kind))
    v = draws.normal([total, sizes.kv_heads, sizes.value_dim], torch.bfloat16, value_scale(kind))
    if kind == "positive":
        v.abs_()
    q = draws.normal([sum(q_lens), sizes.heads, sizes.key_dim], scale=query_scale(kind))
    offsets = indptr(kv_lens, device)
    give_signs(kind, q, k)
    add_peaks(kind, q, k, q_lens, kv_lens, sm_scale, draws)
    inputs = {
        "q": q.to(torch.bfloat16),
        "k": k,
        "v": v,
        "qo_indptr": indptr(q_lens, device),
        "kv_indptr": offsets,
        "sm_scale": sm_scale,
    }
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output and lse."""
    return expected_outputs(inputs["q"], memory(inputs), inputs["sm_scale"], True, any_chunks())


def memory(inputs: Inputs) -> Memory:
    """Where the keys and values of the requests are."""
    starts = inputs["kv_indptr"]
    queries, offsets = torch.stack([inputs["qo_indptr"], starts]).tolist()
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    return Memory(inputs["k"], inputs["v"], queries, lengths, lambda request, position: starts[request] + position)


def run_flashinfer(backend: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """flashinfer's ragged prefill wrapper."""
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    sizes, q = Sizes.of(definition), inputs["q"]
    prefill = wrapper(BatchPrefillWithRaggedKVCacheWrapper, q.device, kv_layout="NHD", backend=backend)
    prefill.plan(
        inputs["qo_indptr"],
        inputs["kv_indptr"],
        sizes.heads,
        sizes.kv_heads,
        sizes.key_dim,
        head_dim_vo=sizes.value_dim,
        causal=True,
        sm_scale=float(inputs["sm_scale"]),
        **masking(definition),
        q_data_type=q.dtype,
        kv_data_type=inputs["k"].dtype,
    )
    prefill.run(q, inputs["k"], inputs["v"], out=outputs["output"], lse=outputs["lse"], return_lse=True)
    return outputs


def ragged_family(
    name: str,
    op_type: str,
    twin: Mapping[str, int],
    others: tuple[Kernel, ...] = (),
) -> Family:
    """The record of one family; `others` are its kernels beside flashinfer's wrapper."""
    return Family(
        name=name,
        op_type=op_type,
        twin=twin,
        plan=Requests(),
        make_inputs=make_inputs,
        strided=("q", "k", "v"),
        # Of queries only: kernels load tiles of keys and values across the ends of requests.
        isolated=("q",),
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=(
            *flashinfer_kernels(PATH, run_flashinfer, (FA2, FA3), limits={**BATCHES, **QUERIES}, plan_options=SEEING),
            *RAGGED,
            *others,
        ),
        faults=(usual_scale(),),
    )
