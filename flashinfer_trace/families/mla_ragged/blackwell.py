"""The kernel of expanded latent attention that needs Blackwell, called as SGLang calls it. It has not run here."""

from __future__ import annotations

from flashinfer_trace.families.attention.kernels import BATCHES, QUERIES, SEEING
from flashinfer_trace.families.attention.policies import kernel_policies
from flashinfer_trace.families.mla_paged.blackwell import ROUNDING, workspace
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs


def run_trtllm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.prefill import trtllm_ragged_attention_deepseek

    queries, keys = inputs["qo_indptr"].diff(), inputs["kv_indptr"].diff()
    output, lse = trtllm_ragged_attention_deepseek(
        query=inputs["q"],
        key=inputs["k"],
        value=inputs["v"],
        workspace_buffer=workspace(inputs["q"].device),
        seq_lens=keys,
        max_q_len=int(queries.max()),
        max_kv_len=int(keys.max()),
        bmm1_scale=float(inputs["sm_scale"]),
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=len(keys),
        window_left=-1,
        cum_seq_lens_q=inputs["qo_indptr"],
        cum_seq_lens_kv=inputs["kv_indptr"],
        enable_pdl=False,
        is_causal=True,
        return_lse=True,
        out=outputs["output"],
        lse=outputs["lse"],
    )
    return {"output": output, "lse": lse}


TRTLLM_RAGGED = Kernel(
    "flashinfer.prefill.trtllm_ragged_attention_deepseek",
    run_trtllm,
    limits={**BATCHES, **QUERIES},
    plan_options=SEEING,
    compare=kernel_policies(ROUNDING),
)
