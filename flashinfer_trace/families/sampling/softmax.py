"""The softmax of logits over temperatures: the probabilities that samplers draw from."""

from __future__ import annotations

import math

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.sampling import SUM, U
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected

#: ``shifted``: all logits of a row are around 100; ``masked``: half of them are -inf, as a grammar makes them. Only
#: corners have ``scaled`` ones, as large as the temperature.
LOGITS = ("normal", "peaked", "equal", "shifted", "masked")
TEMPERATURES = (1.0, 0.7, 0.05, 8.0)
#: Temperatures of the rows of corners, in turn. Only of ``scaled`` logits does float32 leave anything but the largest
#: one at 1e-6.
EXTREMES = (1e-6, 1e2)
#: Float32 results below this may be flushed to zero.
SMALLEST = torch.finfo(torch.float32).smallest_normal
#: Most maxima that a running sum is rescaled to: one for each 4096 of the largest vocabulary, and one for each slice.
RESCALINGS = 64

#: The corners have logits far from 0, and masked ones, each with several temperatures, and with extreme ones.
PLAN = RowPlans(
    {"batch_size": Count(24, 64, corner=5)},
    {"logits": LOGITS, "temperature": ("mixed", *TEMPERATURES)},
    special=[
        *({"logits": logits} for logits in ("shifted", "masked", "peaked")),
        *({"batch_size": 4, "logits": logits, "temperature": "extreme"} for logits in ("scaled", "masked")),
    ],
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    shape = [plan["batch_size"], definition.const_axes["vocab_size"]]
    logits = draws.normal(shape, scale={"peaked": 12.0, "equal": 0.0}.get(plan["logits"], 2.0))
    if plan["logits"] == "shifted":
        logits = logits + 100.0
    elif plan["logits"] == "masked":
        masked = draws.integers(shape, 0, 1) > 0
        masked[:, :1] = False
        logits = logits.masked_fill(masked, -math.inf)
    if plan["temperature"] == "mixed":
        chosen = torch.tensor(TEMPERATURES, device=draws.device)
        temperature = chosen[draws.integers([shape[0]], 0, len(TEMPERATURES) - 1)]
    elif plan["temperature"] == "extreme":
        temperature = torch.tensor(EXTREMES, device=draws.device)[torch.arange(shape[0], device=draws.device) % 2]
    else:
        temperature = torch.full([shape[0]], plan["temperature"], device=draws.device)
    if plan["logits"] == "scaled":
        logits = logits * temperature[:, None]
    return {"logits": logits, "temperature": temperature}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """exp of the distance of a logit below the logarithm of the sum of exponentials, in float64. Parts: ``below``, how
    far each scaled logit is below the largest; ``size``, the sum of the sizes of both; ``mean_below`` and
    ``mean_size``, their means over the probabilities, [batch_size, 1]."""
    scaled = inputs["logits"].double() / inputs["temperature"].double()[:, None]
    largest = scaled.amax(dim=1, keepdim=True)
    probs = torch.exp(scaled - largest - torch.logsumexp(scaled - largest, dim=1, keepdim=True))
    finite = scaled.isfinite()
    below = torch.where(finite, largest - scaled, 0.0)
    size = torch.where(finite, scaled.abs() + largest.abs(), 0.0)
    means = {
        f"mean_{name}": (probs * part).sum(1, keepdim=True) for name, part in {"below": below, "size": size}.items()
    }
    return {"probs": Expected(probs, {"below": below, "size": size, **means})}


def kernel_bound(expected: Expected) -> torch.Tensor:
    """Float32: scaled logits, their difference from the maximum, __expf, a rescaled sum, a reciprocal and a product.

    A scaled logit is off by 3 u of its size, the largest too: FlashInfer 0.6.12 subtracted its rounded value from a
    product that is not rounded. __expf is within 2 + 1.173 |x| ulp of at most 2 u (CUDA C++ Programming Guide,
    "Intrinsic Functions"). Terms are rescaled by exponentials whose exponents add up to at most their own. Near a
    temperature of 0 an exponent may be off by more than 1, hence expm1.
    """
    parts = expected.parts

    def of_term(size: torch.Tensor, below: torch.Tensor, exponentials: int) -> torch.Tensor:
        return 3 * U * size + U * below + 2 * U * ((2 + 1) * exponentials + 1.173 * below)

    own = of_term(parts["size"], parts["below"], 1)
    total = of_term(parts["mean_size"], 2 * parts["mean_below"], 1 + RESCALINGS)
    return expected.value * torch.expm1(own + total + SUM + 4 * U) + SMALLEST


REFERENCE = ErrorBound(
    lambda expected: (
        expected.value * (U * (1 + 2**-20) + (expected.parts["size"] + expected.parts["mean_size"]) * 2.0**-52)
        + SMALLEST * U
    ),
    "one float32 rounding of a float64 softmax, whose scaled logits are within 2^-53 of their size",
)
KERNEL = ErrorBound(
    kernel_bound,
    "float32: scaled logits within 3 u of their size, __expf within 2 + 1.173 |x| ulp, a sum of 200 roundings whose "
    "terms are rescaled up to 64 times, a reciprocal and a product; what is subnormal may be 0",
)


def run_torch(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang's sampler does, in place: a division, then torch's own kernel."""
    logits = inputs["logits"]
    logits.div_(inputs["temperature"][:, None])
    logits[:] = torch.softmax(logits, dim=-1)
    return {"probs": logits}


LAUNCHABLE = {"batch_size": (1, 1 << 20)}
FAMILIES = (
    Family(
        name="softmax_temperature",
        op_type="sampling",
        twin={"vocab_size": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"probs": REFERENCE},
        kernels=(
            calling("flashinfer.sampling.softmax", "logits temperature", limits=LAUNCHABLE, compare={"probs": KERNEL}),
            Kernel("torch.softmax", run_torch, limits=LAUNCHABLE, in_place=("logits",), compare={"probs": KERNEL}),
        ),
        faults=(
            with_inputs(
                "temperatures of other rows",
                lambda inputs, trial: {**inputs, "temperature": inputs["temperature"].flip(0)},
            ),
        ),
    ),
)
