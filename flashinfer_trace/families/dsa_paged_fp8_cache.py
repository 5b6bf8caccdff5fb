"""DeepSeek sparse attention over a cache of packed rows: fp8 codes, their scales, and bfloat16 rotary features.

FlashMLA's kernel (csrc/sm90/decode/sparse_fp8, dequant.h) rounds each scale to bf16, multiplies the codes by it, and
rounds the products to bf16 again, before it attends to them as to a cache in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flashinfer_trace.families import dsa_paged
from flashinfer_trace.families.attention.cases import (
    PEAKED,
    UNUSED_KINDS,
    add_peaks,
    give_signs,
    query_scale,
    softmax_scale,
    usual_scale,
    value_scale,
)
from flashinfer_trace.families.attention.oracle import Memory, any_chunks, expected_outputs
from flashinfer_trace.families.attention.policies import (
    BFLOAT16,
    HIGHER_ORDERS,
    LOG2_E,
    LSE,
    OUTPUT,
    Rounding,
    kernel_policies,
)
from flashinfer_trace.families.mla_paged.inputs import SCALED_DIM
from flashinfer_trace.families.quantized import E4M3_MAX
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Expected, Policy, host_figures

#: Every byte of a row that is NaN in each of its formats.
NAN_BYTE = 0xFF
#: Variance of one rounding to bf16, relative to the square of the value: at most 2^-8 of it, evenly spread.
VARIANCE = BFLOAT16**2 / 3
#: Tokens whose logits are computed together.
BLOCK = 16


@dataclass(frozen=True)
class RowOptions(dsa_paged.SparseOptions):
    """Further choices that plans can draw for a kernel: NaN in slot 0, which it may read where a token chooses
    nothing."""

    first_slot: bool = True


def unused_kinds(request: PlanRequest) -> tuple[str, ...]:
    return UNUSED_KINDS if request.options_of(RowOptions).first_slot else ("nan_but_first", *UNUSED_KINDS[1:])


PLAN = replace(dsa_paged.PLAN, choices={**dsa_paged.PLAN.choices, "unused": unused_kinds})


def packed(ckv: torch.Tensor, kpe: torch.Tensor, groups: int) -> torch.Tensor:
    """float32 ckv [slots, n] and bfloat16 kpe [slots, m] as rows of bytes: each group's largest code is 448."""
    by_group = ckv.reshape(len(ckv), groups, ckv.shape[1] // groups)
    scales = by_group.abs().amax(dim=2) / E4M3_MAX
    codes = (by_group / scales.unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX).flatten(1).to(torch.float8_e4m3fn)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scales, kpe)], dim=1)


