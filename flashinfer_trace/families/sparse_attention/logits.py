"""The scores of DeepSeek's indexer: weighted sums over heads of the fp8 products that are positive.

DeepGEMM's kernel (sm90_fp8_mqa_logits.cuh) multiplies codes on fp8 tensor cores, one head's 128 features in one
accumulator (see `gemm.truncation` for what they lose), then weighs, adds up and scales in float32. It also
writes scores that it computes for a token's neighbors: the adapter replaces those of keys that a token does not see.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm.truncation import KEPT_BITS, OTHERS, STEP, truncated_product
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import ROWS_SPREAD, SCALES_SPREAD, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Expected, summation_error

#: Standard deviation of the codes. ``positive``: no product is negative, so all terms lose in one direction;
#: ``small``: codes below 1; ``integers``: small ones, and weights that are powers of two; ``spread``: weights of tokens
#: and scales of keys whose magnitudes differ widely.
VALUES = {"normal": 100.0, "positive": 100.0, "small": 0.25, "integers": 0.0, "spread": 100.0}
#: Keys of a token: those before it, those of its own sequence, any, or none for every other token.
RANGES = ("causal", "ragged", "any", "some")
#: Tokens of a page, as SGLang's cache of the indexer has it.
PAGE = 64
#: Keys of a corner: not a multiple of any block, and beyond 4096.
MANY_KEYS = 5003


#: The corners are one token and one key, and thousands of keys; on a CPU also tokens that see nothing next to those
#: that see all.
PLAN = RowPlans(
    {"num_tokens": Count(12, 64, corner=1), "num_keys": Count(40, 2000, least=1, usual=64, corner=1)},
    {"values": tuple(VALUES), "ranges": RANGES},
    special=[{}, {"num_tokens": 2, "num_keys": MANY_KEYS, "ranges": "any"}],
    on_cpu=[{"num_tokens": 6, "num_keys": 30, "ranges": "some"}],
    many_rows=300,
)


def drawn_ranges(plan: Plan, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key of each token, and the one after its last, int32 [num_tokens]."""
    tokens, keys, kind = plan["num_tokens"], plan["num_keys"], plan["ranges"]
    token = torch.arange(tokens, device=draws.device)
    start, end = torch.zeros_like(token), torch.full_like(token, keys)
    if kind == "causal":
        end = (keys - tokens + 1 + token).clamp_min(1)
    elif kind == "ragged":
        cut, first = keys // 2, tokens // 2
        start, end = torch.where(token < first, 0, cut), torch.where(token < first, max(cut, 1), keys)
    elif kind == "any":
        ends = draws.integers([2, tokens], 0, keys)
        start, end = ends.amin(dim=0), ends.amax(dim=0)
    else:
        end = torch.where(token % 2 == 1, 0, end)
    return start.to(torch.int32), end.to(torch.int32)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    heads, dim = (definition.const_axes[axis] for axis in ("num_heads", "head_dim"))
    tokens, keys, kind = plan["num_tokens"], plan["num_keys"], plan["values"]
    shapes = {"q": [tokens, heads, dim], "k": [keys, dim]}
    whole = kind == "integers"
    codes = {
        name: draws.integers(shape, -4, 4).float() if whole else draws.normal(shape, scale=VALUES[kind])
        for name, shape in shapes.items()
    }
    weights, scale = draws.normal([tokens, heads], scale=0.05), torch.exp2(draws.uniform([keys], -4.0, -3.0))
    if kind == "spread":
        weights *= draws.powers(tokens, *ROWS_SPREAD).unsqueeze(1)
        scale *= draws.powers(keys, *SCALES_SPREAD)
    if kind == "positive":
        codes, weights = {name: value.abs() for name, value in codes.items()}, weights.abs()
    if whole:
        weights, scale = (torch.exp2(draws.integers(each.shape, -2, 2).float()) for each in (weights, scale))
    start, end = drawn_ranges(plan, draws)
    key = torch.arange(keys, device=draws.device)
    unseen = ~((key >= start[:, None]) & (key < end[:, None])).any(dim=0)
    rounded = {name: value.clamp(-448, 448).to(torch.float8_e4m3fn) for name, value in codes.items()}
    bytes_of_k = rounded["k"].view(torch.uint8).masked_fill(unseen[:, None], 0x7F)
    return {
        "q": rounded["q"],
        "k": bytes_of_k.view(torch.float8_e4m3fn),
        "k_scale": scale,
        "weights": weights,
        "k_start": start,
        "k_end": end,
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """All heads at once. Parts: ``magnitude``, the sum of all products' sizes; ``shift``, the mean of what fp8 tensor
    cores lose of the heads that count, and ``deviation``, the root of its variance."""
    q = inputs["q"].double().transpose(0, 1)
    k = inputs["k"].double()
    key = torch.arange(len(k), device=k.device)
    seen = (key >= inputs["k_start"][:, None]) & (key < inputs["k_end"][:, None])
    k = torch.where(seen.any(dim=0)[:, None], k, 0.0)
    loss = truncated_product(q.flatten(0, 1), k)
    product, squares, signed = (each.view(*q.shape[:2], len(k)) for each in (loss.product, loss.squares, loss.signed))
    unit = 2.0**-KEPT_BITS
    deviation = (squares.double() * ((STEP + OTHERS) / 4)).sqrt() * unit
    shift = signed.double() / 2 * unit
    counts = product > -(shift.abs() + CONFIDENCE * deviation)
    weights, scale = inputs["weights"].double().T.unsqueeze(2), inputs["k_scale"].double()
    value = (weights * product.clamp_min(0)).sum(dim=0) * scale
    parts = {
        "magnitude": (weights.abs() * (q.abs() @ k.abs().T)).sum(dim=0) * scale,
        "shift": (weights * shift * counts).sum(dim=0).abs() * scale,
        "deviation": (weights * deviation * counts).square().sum(dim=0).sqrt() * scale,
        "length": torch.tensor(float(q.shape[2] + len(q))),
    }
    return {"logits": Expected(torch.where(seen, value, -torch.inf), parts)}


def float32_bound(expected: Expected) -> torch.Tensor:
    return summation_error(expected.parts["magnitude"], int(expected.parts["length"]))


REFERENCE = ErrorBound(
    float32_bound, "float32 sums over features and heads: 8 sqrt(head_dim + num_heads) 2^-24 of the products' sizes"
)
KERNEL = ErrorBound(
    lambda expected: float32_bound(expected) + expected.parts["shift"] + CONFIDENCE * expected.parts["deviation"],
    f"{REFERENCE.reason}; fp8 tensor core: each of 34 terms of an instruction loses up to 2^-13 of the largest, "
    "toward zero: the mean of it, and 8 standard deviations of its weighted sum over heads",
)


def run_deep_gemm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it: scores of keys that a token does not see are not cleaned."""
    import deep_gemm

    ends = inputs["k_start"], inputs["k_end"]
    keys = (inputs["k"], inputs["k_scale"])
    logits = deep_gemm.fp8_mqa_logits(inputs["q"], keys, inputs["weights"], *ends, clean_logits=False)
    return {"logits": only_seen(inputs, logits)}


def only_seen(inputs: Inputs, logits: torch.Tensor) -> torch.Tensor:
    key = torch.arange(logits.shape[1], device=logits.device)
    seen = (key >= inputs["k_start"][:, None]) & (key < inputs["k_end"][:, None])
    return torch.where(seen, logits, -torch.inf)


def paged(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [pages, PAGE, 1, dim + 4]: the codes of all tokens of a page, then their float32 scales."""
    rest = -len(codes) % PAGE
    data = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, rest)).view(-1, PAGE * codes.shape[1])
    factors = torch.nn.functional.pad(scales, (0, rest)).view(-1, PAGE).view(torch.uint8)
    return torch.cat((data, factors), dim=1).view(-1, PAGE, 1, codes.shape[1] + 4)


