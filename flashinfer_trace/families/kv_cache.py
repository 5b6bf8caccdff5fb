"""Writes to key-value caches, which leave all other rows alone, and DeepSeek's packed fp8 cache of keys.

New rows of the latter are quantized, and chosen rows are dequantized to bfloat16. SGLang's Triton kernels (0.5.11,
srt/layers/attention/nsa) multiply by the reciprocal of a scale, in float32, and count offsets in int32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_trace.families.calls import called, calling
from flashinfer_trace.families.quantization import CODES_E4M3, E4M3_MAX, LAUNCHABLE, SCALES, Rows, of_kernels, quantized
from flashinfer_trace.families.quantized import CODE_SIGMA, normal_codes, varied_scales
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.faults import Fault, FaultyCase, with_inputs
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws, sizes
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import Expected, rounding_error
from flashinfer_trace.verdict.copies import PartlyCopied, SameBits, partly_copied

COPIES = SameBits("copies, bit for bit; rows that are not written stay")
JIT = "sglang.kernels.ops.kvcache.kvcache"
TRITON = "sglang.srt.mem_cache.utils"
#: ``random``: any slots, in any order; ``consecutive``: as for a prompt; ``all``: every slot of the cache is written.
SLOTS = ("random", "consecutive", "all")


#: The corners are one token among others, a cache that is written from its first to its last slot, and contents of any
#: bits.
PLAN = RowPlans(
    {"num_tokens": Count(40, 4096, usual=lambda definition, axes: min(8, axes.get("num_slots", 8)), corner=7)},
    {
        "spare": Drawn(
            lambda request: sizes(0, 1024 if request.large else 20),
            lambda definition, axes: max(0, axes.get("num_slots", 4 * axes["num_tokens"]) - axes["num_tokens"]),
        ),
        "slots": SLOTS,
        "contents": ("normal",),
    },
    special=[{"num_tokens": 1, "spare": 5}, {"spare": 0, "slots": "all"}, {"spare": 5, "contents": "special"}],
)


def slots_of(plan: Plan, draws: Draws) -> torch.Tensor:
    count, spare = plan["num_tokens"], 0 if plan["slots"] == "all" else plan["spare"]
    if plan["slots"] == "consecutive":
        first = draws.host_integers(1, 0, spare)[0]
        return torch.arange(first, first + count, device=draws.device)
    return draws.permutation(count + spare)[:count]


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Values of the planned kind everywhere, also in the slots: those that are not written must stay."""
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


def mla_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    rows = torch.zeros(len(inputs["loc"]), inputs["kv_buffer"].shape[1], device=inputs["loc"].device)
    rows = rows.to(torch.bfloat16)
    width = inputs["cache_k_nope"].shape[1]
    rows[:, :width], rows[:, width:] = inputs["cache_k_nope"], inputs["cache_k_rope"]
    return {"kv_buffer_out": written(inputs["kv_buffer"], inputs["loc"], rows)}


def slot_before(name: str, cache: str) -> Fault:
    """The slot before for every token, which is another one where there are two."""

    def misread(inputs: Inputs, trial: FaultyCase) -> Inputs | None:
        slots, count = inputs[name], len(inputs[cache])
        return {**inputs, name: (slots - 1) % count} if count > 1 and len(slots) else None

    return with_inputs("the slot before", misread)


cache_family = functools.partial(
    Family,
    op_type="kv_cache",
    plan=PLAN,
    make_inputs=make_inputs,
    strided=("k", "v", "k_cache", "v_cache", "kv_buffer", "cache_k_nope", "cache_k_rope"),
)

