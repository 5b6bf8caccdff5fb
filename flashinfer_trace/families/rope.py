"""Rotary position embedding of query and key, from a cache of cosines and sines or from those of each token.

The numbers of heads are const axes, except in the family of flashinfer-bench's dataset, where they are variable ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest, ReferenceRun
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, Policy, rounding_error, unit_roundoff
from flashinfer_trace.verdict.tensors import as_integers

U = unit_roundoff(torch.float32)
U_BF16 = unit_roundoff(torch.bfloat16)

#: Contents of the cache. ``rotary``: cos and sin of p theta^(-2 i / rotary_dim); ``scaled``: the same times 1.37, as
#: YaRN's attention factor scales them; ``quarter_turns``: multiples of 90 degrees at random, whose rotations are exact.
CACHES = ("rotary", "rotary", "scaled", "quarter_turns")
#: ``random``: in any order, with repetitions; ``same``: always the last row of the cache; ``zero``: always position 0;
#: ``consecutive``: a prefill, from a random start; ``descending``: the same in reverse.
POSITIONS = ("random", "random", "same", "zero", "consecutive", "descending")
THETAS = (10_000.0, 500_000.0, 1_000_000.0)


@dataclass(frozen=True)
class RopeOptions:
    """The inputs that a kernel accepts.

    Attributes:
        bfloat16_cache: only caches whose values bfloat16 represents.
        whole_groups: only numbers of query heads that the number of key heads divides.
    """

    bfloat16_cache: bool = False
    whole_groups: bool = False

    def vouches_for(self, inputs: Inputs) -> bool:
        """Whether bounds of a kernel with these options mean something for inputs: it may have met others never."""
        cache = inputs["cos_sin_cache"]
        return not self.bfloat16_cache or bool((cache == cache.to(torch.bfloat16)).all())


#: Options of a kernel that rounds each product, with a cache in the dtype of its heads.
BFLOAT16_CACHE = RopeOptions(bfloat16_cache=True, whole_groups=True)

#: Axis of the numbers of heads -> the numbers that are drawn where it is a variable one, on a CPU and on a GPU.
HEADS = {"num_qo_heads": ((1, 4), (1, 6, 48)), "num_kv_heads": ((1, 2), (1, 8))}

#: The bits of a bfloat16 NaN that conversions to float32 and back make a quiet one.
SIGNALLING = 0x7F81
#: More than are drawn on a CPU.
MORE_HEADS = {"num_qo_heads": 12, "num_kv_heads": 3}


def heads_of(definition: Definition, plan: Plan) -> tuple[int, int]:
    sizes = {**plan, **definition.const_axes}
    return sizes["num_qo_heads"], sizes["num_kv_heads"]


def most_tokens(definition: Definition) -> int:
    """The largest number of tokens on a GPU, for 1 GB of float64: flashinfer launches another kernel where blocks of
    tokens fill an H200, from 16896 tokens with head size 128 and 33792 with 64."""
    axes = definition.const_axes
    width = sum(axes.get(axis, counts[True][-1]) for axis, counts in HEADS.items()) * axes["head_size"]
    return max(1024, min(40960, 2**27 // width))


def corners(request: PlanRequest) -> list[Plan]:
    """States at the ends of float16's range; on a CPU, of more heads than are drawn; on a GPU, of the most tokens."""
    more = {axis: count for axis, count in MORE_HEADS.items() if axis in request.definition.var_axes}
    extreme = [{"values": values, **({} if request.large else more)} for values in ("huge", "minute")]
    return [*extreme, {"num_tokens": most_tokens(request.definition)}] if request.large else extreme


def heads(axis: str) -> Count:
    few, many = HEADS[axis]
    drawn = {False: few, True: many}
    return Count(few[-1], many[-1], usual=few[-1], corner=few[-1], drawn=lambda r: st.sampled_from(drawn[r.large]))


