"""Kimi delta attention over all tokens of sequences (see `gdn_prefill`).

SGLang's kernels (0.5.23, fla/kda.py and fla/chunk_intra.py) compute 64 tokens at once. Within 16 tokens they multiply
queries by the decay since the first one, and keys by its reciprocal, and clamp both to 2^-126 and 2^126: where features
decay by more within 16 tokens, what is left of the others is wrong (findings/kernels.json). So they are given
slow decays only, and no sequence without tokens (see `gdn_prefill`).
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.gdn import BETAS, DECAYS, SCALES, SWAPPED
from flashinfer_trace.families.gdn_prefill import (
    BY_CHUNKS,
    KEYS,
    LAUNCHABLE,
    RECURRENT,
    ROWS,
    PrefillOptions,
    corners,
    lengths,
    make_inputs,
    usual_lengths,
)
from flashinfer_trace.families.gdn_prefill import oracle as oracle
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, PlanRequest
from flashinfer_trace.harness.plans import Drawn, RowPlans


def decays(request: PlanRequest) -> tuple[str, ...]:
    return ("slow", *DECAYS) if request.options_of(PrefillOptions).fast else ("slow", "keep")


def run_sglang(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.fla.kda import chunk_kda

    sequences = len(inputs["state"])
    output: torch.Tensor = chunk_kda(
        q=inputs["q"].contiguous().unsqueeze(0),
        k=inputs["k"].contiguous().unsqueeze(0),
        v=inputs["v"].clone().unsqueeze(0),  # the output is written over it
        g=inputs["a"].unsqueeze(0),
        beta=inputs["b"].unsqueeze(0),
        scale=inputs["scale"],
        initial_state=inputs["state"],
        initial_state_indices=torch.arange(sequences, dtype=torch.int32, device=inputs["b"].device),
        cu_seqlens=inputs["cu_seqlens"],
        A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"].flatten(),
        beta_is_raw=True,
    )
    return {"output": output[0], "new_state": inputs["state"]}


FAMILIES = (
    Family(
        name="kda_prefill",
        op_type="kda",
        twin={"num_q_heads": 3, "num_k_heads": 3, "num_v_heads": 3, "head_size": 16},
        plan=RowPlans(
            {},
            {
                "seq_lens": Drawn(lengths, usual_lengths),
                "decay": decays,
                "beta": BETAS,
                "keys": KEYS,
                "state": ("normal", "zero"),
                "scale": SCALES,
            },
            special=corners,
        ),
        make_inputs=make_inputs,
        oracle=oracle,
        compare=RECURRENT,
        kernels=(
            Kernel(
                "sglang.kernels.ops.attention.fla.kda.chunk_kda",
                run_sglang,
                limits=LAUNCHABLE,
                plan_options=PrefillOptions(empty=False, fast=False),
                in_place=("state",),
                compare=BY_CHUNKS,
            ),
        ),
        strided=ROWS,
        faults=(SWAPPED,),
    ),
)
