"""Attention with capped logits, a window of keys, or sinks, as plain attention over other queries and keys.

A window makes each query a request of its own, which has the keys that the query sees. The sink of a head is a key more
with a value of zero, whose logit is the sink: queries have a feature more for each head of a group, which is 1 for that
head, and the keys have zeros there but for the sink. So the oracle, its parts and its bounds are those of plain
attention. Capped logits are an argument of the oracle; what kernels round there is added to their bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from flashinfer_trace.families.attention.cases import SCALES, AttentionOptions, has_queries
from flashinfer_trace.families.attention.oracle import (
    CAPPED,
    SMALLEST_CHUNK,
    Memory,
    Split,
    any_chunks,
    expected_outputs,
)
from flashinfer_trace.families.attention.policies import LOG2_E, SMALLEST
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import Comparison, ErrorBound, Expected, Policy, host_figures

Oracle = Callable[[Definition, Inputs], dict[str, Expected]]
#: Variant -> sizes of its twin. Logits of the kind *large* are far beyond the cap; most requests exceed the window.
TWINS: Mapping[str, Mapping[str, int]] = {
    "softcap": {"logits_soft_cap": 15},
    "softcap_window": {"logits_soft_cap": 15, "window_size": 6},
    "window": {"window_size": 6},
    "sinks": {},
    "sinks_window": {"window_size": 6},
}

#: Standard deviation of the sinks, in nats: some outweigh all keys, and some are negligible.
SINK_SCALE = 4.0
#: Times so much where logits have the kind spread or vast: exp of how far a sink is from a logit, or from 0, exceeds
#: float32's range.
FAR_SINKS = 100.0
#: The sum that an output with a sink can lose: see `below_the_sink`.
LOST = "lost"
BELOW = "below the sink"
#: tanh.approx.f32 has a relative error of 2^-11 (PTX ISA, "tanh"), and its argument a few float32 roundings.
CAP_ERROR = 2.0**-11 * (1 + 2**-8)

#: For kernels of attention with sinks that return another lse than the sink where a query sees no key.
SINKS_NEED_KEYS = AttentionOptions(keyless=False, unseeing_rows=False, keyless_requests=False)


def visible_keys(memory: Memory, causal: bool, window: int | None) -> tuple[list[int], list[int], list[int]]:
    """For each query: its request, the first key that it sees, and how many."""
    owners, starts, counts = [], [], []
    for request, length in enumerate(memory.lengths):
        first, end = memory.queries[request : request + 2]
        for query in range(first, end):
            last = max(0, length - (end - 1 - query)) if causal else length
            count = last if window is None else min(last, window)
            owners.append(request)
            starts.append(last - count)
            counts.append(count)
    return owners, starts, counts


def each_query(memory: Memory, causal: bool, window: int | None) -> Memory:
    """Each query as a request of its own, with the keys that it sees."""
    owners, starts, counts = visible_keys(memory, causal, window)
    owner, start = (torch.tensor(each, dtype=torch.int64, device=memory.keys.device) for each in (owners, starts))

    def slots(query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return memory.slots(owner[query], start[query] + position)

    return Memory(memory.keys, memory.values, range(len(owners) + 1), counts, slots)


def with_sinks(q: torch.Tensor, memory: Memory, sinks: torch.Tensor, sm_scale: float) -> tuple[torch.Tensor, Memory]:
    """Queries and keys with features for the sinks [heads]; the last key of each request is the sink."""
    heads, (slots, kv_heads, dim) = q.shape[1], memory.keys.shape
    group, device = heads // kv_heads, q.device
    own = torch.eye(group, dtype=torch.float64, device=device).repeat(kv_heads, 1).expand(len(q), heads, group)
    key = torch.zeros(1, kv_heads, dim + group, dtype=torch.float64, device=device)
    key[0, :, dim:] = sinks.double().view(kv_heads, group) / sm_scale
    keys = torch.cat([torch.nn.functional.pad(memory.keys.double(), (0, group)), key])
    values = torch.cat([memory.values, memory.values.new_zeros(1, *memory.values.shape[1:])])
    lengths = torch.tensor(memory.lengths, dtype=torch.int64, device=device)
    some = lengths.argmax() if len(lengths) else lengths

    def slots_of(request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        length = lengths[request]
        if not int(lengths.max()):
            return torch.full_like(position.expand(len(request), -1), slots)
        # A request without keys has no slots to ask for; those of another one are not used.
        asked = torch.where(length > 0, request, some)
        found = memory.slots(asked, position.minimum((lengths[asked] - 1).clamp_min(0)))
        return torch.where(position < length, found, slots)

    counts = [count + 1 for count in memory.lengths]
    return torch.cat([q.double(), own], dim=-1), Memory(keys, values, memory.queries, counts, slots_of)


def chunks_at_any_place() -> Split:
    """For kernels that cut a request's keys anywhere: those that a query sees may lie in one chunk more."""
    split, more = any_chunks(), SMALLEST_CHUNK - 1

    def shifted(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pad = torch.nn.functional.pad
        return split(pad(p, (0, more)), pad(values, (0, 0, 0, more)), counts + more)

    return shifted


def expected_of_variant(definition: Definition, inputs: Inputs, memory: Memory, causal: bool) -> dict[str, Expected]:
    axes, q, sm_scale = definition.const_axes, inputs["q"], float(inputs["sm_scale"])
    cap = axes.get("logits_soft_cap")
    if "window_size" not in axes and "sinks" not in inputs:
        return expected_outputs(q, memory, sm_scale, causal, any_chunks(axes.get("page_size", 1)), cap)
    own = each_query(memory, causal, axes.get("window_size"))
    if "sinks" not in inputs:
        return expected_outputs(q, own, sm_scale, False, chunks_at_any_place(), cap)
    q, own = with_sinks(q, own, inputs["sinks"], sm_scale)
    found = expected_outputs(q, own, sm_scale, False, chunks_at_any_place(), cap)
    output = found["output"]
    below = below_the_sink(output, inputs["sinks"])
    found["lse"] = replace(found["lse"], parts={**found["lse"].parts, BELOW: below.squeeze(-1)})
    parts = {**output.parts, LOST: torch.where(below, output.parts["weighted"], 0.0)}
    return {**found, "output": replace(output, parts=parts)}


def below_the_sink(output: Expected, sinks: torch.Tensor) -> torch.Tensor:
    """Where the largest weight of a key is below 2^-126 because of a sink, bool [queries, heads, 1]. A kernel may
    multiply the sum over all keys by 0 there: by exp2 of how far the keys are below the sink, or by the reciprocal of a
    denominator beyond 2^126. Then sum p |v| is lost. The weights of n such keys add up to less than n 2^-126, and the
    sink has the rest."""
    of_sink = sinks.double().unsqueeze(-1) * LOG2_E - output.parts["lse"]  # log2 of its weight
    return (of_sink > -1) & (output.parts["others"] < output.parts["length"] * SMALLEST)


def with_flushed_weights(policy: Policy) -> ErrorBound:
    """The policy of a kernel's output with sinks. Its bound allows for lost sums: see `below_the_sink`."""
    assert isinstance(policy, ErrorBound)

    def bound(expected: Expected) -> torch.Tensor:
        return policy.bound(expected) + expected.parts[LOST]

    return ErrorBound(bound, f"{policy.reason}; next to a sink, weights below 2^-126 may be 0", policy.gain)


class InfiniteBelowTheSink(ErrorBound):
    """The policy of an lse that is inf where exp(sink - m) is beyond float32, m being the largest logit of a key."""

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        if actual.shape != expected.value.shape:
            return super().compare(actual, expected)
        overflown = expected.parts[BELOW] & (actual == math.inf)
        return super().compare(torch.where(overflown, expected.value.to(actual.dtype), actual), expected)


def variant_inputs(
    make_inputs: Callable[[Definition, Plan, Draws], Inputs], definition: Definition, plan: Plan, draws: Draws
) -> Inputs:
    """Inputs of the plain family, and the sinks, bf16 numbers [heads], where the Definition has them."""
    plain = {name: spec for name, spec in definition.inputs.items() if name != "sinks"}
    inputs = make_inputs(replace(definition, inputs=plain), plan, draws)
    scale = SINK_SCALE * (FAR_SINKS if plan["logits"] in ("spread", "vast") else 1.0)
    # As models store them, which FlashAttention 3 asks for; other kernels take them in float32.
    sinks = draws.normal([definition.const_axes["num_qo_heads"]], torch.bfloat16, scale)
    widened = "sinks" in definition.inputs and definition.inputs["sinks"].dtype == "float32"
    inputs["sinks"] = sinks.float() if widened else sinks
    return {name: inputs[name] for name in definition.inputs}


def corner_plans(plain: Family, request: PlanRequest) -> list[Plan]:
    """Those of the plain family, and requests around and beyond the window, which on a GPU no other lengths reach; more
    queries than fit a tile."""
    window = request.definition.const_axes.get("window_size", 1)
    around: Plan = {"kv_lens": [window + 300, window + 1, window, 70], "scale": SCALES[0]}
    if has_queries(request.definition):
        around["q_lens"] = [150, 1, 1, 70]
    # It is not known what kernels round where logits have a spread beyond float32's range.
    kinds = ("large",) if request.large else ("normal", "spread")
    return [*plain.plan.corners(request), *({**around, "logits": logits} for logits in kinds)]


def cap_error(expected: Expected) -> torch.Tensor:
    """The effect of errors of the capped logits on an output, or on the natural lse."""
    return CAP_ERROR * expected.parts[CAPPED]


def with_error(policy: ErrorBound, error: Callable[[Expected], torch.Tensor], reason: str) -> ErrorBound:
    """A policy whose bound, and whose gain if it has one, allow for one more error."""

    def bound(expected: Expected) -> torch.Tensor:
        return policy.bound(expected) + error(expected)

    def gain(expected: Expected) -> float:
        assert policy.gain is not None
        (moved,) = host_figures((expected.value.abs() * error(expected)).sum() / expected.parts["gain_size"])
        return policy.gain(expected) + moved

    return ErrorBound(bound, f"{policy.reason}; {reason}", None if policy.gain is None else gain)


TANH = "tanh.approx is within 2^-11, so logits c are off by 2^-11 |c|"


def capped_kernel(kernel: Kernel) -> Kernel:
    output, lse = kernel.compare["output"], kernel.compare["lse"]
    assert isinstance(output, ErrorBound)
    assert isinstance(lse, ErrorBound)
    capped = with_error(lse, lambda expected: LOG2_E * cap_error(expected), TANH)
    return replace(kernel, compare={"output": with_error(output, cap_error, TANH), "lse": capped})


def variant_family(plain: Family, variant: str, kernels: Sequence[Kernel], oracle: Oracle) -> Family:
    """The record of a variant of `plain`, attention without cap, window and sinks; `variant` is one of `TWINS`."""
    return replace(
        plain,
        name=f"{plain.name}_{variant}",
        twin={**plain.twin, **TWINS[variant]},
        plan=plain.plan.with_corners(functools.partial(corner_plans, plain)),
        make_inputs=functools.partial(variant_inputs, plain.make_inputs),
        oracle=oracle,
        kernels=tuple(capped_kernel(kernel) if "softcap" in variant else kernel for kernel in kernels),
    )
