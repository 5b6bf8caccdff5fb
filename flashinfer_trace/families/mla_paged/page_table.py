"""Latent attention for decode with a table of pages and one cache of concatenated keys, as Blackwell's kernels take it.

flashinfer's kernels for Hopper compute the same function from the two parts of the cache and a list of pages, and so
does the oracle: `listed` makes their inputs.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from flashinfer_trace.families.attention.cases import AttentionOptions, kv_lengths, paged_family, usual_scale
from flashinfer_trace.families.attention.kernels import PAGES, table_of
from flashinfer_trace.families.attention.policies import OUTPUT, Rounding, kernel_policies
from flashinfer_trace.families.mla_paged import inputs as parts
from flashinfer_trace.families.mla_paged import kernels as hopper
from flashinfer_trace.families.mla_paged.blackwell import ROUNDING, call_trtllm
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws, indptr
from flashinfer_trace.verdict.compare import Expected

#: Requests that every kernel takes, as `BATCHES` says it of offsets.
REQUESTS = (1, (1 << 20) - 1)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Those of the other paged families; entries of the table after the last page of a request name any pages."""
    page_size = definition.const_axes["page_size"]
    found = parts.all_inputs(definition, plan, draws)
    table = table_of(found, page_size)
    used = torch.arange(table.shape[1], device=table.device) < found["kv_indptr"].diff()[:, None]
    any_page = draws.integers(table.shape, 0, max(0, len(found["ckv_cache"]) - 1), torch.int32)
    inputs = {
        **found,
        "kv_cache": torch.cat((found["ckv_cache"], found["kpe_cache"]), dim=-1),
        "seq_lens": kv_lengths(found, page_size),
        "page_table": torch.where(used, table, any_page),
    }
    return {name: inputs[name] for name in definition.inputs}


def listed(definition: Definition, inputs: Inputs) -> Inputs:
    axes, table, lengths = definition.const_axes, inputs["page_table"], inputs["seq_lens"]
    pages = (lengths + axes["page_size"] - 1) // axes["page_size"]
    used = torch.arange(table.shape[1], device=table.device) < pages[:, None]
    ckv, kpe = inputs["kv_cache"].split((axes["head_dim_ckv"], axes["head_dim_kpe"]), dim=-1)
    return {
        "q_nope": inputs["q_nope"],
        "q_pe": inputs["q_pe"],
        "ckv_cache": ckv.contiguous(),
        "kpe_cache": kpe.contiguous(),
        "kv_indptr": indptr(pages.tolist(), table.device),
        "kv_indices": table[used],
        "kv_last_page_len": torch.where(lengths > 0, (lengths - 1) % axes["page_size"] + 1, 0).to(torch.int32),
        "sm_scale": inputs["sm_scale"],
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return {"output": parts.oracle(definition, listed(definition, inputs))["output"]}


def run_hopper(backend: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """flashinfer's wrapper, on the parts of the cache and the list of pages."""
    lse = torch.empty(outputs["output"].shape[:2], dtype=torch.float32, device=outputs["output"].device)
    both = {"output": outputs["output"], "lse": lse}
    return {"output": hopper.run_flashinfer(backend, definition, listed(definition, inputs), both)["output"]}


def run_trtllm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    arguments = (inputs["kv_cache"], inputs["seq_lens"], inputs["page_table"])
    return {"output": call_trtllm(definition, inputs, *arguments, return_lse=False)[0]}


def run_cutlass(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it: without a split of keys, and with a workspace for the widest request."""
    import sgl_kernel

    table, page_size = inputs["page_table"], definition.const_axes["page_size"]
    size = sgl_kernel.cutlass_mla_get_workspace_size(table.shape[1] * page_size, len(table), num_kv_splits=1)
    output = sgl_kernel.cutlass_mla_decode(
        q_nope=inputs["q_nope"],
        q_pe=inputs["q_pe"],
        kv_c_and_k_pe_cache=inputs["kv_cache"],
        seq_lens=inputs["seq_lens"],
        page_table=table,
        workspace=torch.empty(size, dtype=torch.uint8, device=table.device),
        sm_scale=float(inputs["sm_scale"]),
        num_kv_splits=1,
    )
    return {"output": output}


def decode_kernel(path: str, call: KernelCall, variant: str = "", rounding: Rounding = ROUNDING) -> Kernel:
    return Kernel(
        path,
        call,
        variant=variant,
        limits={"batch_size": REQUESTS, **PAGES},
        plan_options=AttentionOptions(),
        compare={"output": kernel_policies(rounding)["output"]},
    )


KERNELS = (
    *(
        decode_kernel(hopper.PATH, functools.partial(run_hopper, each.name), each.name, each.rounding)
        for each in hopper.BACKENDS
    ),
    decode_kernel("sgl_kernel.cutlass_mla_decode", run_cutlass),
    decode_kernel("flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla", run_trtllm),
)

WITH_LSE = paged_family(
    "mla_paged_decode_page_table",
    "mla_paged",
    {"num_qo_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16, "head_dim_key": 80, "page_size": 4},
    make_inputs,
    oracle,
    KERNELS,
    (usual_scale(parts.SCALED_DIM),),
)
PLAN = dataclasses.replace(WITH_LSE.plan, many_rows=0)
FAMILIES = (dataclasses.replace(WITH_LSE, compare={"output": OUTPUT}, plan=PLAN),)
