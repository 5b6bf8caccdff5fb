"""New keys of the indexer, quantized into the pages of its cache."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_trace.families import quantization
from flashinfer_trace.families.kv_cache import KINDS, SLOTS, finite_codes, values_of
from flashinfer_trace.families.quantized import varied_scales
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.copies import PartlyCopied, partly_copied

MODULE = "sglang.kernels.ops.kvcache.dsa_fused_store_index_cache"
#: The smallest maximum that a key is scaled by.
SMALLEST = 1e-4
PAGED = PartlyCopied(
    quantization.SCALES.bound, f"{quantization.SCALES.reason}; scales of other slots stay, bit for bit"
)


#: The corners have the ends of ranges, keys of zeros, and a cache that is written as a whole.
PLAN = RowPlans(
    {
        "num_tokens": Count(40, 4096, usual=lambda definition, axes: min(8, 64 * axes.get("num_pages", 1)), corner=7),
        "num_pages": Count(12, 100, usual=2, corner=3),
    },
    {"values": KINDS, "slots": SLOTS, "zero_key": FLAG},
    special=[
        *({"values": kind} for kind in ("groups", "powers", "largest", "huge", "minute", "integers")),
        {"zero_key": True, "slots": "all"},
        {"num_tokens": 1},
    ],
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    dim, size = (definition.const_axes[axis] for axis in ("head_dim", "page_size"))
    tokens = plan["num_tokens"]
    pages = max(plan["num_pages"], -(-tokens // size))
    first = draws.host_integers(1, 0, pages * size - tokens)[0] if plan["slots"] == "consecutive" else None
    slots = draws.permutation(pages * size)[:tokens]
    key = values_of(plan["values"], draws, tokens, 1, dim).flatten(1)
    if plan["zero_key"]:
        key[tokens // 2 :][:1] = 0
    return {
        "key": key,
        "code_pages": finite_codes(draws, [pages, size, dim]),
        "scale_pages": varied_scales(draws, [pages, size], 0.01),
        "out_cache_loc": slots if first is None else torch.arange(first, first + tokens, device=draws.device),
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    pages, slots, dim = inputs["code_pages"], inputs["out_cache_loc"], inputs["key"].shape[1]
    found = quantization.quantized(inputs["key"], dim, quantization.E4M3_MAX, SMALLEST)
    codes, exact = pages.double().flatten(0, 1), torch.ones(len(pages) * pages.shape[1], dim, dtype=torch.bool)
    scales, copied = inputs["scale_pages"].double().flatten(), torch.ones(len(codes), dtype=torch.bool)
    exact, copied = exact.to(slots.device), copied.to(slots.device)
    for token, slot in enumerate(slots.tolist()):
        codes[slot], exact[slot] = found["codes"].value[token], found["codes"].parts[quantization.EXACT][token]
        scales[slot], copied[slot] = found["scales"].value[token], False
    shape, parts = inputs["scale_pages"].shape, {quantization.EXACT: exact.view(pages.shape)}
    return {
        "code_pages_out": Expected(codes.view(pages.shape), parts),
        "scale_pages_out": partly_copied(scales.view(shape), {}, copied.view(shape), inputs["scale_pages"]),
    }


def run_store(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The pages as one buffer of bytes, as the kernel takes them."""
    from sglang.kernels.ops.kvcache.dsa_fused_store_index_cache import fused_store_index_k_cache

    pages, size = inputs["code_pages"], definition.const_axes["page_size"]
    parts = [each.view(torch.uint8).flatten(1) for each in (pages, inputs["scale_pages"])]
    buffer = torch.cat(parts, dim=1)
    fused_store_index_k_cache(inputs["key"], buffer, inputs["out_cache_loc"], size)
    codes, scales = buffer.tensor_split((parts[0].shape[1],), dim=1)
    return {
        "code_pages_out": codes.reshape(pages.shape).view(torch.float8_e4m3fn),
        "scale_pages_out": scales.contiguous().view(torch.float32),
    }


def slot_before(inputs: dict[str, Any]) -> dict[str, Any] | None:
    slots, room = inputs["out_cache_loc"], inputs["scale_pages"].numel()
    return {**inputs, "out_cache_loc": (slots - 1) % room} if len(slots) and room > 1 else None


FAMILIES = (
    Family(
        name="fused_store_index_k_cache",
        op_type="sparse_attention",
        twin={"head_dim": 32, "page_size": 4},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"code_pages_out": quantization.CODES_E4M3, "scale_pages_out": PAGED},
        kernels=(
            Kernel(
                f"{MODULE}.fused_store_index_k_cache",
                run_store,
                limits={"num_tokens": (1, 1 << 20)},
                compare={"code_pages_out": quantization.of_kernels(quantization.CODES_E4M3)},
            ),
        ),
        faults=(with_inputs("the slot before", lambda inputs, trial: slot_before(inputs)),),
    ),
)
