"""triton_kernels' matmul_ogs (OpenAI's, shipped with sgl-kernel), called as SGLang's backend triton_kernel calls it.

From its source (triton_kernels of sglang-kernel 0.4.2, matmul_ogs.py):

- It adds products in float32, adds the bias, applies the activation, multiplies by gamma, and rounds. Rows are summed
  per token by a second launch (_reduce_grouped), in float32, after they were rounded to bf16.
- Where there are few tiles, the features are split, and the second launch adds float32 parts instead.
- With one choice per token it takes another way, which writes rows to their places at once. No model chooses so.
- Without rows it returns before it launches anything; SGLang never calls it so.
"""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import ErrorBound, Expected, unit_roundoff
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs

__all__ = ["kernel", "rounded_rows"]

MODULE = "triton_kernels.matmul_ogs"
BFLOAT16 = unit_roundoff(torch.bfloat16)


def routing_of(inputs: Inputs, choices: int) -> Any:
    """What matmul_ogs wants to know of the experts' rows."""
    from triton_kernels.routing import RoutingData, compute_expt_data

    counts = inputs["expert_counts"]
    rows = int(counts.sum())
    data = compute_expt_data(counts, len(counts), rows)
    return RoutingData(inputs.get("gammas"), counts, len(counts), choices, data)


def run_gather(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The first product. matmul_ogs divides indices by the number of choices, so that they count pairs."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.routing import GatherIndx

    tokens = inputs["row_tokens"]
    choices = max(1, len(tokens) // len(inputs["x"]))
    pairs = tokens * choices
    options: dict[str, Any] = {}
    if "limit" in inputs:
        from triton_kernels.swiglu import swiglu_fn

        settings = (float(inputs["alpha"]), float(inputs["limit"]))
        options["fused_activation"] = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), settings, 2)
    matmul_ogs(
        inputs["x"],
        inputs["weights"],
        inputs.get("bias"),
        routing_of(inputs, choices),
        gather_indx=GatherIndx(pairs, pairs.argsort().int()),
        y=outputs["output"].unsqueeze(0),
        **options,
    )
    return outputs


def run_scatter(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The second product, and the sums of the rows of each token."""
    from triton_kernels.matmul_ogs import matmul_ogs
    from triton_kernels.routing import ScatterIndx

    positions = inputs["positions"]
    rows = positions.flatten().contiguous()
    matmul_ogs(
        inputs["x"],
        inputs["weights"],
        inputs.get("bias"),
        routing_of(inputs, positions.shape[1]),
        scatter_indx=ScatterIndx(rows, rows.argsort().int()),
        gammas=inputs["gammas"],
        y=outputs["output"].unsqueeze(0),
    )
    return outputs


def rounded_rows(policy: ErrorBound) -> ErrorBound:
    """A policy that allows for one rounding to bf16 of each row before rows are summed."""

    def bound(expected: Expected) -> torch.Tensor:
        return policy.bound(expected) + expected.parts["rows"] * (BFLOAT16 * (1 + 2**-7))

    return ErrorBound(bound, f"{policy.reason}; each row is rounded to bf16 before the sum, u = 2^-8")


def kernel(gather: bool, policy: ErrorBound) -> Kernel:
    """The kernel of one of the families."""
    limits = {"num_rows": (1, 1 << 30), "num_tokens": (1, 1 << 30)}
    return Kernel(
        f"{MODULE}.matmul_ogs",
        "sglang-kernel",
        run_gather if gather else run_scatter,
        min_capability=(9, 0),
        limits=limits if gather else {**limits, "top_k": (2, 64)},
        compare={"output": policy},
        modules=(MODULE,),
        optional=True,
    )