def in_groups(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with a number of key heads that divides its number of query heads, for a kernel that needs it."""
    if "num_kv_heads" not in plan or not request.options_of(RopeOptions).whole_groups:
        return plan
    return {**plan, "num_kv_heads": math.gcd(plan["num_qo_heads"], plan["num_kv_heads"])}


PLAN = RowPlans(
    {
        **{axis: heads(axis) for axis in HEADS},
        "num_tokens": Count(24, most_tokens, corner=5),
        "max_seq_len": Count(
            4096,
            131072,
            usual=4096,
            corner=64,
            drawn=lambda request: st.sampled_from((1, 2, 64, 131072 if request.large else 4096)),
        ),
    },
    {
        "values": VALUE_KINDS,
        "cache": CACHES,
        "positions": POSITIONS,
        "theta": THETAS,
        # Cosines and sines that bfloat16 represents, for a kernel that reads the cache in the dtype of the query.
        "bfloat16_cache": lambda request: (True,) if request.options_of(RopeOptions).bfloat16_cache else FLAG,
    },
    special=corners,
    fit=in_groups,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, tokens = definition.const_axes, plan["num_tokens"]
    heads = dict(zip("qk", heads_of(definition, plan), strict=True))
    inputs: dict[str, Any] = {
        name: draws.values([tokens, count, axes["head_size"]], torch.bfloat16, plan["values"])
        for name, count in heads.items()
    }
    inputs["cos_sin_cache"] = make_cache(plan, axes["rotary_dim"], draws)
    inputs["positions"] = make_positions(plan["positions"], tokens, plan["max_seq_len"], draws)
    return inputs


def make_cache(plan: Plan, rotary_dim: int, draws: Draws) -> torch.Tensor:
    """float32 [max_seq_len, rotary_dim]: cosines, then sines."""
    rows, half = plan["max_seq_len"], rotary_dim // 2
    if plan["cache"] == "quarter_turns":
        turns = draws.integers([rows, half], 0, 3)
        cos = torch.tensor([1.0, 0.0, -1.0, 0.0], device=draws.device)[turns]
        sin = torch.tensor([0.0, 1.0, 0.0, -1.0], device=draws.device)[turns]
        return torch.cat((cos, sin), dim=-1)
    frequency = plan["theta"] ** (-torch.arange(half, dtype=torch.float64, device=draws.device) / half)
    angle = torch.outer(torch.arange(rows, dtype=torch.float64, device=draws.device), frequency)
    cache = torch.cat((angle.cos(), angle.sin()), dim=-1) * (1.37 if plan["cache"] == "scaled" else 1.0)
    return cache.to(torch.bfloat16).float() if plan["bfloat16_cache"] else cache.float()


def make_positions(kind: str, tokens: int, rows: int, draws: Draws) -> torch.Tensor:
    """int64 [tokens], each in 0..rows-1; consecutive positions wrap around at the end of the cache."""
    if kind == "random":
        return draws.integers([tokens], 0, rows - 1)
    if kind in ("same", "zero"):
        return torch.full([tokens], rows - 1 if kind == "same" else 0, dtype=torch.int64, device=draws.device)
    start = draws.host_integers(1, 0, rows - 1)[0]
    count = torch.arange(tokens, device=draws.device)
    return (start + count) % rows if kind == "consecutive" else (start - count) % rows


def pairs_of(half_split: bool, rotated: torch.Tensor) -> torch.Tensor:
    """The pairs of features that are rotated together, as the last axis: [..., rotary_dim / 2, 2]."""
    if half_split:
        return rotated.reshape(*rotated.shape[:-1], 2, rotated.shape[-1] // 2).transpose(-1, -2)
    return rotated.reshape(*rotated.shape[:-1], rotated.shape[-1] // 2, 2)


def features_of(half_split: bool, pairs: torch.Tensor) -> torch.Tensor:
    return (pairs.transpose(-1, -2) if half_split else pairs).flatten(-2)


def oracle(half_split: bool, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Each pair as a complex number, times the complex number cos + i sin of its token, in complex128."""
    rotary_dim = definition.const_axes["rotary_dim"]
    chosen = inputs["cos_sin_cache"].double().index_select(0, inputs["positions"])
    turn = torch.complex(chosen[:, : rotary_dim // 2], chosen[:, rotary_dim // 2 :]).unsqueeze(1)
    # The products by 1, 0 and -1, and their sums with 0, are exact in any arithmetic, so the result is also exact.
    exact = bool(((chosen == 0) | (chosen.abs() == 1)).all() and (turn.abs() == 1).all())
    outputs = {}
    for name in ("q", "k"):
        states = inputs[name].double()
        pairs = pairs_of(half_split, states[..., :rotary_dim])
        product = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
        size = torch.stack(
            (
                (pairs[..., 0] * turn.real).abs() + (pairs[..., 1] * turn.imag).abs(),
                (pairs[..., 1] * turn.real).abs() + (pairs[..., 0] * turn.imag).abs(),
            ),
            dim=-1,
        )
        rest = states[..., rotary_dim:]
        value = torch.cat((features_of(half_split, product), rest), dim=-1)
        magnitude = torch.cat((features_of(half_split, size), torch.zeros_like(rest)), dim=-1)
        copied = torch.cat((torch.zeros_like(states[..., :rotary_dim]), torch.ones_like(rest)), dim=-1)
        outputs[f"{name}_out"] = Expected(value, {"magnitude": magnitude, "copied": copied}, exact)
    return outputs


def rotated_bound(expected: Expected, inside: float) -> torch.Tensor:
    """Bound on one bf16 rounding of x c - y s, off by `inside` (|x c| + |y s|) before it; 0 for copied features."""
    before = expected.parts["magnitude"] * inside
    bound = rounding_error(expected.value, torch.bfloat16) + before * (1 + U_BF16)
    return torch.where(expected.parts["copied"] > 0, 0.0, bound)


ROTATION = (
    "one bf16 rounding, u = 2^-8, of two float32 products and their sum, 2 x 2^-24 (|x c| + |y s|); exact for quarter "
    "turns"
)
ROTATED = ErrorBound(
    lambda expected: rotated_bound(expected, (1 + U) ** 2 - 1), f"{ROTATION}; features beyond rotary_dim are copies"
)
STEPWISE = ErrorBound(
    lambda expected: rotated_bound(expected, U_BF16),
    "each product and their sum are rounded to bf16: 2^-8 (|x c| + |y s| + |result|); exact for quarter turns; "
    "features beyond rotary_dim are copies",
)


def changed_copies(definition: Definition, run: ReferenceRun) -> list[str]:
    """A line for each output of the reference in which features beyond rotary_dim have not the bits of their source."""
    rotary_dim, draws = definition.const_axes["rotary_dim"], Draws(0, "cpu")
    inputs = make_inputs(definition, PLAN.plan_for_axes(definition, {"max_seq_len": 64}, draws), draws)
    for name in ("q", "k"):
        rest = inputs[name][..., rotary_dim:]
        special = draws.values(rest.shape, rest.dtype, "special")
        special.view(torch.int16)[::3] = SIGNALLING
        rest.copy_(special)
    outputs = run(definition, inputs)
    lines = []
    for name in ("q", "k"):
        found, source = (as_integers(each[..., rotary_dim:]) for each in (outputs[f"{name}_out"], inputs[name]))
        if not torch.equal(found, source):
            lines.append(f"reference: {name}_out has other bits than {name} in features beyond rotary_dim: copy them")
    return lines


def run_flashinfer(half_split: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The function that returns new tensors. It takes heads and features as one axis."""
    import flashinfer.rope

    q, k = inputs["q"].flatten(1), inputs["k"].flatten(1)
    size = definition.const_axes["head_size"]
    q_out, k_out = flashinfer.rope.apply_rope_with_cos_sin_cache(
        inputs["positions"], q, k, size, inputs["cos_sin_cache"], half_split
    )
    return {"q_out": q_out.view_as(inputs["q"]), "k_out": k_out.view_as(inputs["k"])}


def run_flashinfer_inplace(half_split: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    q, k = inputs["q"].flatten(1), inputs["k"].flatten(1)
    size = definition.const_axes["head_size"]
    apply_rope_with_cos_sin_cache_inplace(inputs["positions"], q, k, size, inputs["cos_sin_cache"], half_split)
    return {"q_out": inputs["q"], "k_out": inputs["k"]}


def run_sgl(half_split: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """sgl-kernel's op, which reads the cache in the dtype of the query; it gets dense rows."""
    import sgl_kernel  # noqa: F401

    q, k, cache = inputs["q"].contiguous(), inputs["k"].contiguous(), inputs["cos_sin_cache"].to(inputs["q"].dtype)
    size = definition.const_axes["head_size"]
    operands = inputs["positions"], q.flatten(1), k.flatten(1)
    torch.ops.sgl_kernel.rotary_embedding.default(*operands, size, cache, half_split)
    return {"q_out": q, "k_out": k}


def run_sglang(half_split: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's in-place function, which takes the features that are rotated, and no others."""
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace

    q, k = (inputs[name][..., : definition.const_axes["rotary_dim"]] for name in "qk")
    apply_rope_with_cos_sin_cache_inplace(q, k, inputs["cos_sin_cache"], inputs["positions"], is_neox=half_split)
    return {"q_out": inputs["q"], "k_out": inputs["k"]}


# No kernel can be launched for zero rows, because an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}
JIT = "sglang.kernels.ops.attention.rope"
FLASHINFER = "flashinfer.rope.apply_rope_with_cos_sin_cache"
TWIN_HEADS = {"num_qo_heads": 4, "num_kv_heads": 2}


def rope_family(style: str, suffix: str = "", heads: Mapping[str, int] = TWIN_HEADS) -> Family:
    half_split = style == "neox"
    stepwise: dict[str, Policy] = {"q_out": STEPWISE, "k_out": STEPWISE}

    def kernel(path: str, call: Callable[..., Outputs], in_place: tuple[str, ...] = ("q", "k"), **how: Any) -> Kernel:
        options = how or {"common": BFLOAT16_CACHE}
        return Kernel(path, functools.partial(call, half_split), limits=LAUNCHABLE, in_place=in_place, **options)

    return Family(
        name=f"rope_with_cos_sin_cache_{style}_style{suffix}",
        op_type="rope",
        twin={**heads, "head_size": 16, "rotary_dim": 8},
        plan=PLAN,
        make_inputs=make_inputs,
        checks=(changed_copies,),
        oracle=functools.partial(oracle, half_split),
        compare={"q_out": ROTATED, "k_out": ROTATED},
        strided=("q", "k"),
        isolated=("q", "k"),
        kernels=(
            kernel(FLASHINFER, run_flashinfer, ()),
            kernel(f"{FLASHINFER}_inplace", run_flashinfer_inplace),
            kernel(f"{JIT}.apply_rope_with_cos_sin_cache_inplace", run_sglang),
            kernel("torch.ops.sgl_kernel.rotary_embedding", run_sgl, plan_options=BFLOAT16_CACHE, compare=stepwise),
        ),
    )


CACHED = (rope_family("neox"), rope_family("gptj"), rope_family("neox", "_any_heads", {}))

#: As in `rope`; ``any``: a cosine and a sine for each feature, those of a pair not alike.
COS_SIN = ("rotary", "scaled", "quarter_turns", "any")
COS_SIN_PATH = "sglang.srt.layers.rotary_embedding.utils.apply_rotary_pos_emb_native"

#: The corners have states at the ends of float16's range.
COS_SIN_PLAN = RowPlans(
    {"num_tokens": Count(24, 4096, corner=5)},
    {"values": VALUE_KINDS, "rows": COS_SIN, "theta": THETAS},
    special=[{"values": values} for values in ("huge", "minute")],
)


def cos_sin_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Queries and keys of the planned kind; cosines and sines of consecutive positions, from a random one on."""
    axes, tokens = definition.const_axes, plan["num_tokens"]
    size = axes["head_size"]
    inputs: dict[str, Any] = {
        name: draws.values([axes[heads], tokens, size], torch.bfloat16, plan["values"])
        for name, heads in (("q", "num_qo_heads"), ("k", "num_kv_heads"))
    }
    if plan["rows"] == "any":
        rows = {name: draws.normal([tokens, size], torch.bfloat16) for name in ("cos", "sin")}
    else:
        first = draws.host_integers(1, 0, 1000)[0]
        kind = {"cache": plan["rows"], "max_seq_len": first + tokens, "bfloat16_cache": True, "theta": plan["theta"]}
        cos, sin = make_cache(kind, size, draws)[first:].to(torch.bfloat16).chunk(2, dim=1)
        rows = {"cos": torch.cat((cos, cos), dim=1), "sin": torch.cat((sin, sin), dim=1)}
    return {**inputs, **rows}


def cos_sin_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Each feature and its partner, half a head away, as a product with a column of cosine and signed sine."""
    half = definition.const_axes["head_size"] // 2
    sign = torch.ones(2 * half, dtype=torch.float64, device=inputs["sin"].device)
    sign[:half] = -1
    column = torch.stack((inputs["cos"].double(), inputs["sin"].double() * sign), dim=2)
    exact = bool(((column == 0) | (column.abs() == 1)).all() and (column.abs().sum(dim=2) == 1).all())
    outputs = {}
    for name in ("q", "k"):
        states = inputs[name].double()
        pairs = torch.stack((states, states.roll(half, dims=2)), dim=3)
        value = torch.einsum("htdp,tdp->htd", pairs, column)
        magnitude = torch.einsum("htdp,tdp->htd", pairs.abs(), column.abs())
        outputs[f"{name}_out"] = Expected(
            value, {"magnitude": magnitude, "copied": torch.zeros_like(value)}, exact and value.numel() > 0
        )
    return outputs


def run_cos_sin(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's function without its decorator torch.compile: PyTorch step by step, for a batch of one sequence."""
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_pos_emb_native

    with torch.compiler.set_stance("force_eager"):
        q, k = apply_rotary_pos_emb_native(*(inputs[name].unsqueeze(0) for name in ("q", "k", "cos", "sin")))
    return {"q_out": q.squeeze(0), "k_out": k.squeeze(0)}


COS_SIN_FAMILIES = (
    Family(
        name="rope_with_cos_sin",
        op_type="rope",
        twin={"num_qo_heads": 4, "num_kv_heads": 2, "head_size": 16},
        plan=COS_SIN_PLAN,
        make_inputs=cos_sin_inputs,
        strided=("q", "k"),
        oracle=cos_sin_oracle,
        compare={"q_out": ROTATED, "k_out": ROTATED},
        kernels=(Kernel(COS_SIN_PATH, run_cos_sin, variant="eager", limits=LAUNCHABLE),),
    ),
)
FAMILIES = (*CACHED, *COS_SIN_FAMILIES)
