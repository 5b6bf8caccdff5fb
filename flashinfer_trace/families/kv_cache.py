"""Writes to key-value caches: copies of rows, which leave all other rows alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, KernelCall, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws, sizes
from flashinfer_trace.harness.plans import Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.copies import SameBits

COPIES = SameBits("copies, bit for bit; rows that are not written stay")
JIT = "sglang.kernels.ops.kvcache.kvcache"
TRITON = "sglang.srt.mem_cache.utils"
#: No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}
#: ``random``: any slots, in any order; ``consecutive``: as for a prompt; ``all``: every slot of the cache is written.
SLOTS = ("random", "consecutive", "all")


def usual_spare(definition: Definition, axes: Mapping[str, int]) -> int:
    return max(0, axes.get("num_slots", 4 * axes["num_tokens"]) - axes["num_tokens"])


#: The corners are one token among others, a cache that is written from its first to its last slot, and contents of any
#: bits.
PLAN = RowPlans(
    {"num_tokens": Count(40, 4096, usual=lambda definition, axes: min(8, axes.get("num_slots", 8)), corner=7)},
    {
        "spare": Drawn(lambda request: sizes(0, 1024 if request.large else 20), usual_spare),
        "slots": SLOTS,
        "contents": ("normal",),
    },
    special=[{"num_tokens": 1, "spare": 5}, {"spare": 0, "slots": "all"}, {"spare": 5, "contents": "special"}],
)


def slots_of(plan: Plan, draws: Draws) -> torch.Tensor:
    """int64 [num_tokens], distinct."""
    count, spare = plan["num_tokens"], 0 if plan["slots"] == "all" else plan["spare"]
    if plan["slots"] == "consecutive":
        first = draws.host_integers(1, 0, spare)[0]
        return torch.arange(first, first + count, device=draws.device)
    return draws.permutation(count + spare)[:count]


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Values of the planned kind everywhere, also in the slots: what is not written must stay."""
    spare = 0 if plan["slots"] == "all" else plan["spare"]
    known = {**definition.const_axes, "num_tokens": plan["num_tokens"], "num_slots": plan["num_tokens"] + spare}
    inputs: dict[str, Any] = {}
    for name, spec in definition.inputs.items():
        if spec.dtype == "int64":
            inputs[name] = slots_of(plan, draws)
        else:
            shape = [known[axis] for axis in spec.shape or ()]
            inputs[name] = draws.values(shape, torch.bfloat16, plan["contents"])
    return inputs


def written(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> Expected:
    """Slot by slot: where each row of the result comes from, among the cache's own rows and the new ones."""
    source = list(range(len(cache)))
    for token, slot in enumerate(slots.tolist()):
        source[slot] = len(cache) + token
    index = torch.tensor(source, dtype=torch.int64, device=cache.device)
    return Expected(torch.cat((cache, rows))[index])


def store_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return {f"{name}_cache_out": written(inputs[f"{name}_cache"], inputs["indices"], inputs[name]) for name in "kv"}


def mla_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    rows = torch.zeros(len(inputs["loc"]), inputs["kv_buffer"].shape[1], device=inputs["loc"].device)
    rows = rows.to(torch.bfloat16)
    width = inputs["cache_k_nope"].shape[1]
    rows[:, :width], rows[:, width:] = inputs["cache_k_nope"], inputs["cache_k_rope"]
    return {"kv_buffer_out": written(inputs["kv_buffer"], inputs["loc"], rows)}


def run_store(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.kvcache.kvcache import store_cache

    # Without being told, it keeps slot 0, which SGLang reserves, as it is.
    arguments = (inputs[name] for name in ("k", "v", "k_cache", "v_cache", "indices"))
    store_cache(*arguments, reserved_skip_index=-1)
    return {"k_cache_out": inputs["k_cache"], "v_cache_out": inputs["v_cache"]}


def run_set_mla(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.srt.mem_cache.utils import set_mla_kv_buffer_triton

    arguments = (inputs[name] for name in ("kv_buffer", "loc", "cache_k_nope", "cache_k_rope"))
    set_mla_kv_buffer_triton(*arguments, reserved_skip_index=-1)
    return {"kv_buffer_out": inputs["kv_buffer"]}


def sglang_kernel(module: str, name: str, call: KernelCall, in_place: tuple[str, ...]) -> Kernel:
    return Kernel(f"{module}.{name}", call, limits=LAUNCHABLE, in_place=in_place)


def slot_before(name: str, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The slot before for every token, which is another one where there are two."""
    slots = inputs[name]
    rows = max(len(value) for key, value in inputs.items() if key != name)
    return {**inputs, name: (slots - 1) % rows} if rows > 1 and len(slots) else None


cache_family = functools.partial(
    Family,
    op_type="kv_cache",
    plan=PLAN,
    make_inputs=make_inputs,
    strided=("k", "v", "k_cache", "v_cache", "kv_buffer", "cache_k_nope", "cache_k_rope"),
)

FAMILIES = (
    cache_family(
        name="store_cache",
        twin={"row_dim": 16},
        oracle=store_oracle,
        compare={"k_cache_out": COPIES, "v_cache_out": COPIES},
        kernels=(sglang_kernel(JIT, "store_cache", run_store, ("k_cache", "v_cache")),),
        faults=(with_inputs("the slot before", lambda inputs, trial: slot_before("indices", inputs)),),
    ),
    cache_family(
        name="set_mla_kv_buffer",
        twin={"head_dim_ckv": 12, "head_dim_kpe": 4, "head_dim_key": 16},
        oracle=mla_oracle,
        compare={"kv_buffer_out": COPIES},
        kernels=(sglang_kernel(TRITON, "set_mla_kv_buffer_triton", run_set_mla, ("kv_buffer",)),),
        faults=(with_inputs("the slot before", lambda inputs, trial: slot_before("loc", inputs)),),
    ),
)
