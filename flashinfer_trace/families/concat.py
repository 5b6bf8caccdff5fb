"""Keys and queries of latent attention put together from their two parts: copies, bit for bit.

The kernels are built for DeepSeek-V3's sizes; those of keys also for its 128 heads, but for SGLang's Triton kernel.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import Expected
from flashinfer_trace.harness.copies import SameBits
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws, sizes

#: No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    return st.fixed_dictionaries(
        {
            "num_tokens": sizes(*request.range("num_tokens", 0, 40, 1024)),
            "values": st.sampled_from([kind for kind in VALUE_KINDS if kind != "constant_rows"]),
        }
    )


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    return {"num_tokens": axes.get("num_tokens", 8), "values": "normal"}


def corners(request: PlanRequest) -> list[Plan]:
    """Values at the ends of float16's range, and those that only a copy of bits leaves alone."""
    low, high = request.range("num_tokens", 0, 40, 1024)
    return [{"num_tokens": max(low, min(5, high)), "values": values} for values in ("huge", "minute", "special")]


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


def run_keys(module: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    importlib.import_module(module).concat_mla_k(outputs["k"], inputs["k_nope"], inputs["k_rope"])
    return outputs


def run_keys_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """What SGLang calls for other numbers of heads."""
    from sglang.srt.layers.attention.utils import concat_and_cast_mha_k_triton

    concat_and_cast_mha_k_triton(outputs["k"], inputs["k_nope"], inputs["k_rope"])
    return outputs


def powers_of_two(definition: Definition) -> str | None:
    """Triton's ranges are powers of two."""
    sizes = {axis: definition.const_axes[axis] for axis in KEY_SIZES}
    wrong = {axis: size for axis, size in sizes.items() if size & (size - 1)}
    return f"needs powers of two, not {wrong}" if wrong else None


def run_queries(module: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return {"q": importlib.import_module(module).concat_mla_absorb_q(inputs["q_nope"], inputs["q_rope"])}


KEY_SIZES = {"num_heads": 128, "head_dim_nope": 128, "head_dim_kpe": 64}
QUERY_SIZES = {"head_dim_ckv": 512, "head_dim_kpe": 64}
#: The modules that have these functions, and their libraries.
SGL_KERNEL = ("sgl_kernel", "sglang-kernel")
FLASHINFER = ("flashinfer.concat_ops", "flashinfer-python")
SGLANG_JIT = ("sglang.jit_kernel.concat_mla", "sglang")
SGLANG_TRITON = "sglang.srt.layers.attention.utils"


def concat_kernel(
    name: str, run: Callable[..., Outputs], needed: Mapping[str, int], module: str, library: str
) -> Kernel:
    of_sglang = library == "sglang"
    return Kernel(
        f"{module}.{name}",
        library,
        functools.partial(run, module),
        limits=LAUNCHABLE,
        const_axes=needed,
        modules=(module,) if of_sglang else (),
        optional=of_sglang,
    )


def concat_family(name: str, output: str, twin: Mapping[str, int], kernels: tuple[Kernel, ...]) -> Family:
    return Family(
        name=name,
        op_type="concat",
        twin=twin,
        plans=plans,
        corners=corners,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=functools.partial(oracle, output),
        compare={output: SameBits()},
        kernels=kernels,
    )


FAMILIES = (
    concat_family(
        "concat_mla_k",
        "k",
        {"num_heads": 6, "head_dim_nope": 12, "head_dim_kpe": 8, "head_dim_qk": 20},
        (
            *(
                concat_kernel("concat_mla_k", run_keys, KEY_SIZES, *where)
                for where in (SGL_KERNEL, FLASHINFER, SGLANG_JIT)
            ),
            Kernel(
                f"{SGLANG_TRITON}.concat_and_cast_mha_k_triton",
                "sglang",
                run_keys_triton,
                limits=LAUNCHABLE,
                supports=powers_of_two,
                modules=(SGLANG_TRITON,),
                optional=True,
            ),
        ),
    ),
    concat_family(
        "concat_mla_absorb_q",
        "q",
        {"num_heads": 6, "head_dim_ckv": 12, "head_dim_kpe": 8, "head_dim_q": 20},
        tuple(
            concat_kernel("concat_mla_absorb_q", run_queries, QUERY_SIZES, *where) for where in (SGL_KERNEL, SGLANG_JIT)
        ),
    ),
)