def run_paged(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it for decode: every token is a request of its own, and all of them share the pages of all keys.
    Each sees the keys up to its last one; those before its first are dropped afterwards."""
    import deep_gemm

    q, cache = inputs["q"], paged(inputs["k"], inputs["k_scale"])
    lengths = inputs["k_end"].clamp_min(1).unsqueeze(1)
    table = torch.arange(len(cache), dtype=torch.int32, device=q.device).repeat(len(q), 1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
    logits = deep_gemm.fp8_paged_mqa_logits(
        q.unsqueeze(1), cache, inputs["weights"], lengths, table, schedule, len(cache) * PAGE, clean_logits=False
    )
    return {"logits": only_seen(inputs, logits[:, : len(inputs["k"])])}


FAMILIES = (
    Family(
        name="fp8_mqa_logits",
        op_type="sparse_attention",
        twin={"num_heads": 8, "head_dim": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        isolated=("q",),  # keys that no token sees are NaN in every case
        oracle=oracle,
        compare={"logits": REFERENCE},
        kernels=(
            Kernel(
                "deep_gemm.fp8_mqa_logits",
                run_deep_gemm,
                limits={"num_tokens": (1, 1 << 20), "num_keys": (1, 1 << 30)},
                compare={"logits": KERNEL},
            ),
            Kernel(
                "deep_gemm.fp8_paged_mqa_logits",
                run_paged,
                variant="pages of 64",
                limits={"num_tokens": (1, 1 << 20), "num_keys": (1, 1 << 30)},
                compare={"logits": KERNEL},
            ),
        ),
        faults=(
            with_inputs("scales of other keys", lambda inputs, trial: {**inputs, "k_scale": inputs["k_scale"].roll(1)}),
        ),
    ),
)