def keys_of(definition: Definition, rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes [slots, bytes] as float64 keys [slots, 1, ckv + kpe]: the codes times their scales, exactly."""
    ckv, kpe = (definition.const_axes[axis] for axis in ("head_dim_ckv", "head_dim_kpe"))
    codes, scales, rotary = (part.contiguous() for part in rows.tensor_split((ckv, rows.shape[1] - 2 * kpe), dim=1))
    each = scales.view(torch.float32).double()
    groups = (len(rows), each.shape[1], ckv // each.shape[1])
    values = codes.view(torch.float8_e4m3fn).double().view(groups) * each.unsqueeze(2)
    return torch.cat((values.flatten(1), rotary.view(torch.bfloat16).double()), dim=1).unsqueeze(1)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """As for a cache in bfloat16, with quantized keys. Groups differ in magnitude, so no two scales are alike."""
    axes, kind, sm_scale = definition.const_axes, plan["logits"], softmax_scale(SCALED_DIM, plan["scale"])
    heads, ckv, kpe, page_size = (axes[axis] for axis in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe", "page_size"))
    slots, groups = plan["num_pages"] * page_size, axes["num_groups"]
    indices = dsa_paged.chosen_slots(plan, slots, axes["topk"], draws)
    cache = draws.normal((slots, ckv + kpe), scale=value_scale(kind))
    cache[:, :ckv] *= torch.exp2(draws.uniform([slots, groups], -0.5, 0.5)).repeat_interleave(ckv // groups, dim=1)
    if kind == "positive":
        cache.abs_()
    q = draws.normal([plan["num_tokens"], heads, ckv + kpe], scale=query_scale(kind))
    give_signs(kind, q, cache)
    rows = packed(cache[:, :ckv], cache[:, ckv:].to(torch.bfloat16), groups)
    chosen = indices[indices >= 0].long()
    if kind in PEAKED:
        counts = (indices >= 0).sum(dim=1).tolist()
        add_peaks(kind, q, keys_of(definition, rows), [1] * len(counts), counts, sm_scale, draws, chosen.cpu())
    unused = torch.ones(slots, dtype=torch.bool, device=draws.device)
    unused[chosen] = False
    stale = packed(cache[:, :ckv] * 1000, (cache[:, ckv:] * 1000).to(torch.bfloat16), groups)
    if plan["unused"] == "nan_but_first":
        rows[0] = torch.where(unused[0], stale[0], rows[0])
        unused[0] = False
    rows[unused] = stale[unused] if plan["unused"] == "stale" else NAN_BYTE
    q = q.to(torch.bfloat16)
    return {
        "q_nope": q[..., :ckv].contiguous(),
        "q_pe": q[..., ckv:].contiguous(),
        "kv_cache": rows.view(torch.float8_e4m3fn).view(plan["num_pages"], page_size, axes["bytes_per_token"]),
        "sparse_indices": indices,
        "sm_scale": sm_scale,
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Every token is a request with one query, whose keys are the slots that it chose. The parts also have
    ``dequantized``: bounds on the effect of rounding the scales and the products."""
    axes, indices = definition.const_axes, inputs["sparse_indices"].long()
    front = indices.gather(1, (indices < 0).int().argsort(dim=1, stable=True))
    keys = keys_of(definition, inputs["kv_cache"].flatten(0, 1).view(torch.uint8))
    counts = (indices >= 0).sum(dim=1)
    memory = Memory(
        keys,
        keys[..., : axes["head_dim_ckv"]],
        list(range(len(indices) + 1)),
        counts.tolist(),
        lambda request, position: front[request, position],
    )
    queries = torch.cat((inputs["q_nope"], inputs["q_pe"]), dim=-1)
    found = expected_outputs(queries, memory, inputs["sm_scale"], False, any_chunks())
    scaled = queries.double() * float(inputs["sm_scale"])
    blocks = [slice(first, first + BLOCK) for first in range(0, len(front), BLOCK)]
    sizes = axes["num_groups"], axes["head_dim_ckv"]
    bounds = [dequantization(*sizes, scaled[block], keys[:, 0], front[block]) for block in blocks]
    return {name: replace(one, parts={**one.parts, **together(bounds, name, one.value)}) for name, one in found.items()}


def together(bounds: Sequence[Mapping[str, torch.Tensor]], name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bounds on one output, and the sum of how far they move the output along itself."""
    return {
        "dequantized": torch.cat([one[name] for one in bounds]) if bounds else torch.zeros_like(value),
        "dequantized_along": sum((one[f"{name}_along"] for one in bounds), value.new_zeros(())),
    }


def dequantization(
    groups: int, ckv: int, queries: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The effect of rounding on the outputs of some tokens: of each code, and of the scale that a group shares.

    Errors e_j of the logits are sums of the products' errors; they move the lse by sum p e, and an output o by
    sum p e (v - o). Rounded values move it by sum p |v|, twice 2^-8 of it at most. All are independent but for a scale.
    Heads and tokens share keys, so the changes of outputs along themselves are added up row by row.

    Args:
        queries: scaled, float64 [tokens, heads, dim].
        keys: of all slots, float64 [slots, dim].
        slots: those that each token chose, then negative ones [tokens, topk].
    """
    unchosen = slots < 0
    own = keys[slots.clamp_min(0)].masked_fill(unchosen.unsqueeze(2), 0.0)
    logits = (queries @ own.mT).masked_fill(unchosen.unsqueeze(1), -torch.inf)
    p = logits.softmax(dim=2).nan_to_num(0.0)
    values = own[..., :ckv]
    nope = queries[..., :ckv]
    variance = nope.square() @ values.square().mT
    for group in torch.arange(ckv, device=keys.device).chunk(groups):
        variance += (nope[..., group] @ values[..., group].mT).square()
    moved = p.square() * variance * VARIANCE
    output = p @ values
    total = moved.sum(dim=2, keepdim=True)
    spread = moved @ values.square() - 2 * output * (moved @ values) + output.square() * total
    rounded = (p.square() @ values.square() * (2 * VARIANCE)).sqrt() * CONFIDENCE
    rounded = rounded.minimum(2 * BFLOAT16 * (p @ values.abs()))
    lse = logits.logsumexp(dim=2).nan_to_num(neginf=0.0)
    lse_error = HIGHER_ORDERS * CONFIDENCE * total.squeeze(2).sqrt()
    along = output @ values.mT
    turned = moved * (along - output.square().sum(dim=2, keepdim=True)).square()
    of_values = output.square() @ values.square().mT
    for group in torch.arange(ckv, device=keys.device).chunk(groups):
        of_values += (output[..., group] @ values[..., group].mT).square()
    scaled = CONFIDENCE * (p.square() * of_values * VARIANCE).sum(dim=2).sqrt()
    scaled = scaled.minimum(2 * BFLOAT16 * (p * (output.abs() @ values.abs().mT)).sum(dim=2))
    return {
        "output": HIGHER_ORDERS * (CONFIDENCE * spread.clamp_min(0.0).sqrt() + rounded),
        "output_along": HIGHER_ORDERS * (CONFIDENCE * turned.sum(dim=2).sqrt() + scaled).sum(),
        "lse": LOG2_E * lse_error,
        "lse_along": LOG2_E**2 * (lse_error * lse.abs()).sum(),
    }


def with_dequantization(policy: Policy) -> ErrorBound:
    """A policy of a cache in bfloat16, for keys that were rounded to it."""
    assert isinstance(policy, ErrorBound)
    base, own_gain = policy.bound, policy.gain

    def gain(expected: Expected) -> float:
        value = expected.value.masked_fill(expected.value.isinf(), 0.0)
        # Without a gain of its own, a policy allows for its whole bound.
        along = (base(expected) * value.abs()).nan_to_num(0.0, 0.0).sum() if own_gain is None else value.new_zeros(())
        moved, size = host_figures(along + expected.parts["dequantized_along"], value.square().sum())
        return (own_gain(expected) if own_gain else 0.0) + (moved / size if size else 0.0)

    return ErrorBound(
        lambda expected: base(expected) + expected.parts["dequantized"],
        f"{policy.reason}; scales and products with codes are rounded to bf16: 8 standard deviations of the logits and "
        "of the values, each rounding being at most 2^-8",
        gain,
    )


def run_flash_mla(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    axes = definition.const_axes
    heads, topk = axes["num_qo_heads"], axes["topk"]
    queries = torch.cat((inputs["q_nope"], inputs["q_pe"]), dim=-1).unsqueeze(1)
    padded = torch.nn.functional.pad(queries, (0, 0, 0, -heads % dsa_paged.BLOCK_HEADS))
    lengths = torch.full((len(padded),), topk, dtype=torch.int32, device=padded.device)
    output, lse = flash_mla_with_kvcache(
        q=padded,
        k_cache=inputs["kv_cache"].unsqueeze(2),
        block_table=torch.empty((len(padded), 0), dtype=torch.int32, device=padded.device),
        cache_seqlens=lengths,
        head_dim_v=axes["head_dim_ckv"],
        tile_scheduler_metadata=get_mla_metadata()[0],
        softmax_scale=float(inputs["sm_scale"]),
        is_fp8_kvcache=True,
        indices=inputs["sparse_indices"].unsqueeze(1),
        use_legacy=True,
    )
    return {
        "output": output.squeeze(1)[:, :heads].contiguous(),
        "lse": lse.squeeze(2)[:, :heads].contiguous() * math.log2(math.e),
    }


# Whether it sums weights before or after it rounds them is not known: the bound allows both.
POLICIES = kernel_policies(Rounding(weights=True, sum=True, partial=0))
FAMILIES = (
    Family(
        name="dsa_sparse_attention_fp8_cache",
        op_type="dsa_paged",
        twin={
            "num_qo_heads": 4,
            "head_dim_ckv": 64,
            "head_dim_kpe": 16,
            "num_groups": 2,
            "bytes_per_token": 104,
            "page_size": 2,
            "topk": 10,
        },
        plan=PLAN,
        strided=("q_nope", "q_pe"),
        isolated=("q_nope", "q_pe"),
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=(
            Kernel(
                "flash_mla.flash_mla_with_kvcache",
                run_flash_mla,
                variant="sparse, fp8 cache, with get_mla_metadata",
                limits={"num_tokens": (1, 1 << 20), "num_pages": (1, 1 << 30)},
                # Its source says that slot 0 is not read, an earlier one read it: nothing is lost by keeping NaN away.
                plan_options=RowOptions(keyless=False, any_negative=False, first_slot=False),
                compare={name: with_dequantization(policy) for name, policy in POLICIES.items()},
            ),
        ),
        faults=(usual_scale(SCALED_DIM),),
    ),
)
