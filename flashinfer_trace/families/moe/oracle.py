"""The float64 oracle of the mixture of experts, and the error models of the kernels that compute it.

Routing counts ranks instead of sorting; products scale whole blocks after the sums instead of the weights before.

Error models. With z = gemm1's output, y = silu(gate) * up and weights c of the chosen experts, an error of y_i with
variance s_i^2 reaches output j as c W2_ji times itself. The errors of different i are independent and of zero mean, so
the output's error has variance V_j = sum over experts of c^2 sum_i (W2_ji s_i)^2, and stays within L sqrt(V_j) but for
a probability of 2 exp(-L^2 / 2). What each implementation rounds decides s_i:

- ``float32`` (the reference): products and sums in float32 only.
- ``hopper`` (sgl-kernel): fp8 products with short accumulators; z and y rounded to bf16; y to e4m3 in groups of 128;
  the result of each expert and c rounded to bf16.
- ``blackwell`` (trtllm-gen): z and y rounded to e4m3 in groups of 128; the result of each expert rounded to bf16.

A wrong scale of a per cent hides in V_j but not in the average over all elements: see `gain_variance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import Expected, unit_roundoff
from flashinfer_trace.harness.quantised import (
    blocks_of,
    blockwise_product,
    chosen_by_rank,
    dequantised,
    e4m3_variance,
    float_variance,
)

MODELS = ("float32", "hopper", "blackwell")
U32 = unit_roundoff(torch.float32)
#: Roundings of a weight c in float32: sigmoid, the sum of chosen scores, division, factor.
WEIGHT_ROUNDINGS = 16
#: Tensor cores of Hopper add fp8 products with 13 bits after the leading one of the largest, and drop the rest. Of the
#: 128 products of a block and its 4 accumulators each loses a part of one unit, uniform in [0, 1), of the sign of the
#: term; the unit is at most 2^-13 of the root of the summed squares of the products: 132 / 3 units^2.
TRUNCATION_VARIANCE = 132 / 3 * 2.0**-26


@dataclass
class Share:
    """What one expert adds: its tokens, their weights c [n, 1], results o [n, hidden_size], variances of y by model."""

    expert: int
    token: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    variance: torch.Tensor


def in_groups(scores: torch.Tensor, groups: int) -> torch.Tensor:
    """[rows, experts] -> [rows, groups, experts of a group], for no rows too."""
    return scores.view(scores.shape[0], groups, scores.shape[1] // groups)


def route(definition: Definition, inputs: dict[str, Any]) -> torch.Tensor:
    """Weights [seq_len, num_experts] in float64, zero where an expert is not chosen."""
    axes = definition.const_axes
    scores = torch.sigmoid(inputs["routing_logits"].double())
    choice = in_groups(scores + inputs["routing_bias"].double(), axes["n_group"])
    group_scores = torch.where(chosen_by_rank(choice, 2), choice, 0.0).sum(dim=2)
    kept = chosen_by_rank(group_scores, axes["topk_group"]).unsqueeze(2)
    candidates = torch.where(kept, choice, -torch.inf).flatten(1)
    chosen = torch.where(chosen_by_rank(candidates, axes["top_k"]), scores, 0.0)
    return chosen / chosen.sum(dim=1, keepdim=True) * float(inputs["routed_scaling_factor"])


def activation_variances(z: torch.Tensor, squares: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """y [n, intermediate_size] and its variances by model [models, n, intermediate_size].

    Args:
        z: gemm1's output, float64 [n, 2 * intermediate_size], up then gate.
        squares: sum of the squared products behind each z.
    """
    up, gate = z.chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    y = silu * up
    slope = torch.cat([silu, up * sigmoid * (1 + gate * (1 - sigmoid))], dim=1).square()
    # float32, any order: n u times the sum of |products|, at most sqrt(n) roots of summed squares, over sqrt(n) for
    # independent errors; 2 more roundings dequantise.
    summed = squares * ((hidden_size + 2) * U32) ** 2
    truncated = squares * TRUNCATION_VARIANCE
    second = y.shape[1] + 6  # roundings of gemm2, relative to each term, and of silu
    of_z = torch.stack(
        [summed, summed + truncated + float_variance(z, torch.bfloat16), summed + truncated + e4m3_variance(z)]
    )
    of_up, of_gate = (of_z * slope).chunk(2, dim=2)
    own = y.square() * (second * U32) ** 2
    requantised = own + y.square() * TRUNCATION_VARIANCE + e4m3_variance(y)
    return y, of_up + of_gate + torch.stack([own, requantised + float_variance(y, torch.bfloat16), requantised])


def shares(definition: Definition, inputs: dict[str, Any], weights: torch.Tensor) -> list[Share]:
    """One entry for each local expert that got a token."""
    offset = int(inputs["local_expert_offset"])
    found = []
    for expert in range(definition.const_axes["num_local_experts"]):
        token = weights[:, offset + expert].nonzero().flatten()
        if len(token) == 0:
            continue
        # Indexed as bytes: not every torch indexes fp8.
        x = inputs["hidden_states"].view(torch.uint8)[token].view(torch.float8_e4m3fn).double()
        x_scales = inputs["hidden_states_scale"].T[token]
        codes, scales = inputs["gemm1_weights"][expert], inputs["gemm1_weights_scale"][expert]
        z = blockwise_product(x, x_scales, codes, scales)
        x_squares = (blocks_of(x) * x_scales.unsqueeze(2)).flatten(1).float().square()
        squares = (x_squares @ dequantised(codes, scales, torch.float32).square_().T).double()
        y, variance = activation_variances(z, squares, x.shape[1])
        result = blockwise_product(y, None, inputs["gemm2_weights"][expert], inputs["gemm2_weights_scale"][expert])
        found.append(Share(expert, token, weights[token, offset + expert].unsqueeze(1), result, variance))
    return found


def result_variances(share: Share) -> torch.Tensor:
    """Variances by model of c * o, [models, n, hidden_size], from roundings after the sum over y."""
    c2, term2 = share.weight.square(), (share.weight * share.result).square()
    single = term2 * (WEIGHT_ROUNDINGS * U32) ** 2
    result = c2 * float_variance(share.result, torch.bfloat16)
    weight = float_variance(share.weight, torch.bfloat16) * share.result.square()
    return torch.stack([single, single + result + weight, single + result])


def gain_variance(inputs: dict[str, Any], value: torch.Tensor, found: list[Share]) -> torch.Tensor:
    """Variance by model [models] of <error, value> / <value, value>, the error of a scale fitted to all elements.

    <error, value> sums, over tokens, experts and i, the error of y_i times c (W2.T value)_i. The rounding of a weight c
    is common to a row and counts as a whole; those of results and outputs count each on its own.
    """
    total = value.new_zeros(len(MODELS))
    bf16 = torch.bfloat16
    for share in found:
        direction = value[share.token]
        codes, scales = inputs["gemm2_weights"][share.expert], inputs["gemm2_weights_scale"][share.expert]
        slopes = share.weight * (direction.float() @ dequantised(codes, scales, torch.float32)).double()
        total += (share.variance * slopes.square()).sum(dim=(1, 2))
        along = (share.result * direction).sum(dim=1, keepdim=True).square()
        each = (share.weight * direction).square() * float_variance(share.result, bf16)
        total += each.sum() * total.new_tensor([0.0, 1.0, 1.0])
        total += (float_variance(share.weight, bf16) * along).sum() * total.new_tensor([0.0, 1.0, 0.0])
    total += (value.square() * float_variance(value, bf16)).sum()
    return total / value.square().sum().square().clamp_min(1e-300)


def oracle(definition: Definition, inputs: dict[str, Any]) -> dict[str, Expected]:
    """float64 output; parts ``<model>_variance`` by element and ``<model>_gain`` (a variance, one number)."""
    found = shares(definition, inputs, route(definition, inputs))
    value = inputs["routing_logits"].new_zeros(inputs["hidden_states"].shape, dtype=torch.float64)
    variance = value.new_zeros((len(MODELS), *value.shape))
    for share in found:
        value.index_add_(0, share.token, share.weight * share.result)
        codes, scales = inputs["gemm2_weights"][share.expert], inputs["gemm2_weights_scale"][share.expert]
        squares = dequantised(codes, scales, torch.float32).square_()
        spread = share.weight.square() * (share.variance.float() @ squares.T).double()
        variance.index_add_(1, share.token, spread + result_variances(share))
    gains = gain_variance(inputs, value, found)
    parts = {f"{model}_variance": variance[i] for i, model in enumerate(MODELS)}
    return {"output": Expected(value, parts | {f"{model}_gain": gains[i] for i, model in enumerate(MODELS)})}