#: Without being told, kernels keep slot 0, which SGLang reserves, as it is.
EVERY_SLOT = "reserved_skip_index=-1"
STORES = (
    cache_family(
        name="store_cache",
        twin={"row_dim": 16},
        oracle=lambda definition, inputs: {
            f"{name}_cache_out": written(inputs[f"{name}_cache"], inputs["indices"], inputs[name]) for name in "kv"
        },
        compare={"k_cache_out": COPIES, "v_cache_out": COPIES},
        kernels=(
            calling(
                f"{JIT}.store_cache",
                f"k v k_cache v_cache indices {EVERY_SLOT}",
                limits=LAUNCHABLE,
                in_place=("k_cache", "v_cache"),
            ),
        ),
        faults=(slot_before("indices", "k_cache"),),
    ),
    cache_family(
        name="set_mla_kv_buffer",
        twin={"head_dim_ckv": 12, "head_dim_kpe": 4, "head_dim_key": 16},
        oracle=mla_oracle,
        compare={"kv_buffer_out": COPIES},
        kernels=(
            calling(
                f"{TRITON}.set_mla_kv_buffer_triton",
                f"kv_buffer loc cache_k_nope cache_k_rope {EVERY_SLOT}",
                limits=LAUNCHABLE,
                in_place=("kv_buffer",),
            ),
        ),
        faults=(slot_before("loc", "kv_buffer"),),
    ),
)


QUANTIZE = "sglang.kernels.ops.quantization.dsa_quant_k_cache"
DEQUANTIZE = "sglang.kernels.ops.attention.dsa.dequant_k_cache"
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
#: ``groups``: the groups of a token differ by up to 2^120; ``powers``: maxima of 1.75, whose scale is a power of two.
KINDS = (*VALUE_KINDS, "groups", "powers")
#: Standard deviation of the smallest values: scales are just normal numbers, and some values are not.
LEAST = 2.0**-116
#: ``quantized``: as of normal keys; ``any``: all finite codes, with scales of any size; ``powers``: with powers of two.
ROW_KINDS = ("quantized", "any", "powers")
#: ``random``: any slots, also several times; ``consecutive``: as of a prompt; ``one``: the same for all tokens.
CHOSEN_SLOTS = ("random", "consecutive", "one")


def any_size(draws: Draws, shape: list[int]) -> torch.Tensor:
    return torch.exp2(draws.uniform(shape, -60, 60))


def rotary(kind: str, draws: Draws, shape: list[int]) -> torch.Tensor:
    """bfloat16 numbers of any size, the first row also with the largest; of any bits where the kind is ``special``."""
    if kind == "special":
        return draws.values(shape, torch.bfloat16, kind)
    values = (draws.normal(shape) * any_size(draws, shape)).to(torch.bfloat16)
    values[:1, -1:] = BFLOAT16_MAX
    return values


# Quantization


def quantize_corners(request: PlanRequest) -> list[Plan]:
    """Groups of widely different sizes, one of them of zeros; ties; the ends of ranges; rotated parts of any bits."""
    kinds = ("powers", "largest", "huge", "minute", "integers", "special")
    groups = {"values": "groups", "zero_group": request.options_of(Rows).zeros}
    return [groups, *({"values": kind} for kind in kinds), {"num_tokens": 1}]


QUANTIZE_PLAN = RowPlans(
    {"num_tokens": Count(40, 4096)},
    {"values": KINDS, "zero_group": lambda request: FLAG if request.options_of(Rows).zeros else (False,)},
    special=quantize_corners,
    # Whether kernels keep subnormal numbers has not been seen: only the reference meets the smallest values.
    on_cpu=[{"values": "least"}],
)


def values_of(kind: str, draws: Draws, tokens: int, groups: int, size: int) -> torch.Tensor:
    """bfloat16 [tokens, groups, size], no group of which is zero."""
    shape = [tokens, groups, size]
    if kind == "groups":
        return (draws.normal(shape) * any_size(draws, [tokens, groups, 1])).to(torch.bfloat16)
    if kind in ("powers", "largest"):
        factor = 0.4375 if kind == "powers" else BFLOAT16_MAX / 4
        return draws.integers(shape, -4, 4).double().mul_(factor).to(torch.bfloat16)
    if kind == "least":
        return draws.normal(shape, torch.bfloat16, LEAST)
    return draws.values([tokens, groups * size], torch.bfloat16, "normal" if kind == "special" else kind).view(shape)


