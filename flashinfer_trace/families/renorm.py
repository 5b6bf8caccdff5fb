"""Renormalization of probabilities by top-k and top-p.

It has an op_type of its own because flashinfer-bench judges every Definition of op_type sampling by the tokens that it
draws.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashinfer_trace.families.sampling import FLOAT64, SUM, U, row_family
from flashinfer_trace.families.sampling.corners import renorm_corners
from flashinfer_trace.families.sampling.faults import renorm_faults
from flashinfer_trace.families.sampling.oracles import renorm_oracle
from flashinfer_trace.families.sampling.renormalized import Renormalized
from flashinfer_trace.families.sampling.rows import SamplingOptions, plan_for_axes, renorm_plans
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, KernelCall, Outputs
from flashinfer_trace.harness.plans import OwnPlans
from flashinfer_trace.kernels.needs import LARGEST_HISTOGRAM

REFERENCE_RENORM = Renormalized("one float32 rounding of a float64 quotient; float64 sums", U * (1 + 2**-20), FLOAT64)
RENORM_TOP_K = Renormalized("float32 sum of 300 roundings, approximate reciprocal, product; exact support", SUM + 4 * U)
RENORM_TOP_P = Renormalized(
    "float32 sum of 300 roundings, approximate reciprocal, product; threshold: two such sums",
    SUM + 4 * U,
    2 * SUM + 4 * U,
)
#: The default of flashinfer's top-p renormalization adds to the bins of a histogram with atomics: up to 163840 numbers
#: one after another in any order, whose partial sums average half the final one; once for the row, once for the mass.
RENORM_ATOMIC = Renormalized(
    "float32 sum of 300 roundings, approximate reciprocal, product; threshold: bins of up to 163840 serial additions",
    SUM + 4 * U,
    LARGEST_HISTOGRAM * U,
)


def renormalizer(name: str, **options: Any) -> KernelCall:
    """An adapter of flashinfer.sampling.<name>."""

    def run(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
        import flashinfer.sampling

        arguments = [inputs[key] for key in definition.inputs]
        return {"renorm_probs": getattr(flashinfer.sampling, name)(*arguments, **options)}

    return run


def sgl_renormalizer(name: str) -> KernelCall:
    """An adapter of the op itself: sgl_kernel's Python function calls flashinfer's instead where that is installed."""

    def run(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
        import sgl_kernel  # noqa: F401

        parameter = next(inputs[key] for key in definition.inputs if key != "probs")
        getattr(torch.ops.sgl_kernel, name).default(inputs["probs"], outputs["renorm_probs"], parameter, 0)
        return outputs

    return run


def renorm_family(name: str, parameter: str, kernels: tuple[Kernel, ...]) -> Family:
    return row_family(
        name=name,
        op_type="renorm",
        plan=OwnPlans(renorm_plans, plan_for_axes, renorm_corners),
        oracle=renorm_oracle,
        compare={"renorm_probs": REFERENCE_RENORM},
        kernels=kernels,
        faults=renorm_faults(parameter),
    )


# sgl-kernel builds an older flashinfer. Its top-k keeps the largest value for k = 0 and returns the row unscaled for k
# beyond the vocabulary, negative, or beyond the number of positive values; its top-p takes p as absolute mass. On rows
# that sum to 1, with k > 0, both agree with the newer one.
SUMS_TO_ONE = SamplingOptions(sums_to_one=True)
WITH_TOKENS = dataclasses.replace(SUMS_TO_ONE, lowest_k=1)

# A defect of flashinfer 0.6.12; its own search below 2048 tokens and sgl-kernel do not have it. If the radix search of
# include/flashinfer/air_top_p.cuh does not reach its target, it leaves the loop over groups of 32 bins with the last
# group already added, adds that group again, and may stop at its first bin, which drops tokens that must be kept. It
# does not reach the target if p > 1; if p = 1 and its rounded parts add up to less than its rounded total; and if the
# limit is, up to rounding, the mass down to the last token of the bin that an earlier pass chose: p at or next to a
# cumulative mass. Measured on an H200: (0.5, 0.25, 0.125, ...) with p = 1.5 keeps 0.5 alone; Zipf rows with p = 1 lose
# their tail. Of 16384 rows with p at a cumulative mass that were made so that the last two tokens within it share a
# group, 7 % lose the last one, up to 0.21 of the kept mass, in either mode; of as many where it is alone in its group,
# or where p is 1 % of its mass lower, none does; of random rows, 0.04 %.
RADIX = SamplingOptions(highest_p=0.999, boundaries=False)

FLASHINFER, SGL = "flashinfer.sampling.top_{}_renorm_probs", "torch.ops.sgl_kernel.top_{}_renorm_probs"
K_RENORM, P_RENORM = "top_k_renorm_probs", "top_p_renorm_probs"
BY_K, BY_P, ATOMIC = ({"renorm_probs": policy} for policy in (RENORM_TOP_K, RENORM_TOP_P, RENORM_ATOMIC))
DETERMINISTIC = renormalizer(P_RENORM, is_deterministic=True)
FAMILIES = (
    renorm_family(
        K_RENORM,
        "top_k",
        (
            Kernel(FLASHINFER.format("k"), renormalizer(K_RENORM), common=WITH_TOKENS, compare=BY_K),
            Kernel(SGL.format("k"), sgl_renormalizer(K_RENORM), plan_options=WITH_TOKENS, compare=BY_K),
        ),
    ),
    renorm_family(
        P_RENORM,
        "top_p",
        (
            Kernel(FLASHINFER.format("p"), renormalizer(P_RENORM), plan_options=RADIX, compare=ATOMIC),
            Kernel(FLASHINFER.format("p"), DETERMINISTIC, "is_deterministic", plan_options=RADIX, compare=BY_P),
            Kernel(SGL.format("p"), sgl_renormalizer(P_RENORM), plan_options=SUMS_TO_ONE, compare=BY_P),
        ),
    ),
)
