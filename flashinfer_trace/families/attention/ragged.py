"""Plans, inputs, oracle and kernels of causal attention whose keys and values are ragged tensors.

The families differ only in heads and dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from flashinfer_trace.families.attention import cases, kernels
from flashinfer_trace.families.attention.flash_attention import RAGGED
from flashinfer_trace.families.attention.oracle import Memory, any_chunks, expected_outputs
from flashinfer_trace.families.attention.policies import LSE, OUTPUT
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan
from flashinfer_trace.harness.inputs import Draws, indptr
from flashinfer_trace.verdict.compare import Expected


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Normal queries, keys and values of the planned kind."""
    axes, device = definition.const_axes, draws.device
    key_dim, value_dim = (axes.get(axis, axes.get("head_dim", 0)) for axis in ("qk_dim", "vo_dim"))
    q_lens, kv_lens, kind = plan["q_lens"], plan["kv_lens"], plan["logits"]
    sm_scale, total = cases.softmax_scale(key_dim, plan["scale"]), sum(kv_lens)
    k = draws.normal([total, axes["num_kv_heads"], key_dim], torch.bfloat16, cases.value_scale(kind))
    v = draws.normal([total, axes["num_kv_heads"], value_dim], torch.bfloat16, cases.value_scale(kind))
    if kind == "positive":
        v.abs_()
    q = draws.normal([sum(q_lens), axes["num_qo_heads"], key_dim], scale=cases.query_scale(kind))
    offsets = indptr(kv_lens, device)
    cases.give_signs(kind, q, k)
    cases.add_peaks(kind, q, k, q_lens, kv_lens, sm_scale, draws)
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


def ragged_family(name: str, op_type: str, twin: Mapping[str, int], others: tuple[Kernel, ...] = ()) -> Family:
    """The record of one family; `others` are its kernels other than flashinfer's wrapper."""
    key, value = ("qk_dim", "vo_dim") if "qk_dim" in twin else ("head_dim", "head_dim")
    wrapped = kernels.Planned(
        "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper",
        f"qo_indptr kv_indptr num_qo_heads num_kv_heads {key} head_dim_vo={value} causal=True sm_scale= "
        f"{kernels.DTYPES}k.dtype",
        f"q k v {kernels.RESULTS}",
    )
    return Family(
        name=name,
        op_type=op_type,
        twin=twin,
        plan=cases.Requests(),
        make_inputs=make_inputs,
        strided=("q", "k", "v"),
        # Of queries only: kernels load tiles of keys and values across the ends of requests.
        isolated=("q",),
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=(
            *wrapped.kernels(
                (kernels.FA2, kernels.FA3), limits={**kernels.BATCHES, **kernels.QUERIES}, plan_options=kernels.SEEING
            ),
            *RAGGED,
            *others,
        ),
        faults=(cases.usual_scale(),),
    )