def quantize_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Compressed keys of the planned kind; optionally a token in the middle has one group of zeros."""
    axes, tokens = definition.const_axes, plan["num_tokens"]
    k_nope = values_of(plan["values"], draws, tokens, axes["num_groups"], axes["group_size"])
    if plan["zero_group"]:
        k_nope[tokens // 2 :][:1, -1] = 0
    return {"k_nope": k_nope.flatten(1), "k_rope": rotary(plan["values"], draws, [tokens, axes["head_dim_kpe"]])}


def parts_of(definition: Definition, nope: torch.Tensor, rope: torch.Tensor) -> Outputs:
    """Rows of bytes, [num_tokens, codes and scales] and [num_tokens, rotated part], as the outputs."""
    codes, scales = nope.tensor_split((definition.const_axes["head_dim_ckv"],), dim=1)
    typed = codes.view(torch.float8_e4m3fn), scales.view(torch.float32), rope.view(torch.bfloat16)
    return dict(zip(("codes", "scales", "k_rope_out"), typed, strict=True))


def run_separate(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang writes new keys: codes and scales in one tensor, the rotated part in another."""
    nope, rope = called(f"{QUANTIZE}.quantize_k_cache_separate", "k_nope k_rope", definition, inputs)
    return parts_of(definition, nope.squeeze(1), rope.squeeze(1))


