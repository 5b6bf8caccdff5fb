"""Grouped-query attention for decode over a cache in fp8, as SGLang's Triton and fa3 backends compute it.

`attention.triton` and `attention.flash_attention` say what their kernels do. With a cache in fp8, from their source:

- Both multiply keys by queries of the same dtype: queries are rounded to e4m3, whatever they are. (SGLang 0.5.11's
  Triton kernel converted keys to bf16 instead, which is exact.) So all queries that kernels are given are numbers of
  e4m3, which that leaves as they are: with others, a bound for it would hide errors of 20 % and more.
- Weights, which are at most 1 for the largest logit so far, are rounded to e4m3, the dtype of the values: to 4 bits.
  Triton's kernel rounds those below 2^-6 to multiples of 2^-9 (decode_attention.py, ``p.to(v.dtype)``).
  FlashAttention 3 multiplies all of them by 2^8 before, so it also rounds smaller ones to 4 bits.
- Tensor cores add up products of fp8 in fewer bits than float32 has, about 13.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from flashinfer_trace.families.attention import cases, flash_attention, triton
from flashinfer_trace.families.attention.kernels import WITH_KEYS
from flashinfer_trace.families.attention.oracle import Memory, any_chunks, expected_outputs
from flashinfer_trace.families.attention.policies import HIGHER_ORDERS, LOG2_E, Rounding, kernel_policies
from flashinfer_trace.families.gqa_paged import TWIN
from flashinfer_trace.families.quantized import E4M3_MAX
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Expected, Policy, host_figures

#: One rounding to e4m3: 2^-4 of a number, or 2^-10 below 2^-6, where numbers are 2^-9 apart.
E4M3, SMALLEST_STEP, SUBNORMAL = 2.0**-4, 2.0**-10, 2.0**-6
#: A sum of products of fp8 on tensor cores drops up to 2^-13 of itself at each of at most 8 steps.
ACCUMULATION = 2.0**-10
#: More pages than an int16 can number.
MANY_PAGES = 36_000
#: Scales of a cache: the default; others that no power of two hides; and those of keys and values that exceed float16's
#: range although no code does. The kernel multiplies float32 numbers by them.
#: Where logits are vast, codes are so many times the usual ones: up to 448, e4m3's largest number.
WIDE = 192.0
SCALES = {
    "normal": (1.0, 1.0),
    "large": (0.7, 1.5),
    "positive": (1.25, 0.6),
    "beyond_float16": (cases.BEYOND_FLOAT16, cases.BEYOND_FLOAT16),
    "vast": (1 / WIDE, 1 / WIDE),
    "uniform": (cases.BEYOND_FLOAT16, cases.BEYOND_FLOAT16),
}


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, kind = definition.const_axes, plan["logits"]
    heads, kv_heads, dim = (axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim"))
    requests, sm_scale = plan["kv_lens"], cases.softmax_scale(dim, plan["scale"])
    k_scale, v_scale = SCALES.get(kind, SCALES["normal"])
    table = cases.page_table(definition, plan, draws)
    shape = (table.num_pages, table.page_size, kv_heads, dim)
    caches = {name: draws.normal(shape) for name in ("k_cache", "v_cache")}
    if kind == "positive":
        caches["v_cache"].abs_()
    q = draws.normal([len(requests), heads, dim], scale=cases.query_scale(kind))
    cases.give_signs(kind, q, caches["k_cache"])
    size = WIDE if kind == "vast" else 1.0
    codes = {name: (cache * size).clamp(-448, 448).to(torch.float8_e4m3fn) for name, cache in caches.items()}
    if kind in cases.PEAKED:
        keys = codes["k_cache"].float().flatten(0, 1)
        cases.add_peaks(kind, q, keys, [1] * len(requests), requests, sm_scale, draws, table.slots)
    used = table.used(draws.device)
    for name, code in codes.items():
        spoiled = code.float().clamp(-100, 100)
        cases.spoil_unused(spoiled, used, plan["unused"])
        unused = ~used.view(*used.shape, 1, 1)
        codes[name] = torch.where(unused, spoiled.clamp(-448, 448), code.float()).to(torch.float8_e4m3fn)
    if kind in (*cases.LOGIT_KINDS, cases.EDGES):
        q = in_fp8(q).float()
    inputs = {"q": q.to(torch.bfloat16), **codes, "k_scale": k_scale, "v_scale": v_scale, "sm_scale": sm_scale}
    inputs |= cases.index_inputs(table, plan, draws.device)
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """That of a cache in any dtype; its parts also have what fp8 does: see `of_products`."""
    k_scale, v_scale, sm_scale = (float(inputs[name]) for name in ("k_scale", "v_scale", "sm_scale"))
    keys, values = (inputs[name].double().flatten(0, 1) for name in ("k_cache", "v_cache"))
    memory = cases.paged_memory(inputs, keys * k_scale, values * v_scale, definition.const_axes["page_size"])
    found = expected_outputs(inputs["q"], memory, sm_scale, False, any_chunks())
    return with_fp8(found, inputs["q"], memory, sm_scale)


def in_fp8(queries: torch.Tensor) -> torch.Tensor:
    """Queries in e4m3; those beyond its range become its largest number."""
    return queries.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def with_fp8(found: dict[str, Expected], queries: torch.Tensor, memory: Memory, sm_scale: float) -> dict[str, Expected]:
    """The parts of `of_products` besides, whose errors are those of each request."""
    value = found["output"].value
    parts = {name: torch.zeros_like(value) for name in ("e4m3", "steps", "products")}
    along = {f"{name}_along": value.new_zeros(()) for name in parts}
    of_lse = torch.zeros_like(found["lse"].value)
    for row, length in enumerate(memory.lengths):
        if length:
            place = torch.arange(length, device=value.device).unsqueeze(0)
            slots = memory.slots(torch.full_like(place[:, :1], row), place)[0]
            own = of_products(queries[row], memory.keys[slots], memory.values[slots], sm_scale)
            for name, part in parts.items():
                part[row] = own[name]
            for name in along:
                along[name] = along[name] + own[name]
            of_lse[row] = own["lse"]
    output, lse = found["output"], found["lse"]
    return {
        "output": replace(output, parts={**output.parts, **parts, **along}),
        "lse": replace(lse, parts={**lse.parts, "products": of_lse}),
    }


def of_products(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sm_scale: float) -> dict[str, torch.Tensor]:
    """The effect of fp8 on the output o of one query with the weights p, by element and along o, and on its lse.

    The largest weight is 1 before it is divided by the sum, and never rounded. ``e4m3``: independent errors of up to
    2^-4 p. ``steps``: the sum of those of small weights, which many keys may share: up to 2^-10, or up to p where they
    are rounded to 0; and what tensor cores drop. ``products``, and ``lse``: what they drop of the logits.

    Args:
        q: [heads, dim]; keys, values: float64 [tokens, kv_heads, dim].
    """
    group = len(q) // keys.shape[1]
    k, v = (each.transpose(0, 1).repeat_interleave(group, dim=0) for each in (keys, values))
    p = ((k @ q.double().unsqueeze(2)).squeeze(2) * sm_scale).softmax(dim=1)
    dropped = p * (k.abs() @ q.double().abs().unsqueeze(2)).squeeze(2) * (sm_scale * ACCUMULATION)
    largest = p.amax(dim=1, keepdim=True)
    rounded = (p * E4M3).masked_fill(p == largest, 0.0)
    small = torch.where(p < SUBNORMAL * largest, p.minimum(largest * SMALLEST_STEP), 0.0)
    output = torch.einsum("hn,hnd->hd", p, v)
    moved = torch.einsum("hnd,hd->hn", v, output)
    weighted = torch.einsum("hn,hnd->hd", p, v.abs())
    total, size = dropped.sum(dim=1, keepdim=True), output.square().sum(dim=1, keepdim=True)
    return {
        "e4m3": CONFIDENCE * torch.einsum("hn,hnd->hd", rounded.square() / 3, v.square()).sqrt(),
        "steps": torch.einsum("hn,hnd->hd", small, v.abs()) + ACCUMULATION * weighted,
        "products": torch.einsum("hn,hnd->hd", dropped, v.abs()) + total * output.abs(),
        "lse": LOG2_E * total.squeeze(1),
        "e4m3_along": (rounded * moved).square().sum() / 3,
        "steps_along": (small * moved.abs()).sum() + ACCUMULATION * (weighted * output.abs()).sum(),
        "products_along": (dropped * (moved - size).abs()).sum(),
    }


def in_products_of_fp8(policy: Policy) -> ErrorBound:
    """A policy of a kernel that does not round its weights, for one that rounds them to e4m3."""
    assert isinstance(policy, ErrorBound)
    base, own_gain = policy.bound, policy.gain

    def bound(expected: Expected) -> torch.Tensor:
        parts = expected.parts
        added = sum((parts[name] for name in ("e4m3", "steps") if name in parts), parts["products"])
        return base(expected) + HIGHER_ORDERS * added

    def gain(expected: Expected) -> float:
        assert own_gain is not None
        parts = (expected.parts[f"{name}_along"] for name in ("e4m3", "steps", "products"))
        variance, steps, products, size = host_figures(*parts, expected.value.square().sum())
        moved = CONFIDENCE * math.sqrt(variance) + steps + products
        return own_gain(expected) + (HIGHER_ORDERS * moved / size if size else 0.0)

    return ErrorBound(
        bound,
        f"{policy.reason}; weights but the largest are rounded to e4m3: 8 standard deviations of errors up to 2^-4, "
        "2^-10 of the largest for each below 2^-6 of it; sums of fp8 products drop 2^-10",
        gain if own_gain else None,
    )


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    keys, values = (inputs[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    arguments = inputs["kv_indptr"], inputs["kv_indices"], float(inputs["sm_scale"]), outputs["output"]
    scales = float(inputs["k_scale"]), float(inputs["v_scale"])
    return triton.attend(inputs["q"], keys, values, *arguments, scales)


def run_flash_attention(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    shape = (len(inputs["q"]), definition.const_axes["num_kv_heads"])
    scales = {
        f"{name}_descale": torch.full(shape, float(inputs[f"{name}_scale"]), device=inputs["q"].device) for name in "kv"
    }
    caches = (inputs["k_cache"], inputs["v_cache"])
    return flash_attention.over_pages(definition, inputs, in_fp8(inputs["q"]), *caches, **scales)


#: Partial outputs of both kernels are float32, and weights are summed before they are rounded.
POLICIES = {
    name: in_products_of_fp8(policy)
    for name, policy in kernel_policies(Rounding(weights=False, sum=False, partial=0)).items()
}
KERNELS = tuple(
    replace(plain, compare=POLICIES)
    for plain in (
        triton.decode_kernel(run_triton),
        replace(flash_attention.DECODE, call=run_flash_attention, plan_options=WITH_KEYS, common=None),
    )
)
FAMILY = cases.paged_family(
    "gqa_paged_decode_fp8_cache",
    "gqa_paged",
    {**TWIN, "page_size": 1},
    make_inputs,
    oracle,
    KERNELS,
    (cases.usual_scale(),),
)


def corners(request: PlanRequest) -> list[Plan]:
    """Those of any paged cache. On a CPU, the last one has scales that differ and are not powers of two. Queries beyond
    float16 are 0 in e4m3, so kernels get zeros. The errors of e4m3 in spread and vast logits are not a kernel's."""
    found = list(FAMILY.plan.corners(request))
    if request.large or request.plan_options is not None:  # for a kernel
        found = [plan for plan in found if plan["logits"] not in ("spread", "vast")]
        return [{**plan, "logits": "uniform"} if plan["logits"] == "beyond_float16" else plan for plan in found]
    return [*found[:-1], {**found[-1], "logits": "positive", "num_pages": MANY_PAGES}]


FAMILIES = (replace(FAMILY, plan=FAMILY.plan.with_corners(corners)),)
