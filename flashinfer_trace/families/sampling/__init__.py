"""Sampling from probabilities under top-k, top-p and min-p.

SGLang's sampler in PyTorch, which its backend `pytorch` and its deterministic mode call, sorts a row, drops what is
beyond rank k or has more than p of mass before it, and draws from the rest. Of equally probable tokens it keeps the
first ones only, in an order that torch.sort chooses, and a row that keeps nothing is an error. With a seed for
each request, it draws by the largest of log p plus Gumbel noise, which a hash of the seed, the position and the token
makes; without, torch.multinomial draws from CUDA's global generator.

From its source (SGLang 0.5.11 and 0.5.23, srt/layers/sampler.py): where the hash is 2^32 - 1 the noise is infinite, and
for a token that was dropped, whose log p is minus infinity, the sum is NaN, which torch.argmax takes for the largest.
So one draw in 2^32 / vocab_size returns a token that was dropped. The adapter passes seeds for which no hash is 2^32 -
1.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from flashinfer_trace.families.calls import called
from flashinfer_trace.families.sampling.distribution import Distribution
from flashinfer_trace.families.sampling.inputs import make_inputs
from flashinfer_trace.families.sampling.oracles import decide, sampling_oracle
from flashinfer_trace.families.sampling.rows import (
    NO_TOP_K,
    SamplingOptions,
    draws_again,
    plan_for_axes,
    sampling_corners,
    sampling_plans,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, ReferenceRun, SeededCall
from flashinfer_trace.harness.faults import Fault, FaultyCase, with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import OwnPlans
from flashinfer_trace.kernels.needs import LARGEST_VOCABULARY
from flashinfer_trace.verdict.compare import Policy, unit_roundoff

#: How far from an edge the uniform numbers are: far above float64's roundings, far below float32's.
BESIDE = 2.0**-40
LARGEST = 1.0 - 2.0**-53

#: Edges that are looked at in each row, evenly spaced and the last one: those of a whole vocabulary would take minutes.
EDGES = 40

#: Rows of one batch, by size of the vocabulary: fewer than any of their tokens that are kept; and one row of thousands
#: of tokens, where a single draw shows little except to a test that knows the number drawn. None: the Definition's own.
BATCHES: Mapping[int | None, int] = {None: 3, 4099: 1}

#: Rows and parameters, each without a token whose support a rounding could change.
CASES: tuple[dict[str, Any], ...] = (
    {"row": "short", "sum": 1.0, "top_k": 6, "top_p": 0.7, "min_p": 0.5},
    {"row": "normal", "sum": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"row": "normal", "sum": 1.0, "top_k": NO_TOP_K, "top_p": 1.5, "min_p": 0.0},
    {"row": "normal", "sum": 1.0, "top_k": 2000, "top_p": 1.5, "min_p": 0.0},
    {"row": "dyadic", "sum": 1.0, "top_k": -1, "top_p": 1.5, "min_p": 0.0},
    {"row": "trailing", "sum": 1.0, "top_k": NO_TOP_K, "top_p": 1.5, "min_p": 0.0},
    {"row": "trailing", "sum": 0.5, "top_k": 6, "top_p": 0.3, "min_p": 0.5},
    {"row": "short", "sum": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.0},
    {"row": "one_hot", "sum": 1.0, "top_k": 1, "top_p": 0.5, "min_p": 1.0},
    {"row": "zero", "sum": 1.0, "top_k": NO_TOP_K, "top_p": 1.5, "min_p": 0.5},
)


def wrong_draws(definition: Definition, run: ReferenceRun) -> list[str]:
    """One line for each row of which the reference, given a uniform number, returns another token than it must. The
    token is the first, in order of index, whose cumulative mass exceeds u: of all positive tokens, u in [0, 1), in a
    sampler that rejects, and where that one is not kept, and in the others, of the kept ones, u in [0, kept mass)."""
    lines = []
    for vocab_size, batch in BATCHES.items():
        sized = definition if vocab_size is None else definition.with_const_axes({"vocab_size": vocab_size})
        lines += wrong_draws_of(sized, batch, run)
    return lines


def wrong_draws_of(definition: Definition, batch: int, run: ReferenceRun) -> list[str]:
    """As `wrong_draws`, with so many rows at a time."""
    lines = []
    for number, case in enumerate(CASES):
        spec = {name: value for name, value in case.items() if name in ("row", "sum") or name in definition.inputs}
        inputs = make_inputs(definition, {"rows": 1, "draws": 1, "specs": [spec]}, Draws(number, "cpu"))
        edges = list(uniform_numbers(definition, inputs, case["row"] == "dyadic"))
        wanted = [token for _, token in edges]
        uniform = torch.tensor([u for u, _ in edges], dtype=torch.float64)
        got = [token for few in torch.split(uniform, batch) for token in tokens_for(definition, inputs, few, run)]
        wrong = [i for i, token in enumerate(wanted) if i >= len(got) or got[i] != token]
        rows_of = f"{batch} rows of {definition.const_axes['vocab_size']} tokens"
        if wrong or len(got) != len(wanted):
            first = wrong[0] if wrong else 0
            found = got[first] if first < len(got) else "nothing"
            lines.append(
                f"reference: {spec}, seed {number}, {rows_of}: for u = {edges[first][0]!r} it draws {found} instead of "
                f"{wanted[first]} ({len(wrong)} of {len(edges)} numbers at the edges of intervals)"
            )
    return lines


def uniform_numbers(definition: Definition, inputs: Inputs, exact: bool) -> Iterator[tuple[float, int]]:
    """Uniform numbers and the token that each must give; with `exact`, sums are exact and the edges themselves too."""
    probs = inputs["probs"][0].double()
    keep = ((decide(definition, inputs).margin[0] > 0) & (probs > 0)).tolist()
    nothing = len(keep) - 1 if "min_p" in inputs and not probs.any() else 0
    rejects = draws_again(definition)
    kept = cumulative([float(p) if k else 0.0 for p, k in zip(probs, keep, strict=True)])
    whole = cumulative(probs.tolist())

    def token(u: float) -> int:
        if not kept[-1]:
            return nothing
        if rejects:
            first = min(bisect.bisect_right(whole, u), last_increase(whole))
            if keep[first]:
                return first
        return min(bisect.bisect_right(kept, u * kept[-1]), last_increase(kept))

    numbers = {0.0, LARGEST}
    for mass, total in ((kept, kept[-1]), (whole, 1.0)) if rejects else ((kept, kept[-1]),):
        distinct = sorted(set(mass)) if total else []
        for edge in [*distinct[:: -(-len(distinct) // EDGES) or 1], *distinct[-1:]]:
            numbers |= {edge / total - BESIDE, edge / total + BESIDE} | ({edge / total} if exact else set())
    return ((u, token(u)) for u in sorted(numbers) if 0 <= u < 1)


def cumulative(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).cumsum(0).tolist()


def last_increase(sums: list[float]) -> int:
    """The first index with the final sum: the last token that has any mass."""
    return sums.index(sums[-1])


def tokens_for(definition: Definition, inputs: Inputs, uniform: torch.Tensor, run: ReferenceRun) -> list[int]:
    """The tokens that the reference draws from the one row of `inputs`, given each of these numbers for every draw."""
    repeated = {name: value.repeat_interleave(len(uniform), dim=0) for name, value in inputs.items()}
    (samples,) = run(definition, repeated, uniform).values()
    return [int(token) for token in samples.reshape(-1)]


TEMPERATURE = 1.05
OFF = 0.02


def off(name: str, factor: float, inputs: dict[str, Any], trial: FaultyCase) -> dict[str, Any] | None:
    """k - 1, where that keeps another number of tokens; p times a factor, where p is a limit at all."""
    value = inputs[name]
    if name == "top_k":
        other = torch.where((value > 1) & (value <= inputs["probs"].shape[1]), value - 1, value)
    else:
        other = torch.where((value > 0) & (value < 1), value * factor, value)
    return None if torch.equal(other, value) else {**inputs, name: other}


def tempered(inputs: dict[str, Any], trial: FaultyCase) -> dict[str, Any] | None:
    """Probabilities at TEMPERATURE instead of 1, with the sum that they had."""
    probs = inputs["probs"]
    flatter = probs.double().pow(1 / TEMPERATURE)
    total = flatter.sum(dim=-1, keepdim=True).clamp_min(1e-300)
    other = (flatter * (probs.double().sum(dim=-1, keepdim=True) / total)).float()
    return None if torch.equal(other, probs) else {**inputs, "probs": other}


def parameter_faults(names: Iterable[str]) -> tuple[Fault, ...]:
    found = []
    for name in names:
        signs = {"k - 1": 0.0} if name == "top_k" else {f"{name} 2 % too small": -OFF, f"{name} 2 % too large": OFF}
        found += [with_inputs(what, functools.partial(off, name, 1 + by)) for what, by in signs.items()]
    return (*found, with_inputs(f"temperature {TEMPERATURE}", tempered))


def one_number(trial: FaultyCase) -> dict[str, torch.Tensor] | None:
    """Every draw of a distribution uses the same random number: all of them give its first sample."""
    samples, group = trial.outputs["samples"], trial.expected["samples"].parts["group"]
    first = torch.searchsorted(group, torch.arange(int(group[-1]) + 1, device=group.device)) if len(group) else group
    same = samples[first[group]] if len(group) else samples
    return None if torch.equal(same, samples) else {"samples": same}


PYTORCH = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"


def draw_in_pytorch(seeds: bool, definition: Definition, inputs: Inputs, seed: int) -> Outputs:
    """One draw of each row; `seeds` says whether each request has one of its own, here the same at another position."""
    probs = inputs["probs"]
    rows = torch.arange(len(probs), device=probs.device)
    own = harmless_seeds(seed, rows, probs.shape[1]) if seeds else None
    given = {"none": torch.zeros_like(inputs["top_p"]), "own": own, "rows": rows}
    with torch.random.fork_rng([probs.device] if probs.is_cuda else []):
        torch.manual_seed(seed)
        samples = called(PYTORCH, "probs top_k top_p none False own rows", definition, {**inputs, **given}, eager=True)
    return {"samples": samples.to(torch.int64)}


def harmless_seeds(seed: int, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The same seed for each position: the first from `seed` on that gives no token the largest hash."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    tokens = torch.arange(vocab_size, device=positions.device)
    while True:
        own = torch.full_like(positions, seed)
        hashes = murmur_hash32(own.to(torch.uint64), positions, tokens)
        if not bool((hashes.view(torch.int32) == -1).any()):
            return own
        seed += 1


U = unit_roundoff(torch.float32)

#: Most roundings that any term of a row's sum passes through in a block of 1024 threads, up to `LARGEST_VOCABULARY`:
#: serial additions of its 1024th part, 5 across a warp, 31 across warps, and a few across blocks; worst case of
#: non-negative terms, hence linear.
SUM = (-(-LARGEST_VOCABULARY // 1024) + 43) * U

#: Both the references and the oracle sum in float64: at most 2^19 roundings of 2^-53 each.
FLOAT64 = 2.0**-34

EXACT_SUPPORT = Distribution("chi-square of alpha 1e-8; which tokens are kept involves no sum: exact support")
REFERENCE_SUPPORT = Distribution("chi-square of alpha 1e-8; support exact but for float64 sums: 2^-34", FLOAT64)
#: Where the threshold is 0, a token of probability 0 is drawn if, by roundings of a float32 scan, the cumulative sum
#: first exceeds the uniform number there (findings/kernels.json: 2 in a million draws of 4096 tokens).
MIN_P_SUPPORT = Distribution(
    "chi-square of alpha 1e-8; exact support, but where the threshold is 0 tokens of probability 0 are drawn as often "
    "as roundings of a float32 sum, 300 of them, let a draw fall there",
    SUM,
)
TOP_P_SUPPORT = Distribution("chi-square of alpha 1e-8; support decided by a float32 sum of 300 roundings", SUM)
#: Rows without a top-k that several blocks compute, of more than 57,344 tokens, may come out divided by 1e-8 instead of
#: their sum, and then any token is drawn (findings/kernels.json): this bound does not allow it.
TOP_K_TOP_P_SUPPORT = Distribution(
    "chi-square of alpha 1e-8; support decided by a float32 sum of a row scaled by another: 2 x 300 + 4 roundings",
    2 * SUM + 4 * U,
)


def seed_of(inputs: Inputs) -> int:
    """A seed for the kernel's generator that repeats with the inputs and differs between cases."""
    total = torch.stack([value[:1].reshape(-1).view(torch.int32).sum() for value in inputs.values()]).sum()
    return int(total) % (1 << 31)


