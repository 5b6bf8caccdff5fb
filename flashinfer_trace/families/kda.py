"""Kimi delta attention: a gated delta net whose decay differs for each feature of the keys (see `gdn`).

From the source of SGLang 0.5.23: both kernels compute in float32 and keep beta there. The packed decode
gives sequences with a negative slot an output of 0; the decode of separate tensors starts from a state of zeros there,
so it is given no such slots.
"""

from __future__ import annotations

from flashinfer_trace.families.gdn import (
    LAUNCHABLE,
    OUTPUT,
    PACKED_ROWS,
    POOL_PLAN,
    STATE,
    SWAPPED,
    UPDATE,
    PoolOptions,
    pool_inputs,
    pool_oracle,
    split_heads,
    update,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs

PACKED = "sglang.kernels.ops.attention.fla.fused_recurrent.fused_recurrent_kda_packed_decode"


def run_packed(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_kda_packed_decode

    fused_recurrent_kda_packed_decode(
        mixed_qkv=inputs["mixed_qkv"],
        a=inputs["a"].flatten(1),
        b=inputs["b"],
        A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"].flatten(),
        scale=inputs["scale"],
        initial_state=inputs["state"],
        out=outputs["output"].unsqueeze(1),
        ssm_state_indices=inputs["state_indices"],
        use_qk_l2norm_in_kernel=True,
    )
    return {"output": outputs["output"], "state_out": inputs["state"]}


def run_update(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    qkv = tuple(x.unsqueeze(0) for x in split_heads(definition, inputs))
    flat = {**inputs, "a": inputs["a"].flatten(1), "dt_bias": inputs["dt_bias"].flatten()}
    output = update(flat, qkv, norm=True, slots=inputs["state_indices"], kda=True)
    return {"output": output[0], "state_out": inputs["state"]}


FAMILIES = (
    Family(
        name="kda_packed_decode",
        op_type="kda",
        twin={"num_k_heads": 2, "num_v_heads": 4, "head_size": 16, "qkv_size": 128},
        plan=POOL_PLAN,
        make_inputs=pool_inputs,
        oracle=pool_oracle,
        compare={"output": OUTPUT, "state_out": STATE},
        kernels=(
            Kernel(PACKED, run_packed, limits=LAUNCHABLE, in_place=("state",)),
            Kernel(UPDATE, run_update, limits=LAUNCHABLE, plan_options=PoolOptions(padding=False), in_place=("state",)),
        ),
        strided=PACKED_ROWS,
        faults=(SWAPPED,),
    ),
)
