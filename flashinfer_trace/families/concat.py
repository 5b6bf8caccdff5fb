"""Keys and queries of latent attention put together from their two parts: copies, bit for bit.

The kernels are built for DeepSeek-V3's sizes; those of keys also for its 128 heads, but for SGLang's Triton kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.copies import SameBits

#: No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}

#: The corners have values at the ends of float16's range, and those that only a copy of bits leaves alone.
PLAN = RowPlans(
    {"num_tokens": Count(40, 1024, corner=5)},
    {"values": [kind for kind in VALUE_KINDS if kind != "constant_rows"]},
    special=[{"values": values} for values in ("huge", "minute", "special")],
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
    known = {**definition.const_axes, "num_tokens": plan["num_tokens"]}
    return {
        name: draws.values([known[axis] for axis in shape], torch.bfloat16, plan["values"])
        for name, shape in shapes.items()
    }


def oracle(output: str, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Feature by feature, through the index of its source: those of the second part follow those of the first."""
    first, second = (inputs[name] for name in definition.inputs)
    heads = first.shape[1]
    sources = torch.cat((first.flatten(1), second.flatten(1)), dim=1)
    head = torch.arange(heads, device=first.device)[:, None]
    feature = torch.arange(first.shape[2] + second.shape[2], device=first.device)
    width = first.shape[2]
    in_second = heads * width + (head if second.shape[1] > 1 else 0) * second.shape[2] + feature - width
    source = torch.where(feature < width, head * width + feature, in_second)
    return {output: Expected(sources[:, source.flatten()].view(len(first), *source.shape))}


#: The modules that have these functions.
SGL_KERNEL, FLASHINFER, SGLANG_JIT = "sgl_kernel", "flashinfer.concat_ops", "sglang.kernels.ops.attention.concat_mla"
#: SGLang's kernel for other numbers of heads.
SGLANG_TRITON = "sglang.kernels.ops.attention.mla_qk_prep.concat_and_cast_mha_k_triton"
KEYS = (*(f"{module}.concat_mla_k" for module in (SGL_KERNEL, FLASHINFER, SGLANG_JIT)), SGLANG_TRITON)
QUERIES = tuple(f"{module}.concat_mla_absorb_q" for module in (SGL_KERNEL, SGLANG_JIT))


def concat_family(name: str, output: str, twin: Mapping[str, int], kernels: tuple[Kernel, ...]) -> Family:
    return Family(
        name=name,
        op_type="concat",
        twin=twin,
        plan=PLAN,
        make_inputs=make_inputs,
        strided=("k_nope", "k_rope", "q_nope", "q_rope"),
        oracle=functools.partial(oracle, output),
        compare={output: SameBits()},
        kernels=kernels,
    )


FAMILIES = (
    concat_family(
        "concat_mla_k",
        "k",
        {"num_heads": 6, "head_dim_nope": 12, "head_dim_kpe": 8, "head_dim_qk": 20},
        tuple(calling(path, "k k_nope k_rope", limits=LAUNCHABLE) for path in KEYS),
    ),
    concat_family(
        "concat_mla_absorb_q",
        "q",
        {"num_heads": 6, "head_dim_ckv": 12, "head_dim_kpe": 8, "head_dim_q": 20},
        tuple(calling(path, "q_nope q_rope", limits=LAUNCHABLE) for path in QUERIES),
    ),
)