def sampler(name: str, **options: Any) -> SeededCall:
    """flashinfer.sampling.<name> with a seed; it takes the inputs in the Definition's order and returns int32."""

    def draw(definition: Definition, inputs: Inputs, seed: int) -> Outputs:
        import flashinfer.sampling

        arguments = [inputs[key] for key in definition.inputs]
        function = getattr(flashinfer.sampling, name)
        return {"samples": function(*arguments, seed=seed, offset=0, **options).to(torch.int64)}

    return draw


def drawing(path: str, draw: SeededCall, policy: Policy, variant: str = "", **how: Any) -> Kernel:
    """A kernel that draws: each case has a seed of its own."""
    return Kernel(path, functools.partial(run_seeded, draw), variant, compare={"samples": policy}, seeded=draw, **how)


def run_seeded(draw: SeededCall, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return draw(definition, inputs, seed_of(inputs))


#: The common parts of samplers and renormalizers.
row_family = functools.partial(Family, twin={"vocab_size": 64}, make_inputs=make_inputs)


def sampling_family(
    name: str,
    parameters: tuple[str, ...],
    reference: Policy,
    kernel: Policy,
    function: str = "",
    variant: str = "",
    more: tuple[Kernel, ...] = (),
    **options: Any,
) -> Family:
    """The family of a function of flashinfer.sampling, by default of the same name; `more` are other kernels."""
    path = f"flashinfer.sampling.{function or name}"

    return row_family(
        name=name,
        op_type="sampling",
        plan=OwnPlans(sampling_plans, plan_for_axes, sampling_corners),
        checks=(wrong_draws,),
        faults=(*parameter_faults(parameters), Fault("one random number for all draws", one_number)),
        oracle=sampling_oracle,
        compare={"samples": reference},
        kernels=(drawing(path, sampler(function or name, **options), kernel, variant), *more),
    )


FAMILIES = (
    sampling_family("top_k_sampling_from_probs", ("top_k",), EXACT_SUPPORT, EXACT_SUPPORT),
    sampling_family("top_p_sampling_from_probs", ("top_p",), REFERENCE_SUPPORT, TOP_P_SUPPORT),
    sampling_family(
        "top_k_top_p_sampling_from_probs",
        ("top_k", "top_p"),
        REFERENCE_SUPPORT,
        TOP_K_TOP_P_SUPPORT,
        filter_apply_order="top_k_first",
    ),
    # As SGLang calls it.
    sampling_family(
        "top_k_top_p_joint_sampling_from_probs",
        ("top_k", "top_p"),
        REFERENCE_SUPPORT,
        TOP_P_SUPPORT,
        "top_k_top_p_sampling_from_probs",
        "joint",
        tuple(
            drawing(
                PYTORCH,
                functools.partial(draw_in_pytorch, seeds),
                TOP_P_SUPPORT,
                "with seeds" if seeds else "",
                # The Definition says, as flashinfer's kernel does, what is drawn first from rows of another sum than 1,
                # and at boundaries; this sampler draws from what it kept only.
                plan_options=SamplingOptions(lowest_k=1, sums_to_one=True, boundaries=False, untied=True),
            )
            for seeds in (False, True)
        ),
        filter_apply_order="joint",
    ),
    sampling_family("min_p_sampling_from_probs", ("min_p",), EXACT_SUPPORT, MIN_P_SUPPORT),
)