def run_rows(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache

    keys = torch.cat((inputs["k_nope"], inputs["k_rope"]), dim=1)
    rows = quantize_k_cache(keys[:, None, None]).view(torch.uint8).flatten(0, 2)
    return parts_of(definition, *rows.tensor_split((rows.shape[1] - 2 * inputs["k_rope"].shape[1],), dim=1))


# A group of zeros gets other codes than 0 (findings/kernels.json): kernels are given none.
QUANTIZERS = tuple(
    Kernel(
        f"{QUANTIZE}.{name}",
        call,
        limits=LAUNCHABLE,
        plan_options=Rows(zeros=False),
        compare={"codes": of_kernels(CODES_E4M3)},
    )
    for name, call in (("quantize_k_cache_separate", run_separate), ("quantize_k_cache", run_rows))
)

# Dequantization

#: The corners are more tokens than slots; one token; products up to bf16's largest; the scale 0; rotated parts of any
#: bits. Whether kernels keep subnormal numbers has not been seen: only the reference meets the smallest scales.
DEQUANTIZE_PLAN = RowPlans(
    {
        "num_tokens": Count(40, 4096, corner=7),
        "num_slots": Count(40, 4096, least=1, usual=lambda definition, axes: max(1, 4 * axes["num_tokens"]), corner=5),
    },
    {"slots": CHOSEN_SLOTS, "values": ROW_KINDS},
    special=[
        {"values": "any"},
        {"values": "any", "num_tokens": 1},
        {"num_slots": 9, "slots": "consecutive", "values": "powers"},
        *({"values": kind} for kind in ("largest", "zeros", "special")),
    ],
    on_cpu=[{"values": "least"}],
)


def finite_codes(draws: Draws, shape: list[int]) -> torch.Tensor:
    """Every e4m3 number, but no NaN, equally often."""
    codes = draws.integers(shape, 0, 253)
    codes += codes >= 0x7F
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def scales_of(kind: str, draws: Draws, shape: list[int]) -> torch.Tensor:
    if kind == "quantized":
        return varied_scales(draws, shape, 1 / CODE_SIGMA)
    if kind in ("powers", "least"):
        low, high = (-20, 20) if kind == "powers" else (-126, -120)
        return torch.exp2(draws.integers(shape, low, high).float())
    if kind == "largest":
        return torch.full(shape, BFLOAT16_MAX / E4M3_MAX, device=draws.device)
    return any_size(draws, shape)


def dequantize_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows of the planned kind; every byte of a slot that no token chooses is NaN."""
    axes, count, slots = definition.const_axes, plan["num_slots"], chosen(plan, draws)
    codes = (normal_codes if plan["values"] == "quantized" else finite_codes)(draws, [count, axes["head_dim_ckv"]])
    scales = scales_of(plan["values"], draws, [count, axes["num_groups"]])
    if plan["values"] == "zeros":
        scales[:, 0] = 0
    parts = codes, scales, rotary(plan["values"], draws, [count, axes["head_dim_kpe"]])
    rows = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
    unused = torch.ones(count, dtype=torch.bool, device=draws.device)
    unused[slots] = False
    rows[unused] = 0xFF
    return {"kv_cache": rows.view(torch.float8_e4m3fn), "slots": slots.to(torch.int32)}


def chosen(plan: Plan, draws: Draws) -> torch.Tensor:
    tokens, last = plan["num_tokens"], plan["num_slots"] - 1
    if plan["slots"] == "random":
        return draws.integers([tokens], 0, last)
    step = 1 if plan["slots"] == "consecutive" else 0
    places = torch.arange(tokens, device=draws.device) * step + draws.host_integers(1, 0, last)[0]
    return places.remainder(last + 1)


def dequantize_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Exact products, of numbers that a table of all bytes gives. Where float32 holds them, one rounding is left."""
    axes, slots = definition.const_axes, inputs["slots"].long()
    rows = inputs["kv_cache"].view(torch.uint8)[slots]
    every = torch.arange(256, dtype=torch.uint8, device=rows.device).view(torch.float8_e4m3fn).double()
    ckv, end = axes["head_dim_ckv"], rows.shape[1] - 2 * axes["head_dim_kpe"]
    scales = rows[:, ckv:end].contiguous().view(torch.float32).double()
    products = every[rows[:, :ckv].long()] * scales.repeat_interleave(axes["group_size"], dim=1)
    source = torch.nn.functional.pad(rows[:, end:].contiguous().view(torch.int16), (ckv, 0)).view(torch.bfloat16)
    copied = torch.arange(axes["head_dim_key"], device=rows.device).expand_as(source) >= ckv
    exact = bool((products.float().double() == products).all())
    value = torch.nn.functional.pad(products, (0, axes["head_dim_kpe"]))
    return {"keys": partly_copied(value, {}, copied, source, exact)}


def product_bound(expected: Expected) -> torch.Tensor:
    """A float32 rounding, and one of its result to bf16."""
    first = rounding_error(expected.value, torch.float32)
    return first + rounding_error(expected.value.abs() + first, torch.bfloat16)


def run_paged(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import dequantize_k_cache_paged_dsa

    return {"keys": dequantize_k_cache_paged_dsa(inputs["kv_cache"].unsqueeze(1), inputs["slots"]).squeeze(1)}


PACKED = (
    Family(
        name="quantize_k_cache",
        op_type="kv_cache",
        twin={"head_dim_ckv": 96, "head_dim_kpe": 16, "group_size": 32, "num_groups": 3},
        plan=QUANTIZE_PLAN,
        make_inputs=quantize_inputs,
        oracle=lambda definition, inputs: {
            **quantized(inputs["k_nope"], definition.const_axes["group_size"], E4M3_MAX, 0.0),
            "k_rope_out": Expected(inputs["k_rope"]),
        },
        compare={"codes": CODES_E4M3, "scales": SCALES, "k_rope_out": SameBits()},
        kernels=QUANTIZERS,
    ),
    Family(
        name="dequantize_k_cache",
        op_type="kv_cache",
        twin={
            "head_dim_ckv": 96,
            "head_dim_kpe": 16,
            "head_dim_key": 112,
            "group_size": 32,
            "num_groups": 3,
            "bytes_per_token": 140,
        },
        plan=DEQUANTIZE_PLAN,
        make_inputs=dequantize_inputs,
        oracle=dequantize_oracle,
        compare={
            "keys": PartlyCopied(
                product_bound,
                "the product of a code and its scale is rounded to float32, u = 2^-24, and to bf16, u = 2^-8; "
                "the rotary part is copied, bit for bit",
            )
        },
        kernels=(
            Kernel(
                f"{DEQUANTIZE}.dequantize_k_cache_paged_dsa",
                run_paged,
                limits={**LAUNCHABLE, "num_slots": (1, 1 << 21)},
            ),
        ),
        faults=(slot_before("slots", "kv_cache"),),
    ),
)
FAMILIES = (*STORES, *PACKED)
