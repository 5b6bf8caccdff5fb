"""Grouped-query attention for decode over a cache in fp8, as SGLang's Triton backend computes it.

`attention.triton` says what its kernel does. Of a cache in fp8 it converts keys to bf16, which is exact; but weights,
which are at most 1 for the largest logit so far, it rounds to e4m3, the dtype of the values: to 4 bits, and those below
2^-6 to multiples of 2^-9 (decode_attention.py, ``p.to(v.dtype)``). Tensor cores add up products of fp8 in fewer bits
than float32 has, about 13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from flashinfer_trace.families.attention import triton
from flashinfer_trace.families.attention.cases import (
    BEYOND_FLOAT16,
    add_peaks,
    give_signs,
    query_scale,
    softmax_scale,
    usual_scale,
)
from flashinfer_trace.families.attention.oracle import any_chunks, expected_outputs
from flashinfer_trace.families.attention.paged import spoil_unused
from flashinfer_trace.families.attention.paged_cases import index_inputs, page_table, paged_family, paged_memory
from flashinfer_trace.families.attention.policies import Rounding, kernel_policies
from flashinfer_trace.families.attention.rounding import HIGHER_ORDERS, LOG2_E
from flashinfer_trace.families.gqa_paged import TWIN
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Expected, Policy, host_figures

__all__ = ["FAMILIES"]

#: One rounding to e4m3: 2^-4 of a number, or 2^-10 below 2^-6, where numbers are 2^-9 apart.
E4M3, SMALLEST_STEP, SUBNORMAL = 2.0**-4, 2.0**-10, 2.0**-6
#: A sum of products of fp8 on tensor cores drops up to 2^-13 of itself at each of at most 8 steps.
ACCUMULATION = 2.0**-10
#: More pages than an int16 can number.
MANY_PAGES = 36_000
#: Scales of a cache: the default; others that no power of two hides; and those of keys and values that exceed float16's
#: range although no code does. The kernel multiplies float32 numbers by them.
#: Where logits are vast, codes are so many times the usual ones: up to 448, e4m3's largest number.
WIDE = 96.0
SCALES = {
    "normal": (1.0, 1.0),
    "large": (0.7, 1.5),
    "positive": (1.25, 0.6),
    "beyond_float16": (BEYOND_FLOAT16, BEYOND_FLOAT16),
    "vast": (1 / WIDE, 1 / WIDE),
}


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Normal queries and caches of the planned kind, rounded to e4m3; entries of no request are NaN or stale."""
    axes, kind = definition.const_axes, plan["logits"]
    heads, kv_heads, dim = (axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim"))
    requests, sm_scale = plan["kv_lens"], softmax_scale(dim, plan["scale"])
    k_scale, v_scale = SCALES.get(kind, SCALES["normal"])
    table = page_table(definition, plan, draws)
    shape = (table.num_pages, table.page_size, kv_heads, dim)
    caches = {name: draws.normal(shape) for name in ("k_cache", "v_cache")}
    if kind == "positive":
        caches["v_cache"].abs_()
    q = draws.normal([len(requests), heads, dim], scale=query_scale(kind))
    give_signs(kind, q, caches["k_cache"])
    size = WIDE if kind == "vast" else 1.0
    codes = {name: (cache * size).clamp(-448, 448).to(torch.float8_e4m3fn) for name, cache in caches.items()}
    if kind == "peaked":
        keys = codes["k_cache"].float().flatten(0, 1)
        add_peaks(q, keys, [1] * len(requests), requests, sm_scale, draws, table.slots)
    used = table.used(draws.device)
    for name, code in codes.items():
        spoiled = code.float().clamp(-100, 100)
        spoil_unused(spoiled, used, plan["unused"])
        unused = ~used.view(*used.shape, 1, 1)
        codes[name] = torch.where(unused, spoiled.clamp(-448, 448), code.float()).to(torch.float8_e4m3fn)
    inputs = {"q": q.to(torch.bfloat16), **codes, "k_scale": k_scale, "v_scale": v_scale, "sm_scale": sm_scale}
    inputs |= index_inputs(table, plan, draws.device)
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """That of a cache in any dtype, with what rounding weights to e4m3 may do to an output: see `of_weights`."""
    k_scale, v_scale, sm_scale = (float(inputs[name]) for name in ("k_scale", "v_scale", "sm_scale"))
    keys, values = (inputs[name].double().flatten(0, 1) for name in ("k_cache", "v_cache"))
    memory = paged_memory(inputs, keys * k_scale, values * v_scale, definition.const_axes["page_size"])
    found = expected_outputs(inputs["q"], memory, sm_scale, False, any_chunks())
    value = found["output"].value
    parts = {name: torch.zeros_like(value) for name in ("e4m3", "steps")}
    along = {name: value.new_zeros(()) for name in ("e4m3_along", "steps_along")}
    for row, length in enumerate(memory.lengths):
        if length:
            place = torch.arange(length, device=value.device).unsqueeze(0)
            slots = memory.slots(torch.full_like(place[:, :1], row), place)[0]
            own = of_weights(inputs["q"][row], memory.keys[slots], memory.values[slots], sm_scale)
            for name, part in parts.items():
                part[row] = own[name]
            for name in along:
                along[name] = along[name] + own[name]
    return {**found, "output": replace(found["output"], parts={**found["output"].parts, **parts, **along})}


def of_weights(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sm_scale: float) -> dict[str, torch.Tensor]:
    """What rounding the weights p of one query does to its output o, by element, and along o.

    The largest weight is 1 before it is divided by the sum, and never rounded. ``e4m3``: independent errors of up to
    2^-4 p. ``steps``: the sum of those of small weights, which many keys may share: up to 2^-10, or up to p where they
    are rounded to 0; and what tensor cores drop.

    Args:
        q: [heads, dim]; keys, values: float64 [tokens, kv_heads, dim].
    """
    group = len(q) // keys.shape[1]
    k, v = (each.transpose(0, 1).repeat_interleave(group, dim=0) for each in (keys, values))
    p = ((k @ q.double().unsqueeze(2)).squeeze(2) * sm_scale).softmax(dim=1)
    largest = p.amax(dim=1, keepdim=True)
    rounded = (p * E4M3).masked_fill(p == largest, 0.0)
    small = torch.where(p < SUBNORMAL * largest, p.minimum(largest * SMALLEST_STEP), 0.0)
    output = torch.einsum("hn,hnd->hd", p, v)
    moved = torch.einsum("hnd,hd->hn", v, output)
    weighted = torch.einsum("hn,hnd->hd", p, v.abs())
    return {
        "e4m3": CONFIDENCE * torch.einsum("hn,hnd->hd", rounded.square() / 3, v.square()).sqrt(),
        "steps": torch.einsum("hn,hnd->hd", small, v.abs()) + ACCUMULATION * weighted,
        "e4m3_along": (rounded * moved).square().sum() / 3,
        "steps_along": (small * moved.abs()).sum() + ACCUMULATION * (weighted * output.abs()).sum(),
    }


def rounded_weights(policy: Policy) -> ErrorBound:
    """A policy of a kernel that does not round its weights, for one that rounds them to e4m3."""
    assert isinstance(policy, ErrorBound)
    assert policy.gain is not None
    base, own_gain = policy.bound, policy.gain

    def gain(expected: Expected) -> float:
        parts = expected.parts
        variance, steps, size = host_figures(parts["e4m3_along"], parts["steps_along"], expected.value.square().sum())
        moved = CONFIDENCE * math.sqrt(variance) + steps
        return own_gain(expected) + (HIGHER_ORDERS * moved / size if size else 0.0)

    return ErrorBound(
        lambda expected: base(expected) + HIGHER_ORDERS * (expected.parts["e4m3"] + expected.parts["steps"]),
        f"{policy.reason}; weights but the largest are rounded to e4m3: 8 standard deviations of errors up to 2^-4, "
        "2^-10 of the largest for each below 2^-6 of it; sums of fp8 products drop 2^-10",
        gain,
    )


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As in `attention.triton`, with scales: the lse comes from those of the parts."""
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

    q = inputs["q"]
    keys, values = (inputs[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    shape = (*q.shape[:2], triton.SPLITS)
    parts = torch.empty(*shape, values.shape[-1], dtype=torch.float32, device=q.device)
    lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    splits = torch.full((len(q),), triton.SPLITS, dtype=torch.int32, device=q.device)
    scales = (float(inputs[name]) for name in ("sm_scale", "k_scale", "v_scale"))
    where = inputs["kv_indptr"], inputs["kv_indices"].long()
    decode_attention_fwd(q, keys, values, outputs["output"], *where, parts, lse, splits, triton.SPLITS, *scales)
    return {"output": outputs["output"], "lse": torch.logsumexp(lse, dim=-1) * LOG2_E}


def kernel() -> Kernel:
    plain = kernel_policies(Rounding(weights=False, sum=False, partial=0))
    policies: Mapping[str, Policy] = {"output": rounded_weights(plain["output"]), "lse": plain["lse"]}
    return replace(triton.decode_kernel(run_triton), compare=policies)


FAMILY = paged_family(
    "gqa_paged_decode_fp8_cache",
    "gqa_paged",
    {**TWIN, "page_size": 1},
    make_inputs,
    oracle,
    (kernel(),),
    (usual_scale(),),
)


def corners(request: PlanRequest) -> list[Plan]:
    """Those of any paged cache; on a CPU, the last one has scales that differ and are no powers of two."""
    found = list(FAMILY.corners(request))
    if not request.large:
        found[-1] = {**found[-1], "logits": "positive", "num_pages": MANY_PAGES}
    return found


FAMILIES = (replace(FAMILY, plan=FAMILY.plan.with_corners(corners)),)
