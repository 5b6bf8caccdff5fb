"""DeepSeek's packed fp8 cache of keys: new rows are quantized, and chosen rows are dequantized to bfloat16.

SGLang's Triton kernels (0.5.11, srt/layers/attention/nsa) multiply by the reciprocal of a scale, in float32, and count
offsets in int32.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.kv_cache import slot_before
from flashinfer_trace.families.quantization.cases import CODES_E4M3, E4M3_MAX, SCALES, Rows, of_kernels, quantized
from flashinfer_trace.families.quantization.kernels import LAUNCHABLE, sglang_kernel
from flashinfer_trace.families.quantized import CODE_SIGMA, normal_codes, varied_scales
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import Expected, rounding_error
from flashinfer_trace.verdict.copies import PartlyCopied, SameBits, partly_copied

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
SLOTS = ("random", "consecutive", "one")


def any_size(draws: Draws, shape: list[int]) -> torch.Tensor:
    """float32 numbers from 2^-60 to 2^60, log-uniform."""
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
    """Groups of very different sizes, one of them of zeros; ties; the ends of ranges; rotated parts of any bits."""
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


def quantize_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    expected = quantized(inputs["k_nope"], definition.const_axes["group_size"], E4M3_MAX, 0.0)
    return {**expected, "k_rope_out": Expected(inputs["k_rope"])}


def parts_of(definition: Definition, nope: torch.Tensor, rope: torch.Tensor) -> Outputs:
    """Rows of bytes, [num_tokens, codes and scales] and [num_tokens, rotated part], as the outputs."""
    codes, scales = nope.tensor_split((definition.const_axes["head_dim_ckv"],), dim=1)
    typed = codes.view(torch.float8_e4m3fn), scales.view(torch.float32), rope.view(torch.bfloat16)
    return dict(zip(("codes", "scales", "k_rope_out"), typed, strict=True))


def run_separate(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang writes new keys: codes and scales in one tensor, the rotated part in another."""
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

    nope, rope = quantize_k_cache_separate(inputs["k_nope"], inputs["k_rope"])
    return parts_of(definition, nope.squeeze(1), rope.squeeze(1))


def run_rows(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Whole rows, of keys in pages of one token."""
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache

    keys = torch.cat((inputs["k_nope"], inputs["k_rope"]), dim=1)
    rows = quantize_k_cache(keys[:, None, None]).view(torch.uint8).flatten(0, 2)
    return parts_of(definition, *rows.tensor_split((rows.shape[1] - 2 * inputs["k_rope"].shape[1],), dim=1))


# A group of zeros gets other codes than 0 (findings/kernels.json): kernels are given none.
QUANTIZERS = tuple(
    replace(
        sglang_kernel(QUANTIZE, name, call),
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
    {"slots": SLOTS, "values": ROW_KINDS},
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
    """float32 scales."""
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
    """int64 [num_tokens]."""
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


FAMILIES = (
    Family(
        name="quantize_k_cache",
        op_type="kv_cache",
        twin={"head_dim_ckv": 96, "head_dim_kpe": 16, "group_size": 32, "num_groups": 3},
        plan=QUANTIZE_PLAN,
        make_inputs=quantize_inputs,
        oracle=quantize_oracle,
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
            replace(
                sglang_kernel(DEQUANTIZE, "dequantize_k_cache_paged_dsa", run_paged),
                limits={**LAUNCHABLE, "num_slots": (1, 1 << 21)},
            ),
        ),
        faults=(with_inputs("the slot before", lambda inputs, trial: slot_before("slots", inputs)),),
    ),
)
