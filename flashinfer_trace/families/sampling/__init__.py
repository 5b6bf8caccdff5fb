"""Sampling from probabilities under top-k, top-p and min-p."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_trace.families.sampling.corners import sampling_corners
from flashinfer_trace.families.sampling.distribution import Distribution
from flashinfer_trace.families.sampling.exact_draws import wrong_draws
from flashinfer_trace.families.sampling.faults import sampling_faults
from flashinfer_trace.families.sampling.inputs import make_inputs
from flashinfer_trace.families.sampling.oracles import sampling_oracle
from flashinfer_trace.families.sampling.pytorch import joint_kernels
from flashinfer_trace.families.sampling.rows import plan_for_axes, sampling_plans
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, KernelCall, Outputs, SeededCall
from flashinfer_trace.harness.plans import OwnPlans
from flashinfer_trace.kernels.needs import LARGEST_VOCABULARY
from flashinfer_trace.verdict.compare import Policy, unit_roundoff

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


def with_own_seed(draw: SeededCall) -> KernelCall:
    """The adapter of a sampler: each case has a seed of its own."""

    def run(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
        return draw(definition, inputs, seed_of(inputs))

    return run


#: What samplers and renormalizers have in common.
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
    """The family of a function of flashinfer.sampling, that of the same name by default, with these options.

    `more` are kernels beside it.
    """
    path = f"flashinfer.sampling.{function or name}"
    draw = sampler(function or name, **options)
    return row_family(
        name=name,
        op_type="sampling",
        plan=OwnPlans(sampling_plans, plan_for_axes, sampling_corners),
        checks=(wrong_draws,),
        faults=sampling_faults(*parameters),
        oracle=sampling_oracle,
        compare={"samples": reference},
        kernels=(
            Kernel(path, with_own_seed(draw), variant=variant, compare={"samples": kernel}, seeded=draw),
            *more,
        ),
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
        joint_kernels({"samples": TOP_P_SUPPORT}, with_own_seed),
        filter_apply_order="joint",
    ),
    sampling_family("min_p_sampling_from_probs", ("min_p",), EXACT_SUPPORT, MIN_P_SUPPORT),
)
