"""triton_kernels' matmul_ogs (OpenAI's, shipped with sgl-kernel), called as SGLang's backend triton_kernel calls it.

From its source (triton_kernels of sglang-kernel 0.4.2, matmul_ogs.py):

- It adds products in float32, adds the bias, applies the activation, multiplies by gamma, and rounds. Rows are summed
  per token by a second launch (_reduce_grouped), in float32, after they were rounded to bf16.
- Where there are few tiles, the features are split, and the second launch adds float32 parts instead.
- On Hopper, mxfp4 weights are widened to bf16, times their scales, which is exact. Scales are read in tiles of features
  without a mask: after the last ones of the last expert, up to 64 bytes behind their memory are read and multiplied by
  zero, which is NaN if a byte is 255 (known from the source, not measured). So the adapter leaves room, with zeros.
- With one choice per token it takes another way, which writes rows to their places at once. No model chooses so.
- Without rows it returns before it launches anything; SGLang never calls it so.
"""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs
from flashinfer_trace.verdict.compare import ErrorBound, Expected, unit_roundoff

__all__ = ["kernel", "rounded_rows"]

MODULE = "triton_kernels.matmul_ogs"
#: SGLang's number of warps, for which scales are laid out.
WARPS = 8
#: Bytes behind the scales of mxfp4 weights.
ROOM = 4096
BFLOAT16 = unit_roundoff(torch.bfloat16)


def routing_of(inputs: Inputs, choices: int) -> Any:
    """What matmul_ogs wants to know of the experts' rows."""
    from triton_kernels.routing import RoutingData, compute_expt_data

    counts = inputs["expert_counts"]
    rows = int(counts.sum())
    data = compute_expt_data(counts, len(counts), rows)
    return RoutingData(inputs.get("gammas"), counts, len(counts), choices, data)


def mxfp4_weights(inputs: Inputs) -> tuple[Any, Any]:
    """Weights [num_experts, k, n] and the configuration with their scales, in the layouts that SGLang chooses."""
    from triton_kernels.matmul_ogs import PrecisionConfig
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    codes, scales = (inputs[name].view(torch.uint8).mT for name in ("weights", "weights_scale"))
    values_as, values_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales_as, scales_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=WARPS)
    weights = convert_layout(wrap_torch_tensor(codes, dtype=FP4), values_as, **values_options)
    scale = convert_layout(wrap_torch_tensor(scales), scales_as, **scales_options)
    scale.storage.data = with_room(scale.storage.data)
    return weights, PrecisionConfig(weight_scale=scale)


def with_room(data: torch.Tensor) -> torch.Tensor:
    """The same tensor, with zeros in the memory behind it."""
    room = torch.zeros(data.numel() + ROOM, dtype=data.dtype, device=data.device)
    return room.as_strided(data.shape, data.stride()).copy_(data)


def launch(inputs: Inputs, outputs: Outputs, choices: int, **options: Any) -> Outputs:
    """Calls matmul_ogs, for mxfp4 weights with the constraint that SGLang sets on Hopper."""
    from triton_kernels.matmul_ogs import matmul_ogs
    from triton_kernels.matmul_ogs_details import opt_flags

    weights = inputs["weights"]
    if "weights_scale" in inputs:
        weights, options["precision_config"] = mxfp4_weights(inputs)
        opt_flags.update_opt_flags_constraints({"split_k": 1})
    try:
        y = outputs["output"].unsqueeze(0)
        matmul_ogs(inputs["x"], weights, inputs.get("bias"), routing_of(inputs, choices), y=y, **options)
    finally:
        opt_flags.reset_opt_flags_constraints()
    return outputs


def run_gather(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The first product. matmul_ogs divides indices by the number of choices, so that they count pairs."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation
    from triton_kernels.routing import GatherIndx

    tokens = inputs["row_tokens"]
    choices = max(1, len(tokens) // len(inputs["x"]))
    pairs = tokens * choices
    options: dict[str, Any] = {"gather_indx": GatherIndx(pairs, pairs.argsort().int())}
    if "limit" in inputs:
        from triton_kernels.swiglu import swiglu_fn

        settings = (float(inputs["alpha"]), float(inputs["limit"]))
        options["fused_activation"] = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), settings, 2)
    return launch(inputs, outputs, choices, **options)


def run_scatter(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The second product, and the sums of the rows of each token."""
    from triton_kernels.routing import ScatterIndx

    rows = inputs["positions"].flatten().contiguous()
    places = ScatterIndx(rows, rows.argsort().int())
    return launch(inputs, outputs, inputs["positions"].shape[1], scatter_indx=places, gammas=inputs["gammas"])


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
        run_gather if gather else run_scatter,
        limits=limits if gather else {**limits, "top_k": (2, 64)},
        compare={"output": policy},
    )
