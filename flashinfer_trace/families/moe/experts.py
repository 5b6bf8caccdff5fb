"""The expert MLPs in float64, and the error models of the kernels that compute them, for given routing.

Error models. With z = gemm1's output, y = silu(gate) * up and weights c of the chosen experts, an error of y_i with
variance s_i^2 reaches output j as c W2_ji times itself. The errors of different i are independent and of zero mean, so
the output's error has variance V_j = sum over experts of c^2 sum_i (W2_ji s_i)^2, and exceeds L sqrt(V_j) with a
probability of at most 2 exp(-L^2 / 2). What each implementation rounds determines s_i; `Arithmetic` lists it:

- ``float32`` (the references): products and sums in float32 only.
- ``hopper`` (sgl-kernel's pipeline): z, y, the result of each expert and c rounded to bf16. With fp8 weights the
  products have short accumulators, and y is rounded to e4m3 in groups of 128.
- ``blackwell`` (trtllm-gen, fp8 weights): z and y rounded to e4m3 in groups of 128; results rounded to bf16.

V_j hides a scale that is off by one per cent, but the average over all elements does not: see `gain_variance`. In that
average, roundings of c need not cancel, because routing may give many tokens the same c. Their common part is known:
see `rounding_shift`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.quantised import blocks_of, blockwise_product, dequantised, e4m3_variance, float_variance
from flashinfer_trace.harness.compare import Expected, correctly_rounded, unit_roundoff
from flashinfer_trace.harness.family import Inputs

U32 = unit_roundoff(torch.float32)
#: Roundings of a weight c in float32: sigmoid or softmax, the sum of chosen scores, division, factor.
WEIGHT_ROUNDINGS = 16
#: Hopper's tensor cores add fp8 products with 13 bits after the leading bit of the largest, and drop the rest. Each of
#: the 128 products of a block and of its 4 accumulators loses a part of one unit, uniform in [0, 1), with the sign of
#: the term. The unit is at most 2^-13 of the root of the summed squares of the products; together, 132 / 3 units^2.
TRUNCATION_VARIANCE = 132 / 3 * 2.0**-26


@dataclass(frozen=True)
class Arithmetic:
    """One format of activations and weights: its exact products, and what each implementation rounds.

    Attributes:
        models: names of the error models; the first is ``float32``.
        gate_up: (inputs, expert, tokens) -> z [n, 2 * intermediate_size], and the summed squares of the products
            behind each z; float64.
        down: (inputs, expert, y) -> results [n, hidden_size], float64.
        down_weights: (inputs, expert) -> W2 [hidden_size, intermediate_size], float32.
        z_variances: (z, squares) -> variances by model, [models, n, 2 * intermediate_size], on top of float32's.
        y_variances: (y) -> variances by model, [models, n, intermediate_size], on top of float32's.
        rounds_results: for each model, whether the result of each expert is rounded to bf16.
        rounds_weights: for each model, whether c is rounded to bf16.
    """

    models: tuple[str, ...]
    gate_up: Callable[[Inputs, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    down: Callable[[Inputs, int, torch.Tensor], torch.Tensor]
    down_weights: Callable[[Inputs, int], torch.Tensor]
    z_variances: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    y_variances: Callable[[torch.Tensor], torch.Tensor]
    rounds_results: tuple[bool, ...]
    rounds_weights: tuple[bool, ...]


@dataclass
class Share:
    """What one expert adds: tokens, their weights c [n, 1], results o [n, hidden_size], and variances of y by model."""

    expert: int
    token: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    variance: torch.Tensor


# The formats


def fp8_gate_up(inputs: Inputs, expert: int, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Indexed as bytes, because not every version of torch indexes fp8.
    x = inputs["hidden_states"].view(torch.uint8)[token].view(torch.float8_e4m3fn).double()
    x_scales = inputs["hidden_states_scale"].T[token]
    codes, scales = inputs["gemm1_weights"][expert], inputs["gemm1_weights_scale"][expert]
    x_squares = (blocks_of(x) * x_scales.unsqueeze(2)).flatten(1).float().square()
    squares = (x_squares @ dequantised(codes, scales, torch.float32).square_().T).double()
    return blockwise_product(x, x_scales, codes, scales), squares


def fp8_down(inputs: Inputs, expert: int, y: torch.Tensor) -> torch.Tensor:
    return blockwise_product(y, None, inputs["gemm2_weights"][expert], inputs["gemm2_weights_scale"][expert])


def fp8_down_weights(inputs: Inputs, expert: int) -> torch.Tensor:
    return dequantised(inputs["gemm2_weights"][expert], inputs["gemm2_weights_scale"][expert], torch.float32)


def fp8_z_variances(z: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    truncated = squares * TRUNCATION_VARIANCE
    rounded = [truncated + float_variance(z, torch.bfloat16), truncated + e4m3_variance(z)]
    return torch.stack([torch.zeros_like(z), *rounded])


def fp8_y_variances(y: torch.Tensor) -> torch.Tensor:
    requantised = y.square() * TRUNCATION_VARIANCE + e4m3_variance(y)
    return torch.stack([torch.zeros_like(y), requantised + float_variance(y, torch.bfloat16), requantised])


def bf16_gate_up(inputs: Inputs, expert: int, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weights = inputs["hidden_states"][token], inputs["gemm1_weights"][expert]
    squares = x.float().square() @ weights.float().square_().T
    return x.double() @ weights.double().T, squares.double()


def bf16_down(inputs: Inputs, expert: int, y: torch.Tensor) -> torch.Tensor:
    weights: torch.Tensor = inputs["gemm2_weights"][expert].double()
    return y @ weights.T


def bf16_down_weights(inputs: Inputs, expert: int) -> torch.Tensor:
    weights: torch.Tensor = inputs["gemm2_weights"][expert].float()
    return weights


def bf16_variances(values: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.zeros_like(values), float_variance(values, torch.bfloat16)])


FP8_BLOCKS = Arithmetic(
    models=("float32", "hopper", "blackwell"),
    gate_up=fp8_gate_up,
    down=fp8_down,
    down_weights=fp8_down_weights,
    z_variances=fp8_z_variances,
    y_variances=fp8_y_variances,
    rounds_results=(False, True, True),
    rounds_weights=(False, True, False),
)
BF16 = Arithmetic(
    models=("float32", "hopper"),
    gate_up=bf16_gate_up,
    down=bf16_down,
    down_weights=bf16_down_weights,
    z_variances=bf16_variances,
    y_variances=bf16_variances,
    rounds_results=(False, True),
    rounds_weights=(False, True),
)


# The experts


def activation_variances(
    arithmetic: Arithmetic, z: torch.Tensor, squares: torch.Tensor, hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
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
    # float32 in any order: n u times the sum of |products|, which is at most sqrt(n) times the root of summed squares,
    # divided by sqrt(n) because errors are independent. Dequantisation adds 2 roundings.
    summed = squares * ((hidden_size + 2) * U32) ** 2
    second = y.shape[1] + 6  # roundings of gemm2, relative to each term, and of silu
    of_z = summed + arithmetic.z_variances(z, squares)
    of_up, of_gate = (of_z * slope).chunk(2, dim=2)
    return y, of_up + of_gate + y.square() * (second * U32) ** 2 + arithmetic.y_variances(y)


def shares(arithmetic: Arithmetic, definition: Definition, inputs: Inputs, weights: torch.Tensor) -> list[Share]:
    """One entry for each local expert that a token chose."""
    offset = int(inputs["local_expert_offset"])
    found = []
    for expert in range(definition.const_axes["num_local_experts"]):
        token = weights[:, offset + expert].nonzero().flatten()
        if len(token) == 0:
            continue
        z, squares = arithmetic.gate_up(inputs, expert, token)
        y, variance = activation_variances(arithmetic, z, squares, definition.const_axes["hidden_size"])
        weight = weights[token, offset + expert].unsqueeze(1)
        found.append(Share(expert, token, weight, arithmetic.down(inputs, expert, y), variance))
    return found


def result_variances(arithmetic: Arithmetic, share: Share) -> torch.Tensor:
    """Variances by model of c * o, [models, n, hidden_size], from roundings after the sum over y."""
    c2, term2 = share.weight.square(), (share.weight * share.result).square()
    single = term2 * (WEIGHT_ROUNDINGS * U32) ** 2
    result = c2 * float_variance(share.result, torch.bfloat16)
    weight = float_variance(share.weight, torch.bfloat16) * share.result.square()
    pairs = zip(arithmetic.rounds_results, arithmetic.rounds_weights, strict=True)
    return torch.stack([single + of_result * result + of_weight * weight for of_result, of_weight in pairs])


def gain_variance(arithmetic: Arithmetic, inputs: Inputs, value: torch.Tensor, found: list[Share]) -> torch.Tensor:
    """Variance by model [models] of <error, value> / <value, value>, the error of a scale fitted to all elements.

    <error, value> sums, over tokens, experts and i, the error of y_i times c (W2.T value)_i. The rounding of a weight c
    is common to a row and counts as a whole; those of results and outputs count separately.
    """
    total = value.new_zeros(len(arithmetic.models))
    bf16 = torch.bfloat16
    for share in found:
        direction = value[share.token]
        slopes = share.weight * (direction.float() @ arithmetic.down_weights(inputs, share.expert)).double()
        total += (share.variance * slopes.square()).sum(dim=(1, 2))
        along = (share.result * direction).sum(dim=1, keepdim=True).square()
        each = (share.weight * direction).square() * float_variance(share.result, bf16)
        total += each.sum() * total.new_tensor(arithmetic.rounds_results)
        total += (float_variance(share.weight, bf16) * along).sum() * total.new_tensor(arithmetic.rounds_weights)
    total += (value.square() * float_variance(value, bf16)).sum()
    return total / value.square().sum().square().clamp_min(1e-300)


def rounding_shift(value: torch.Tensor, found: list[Share]) -> torch.Tensor:
    """How much rounding weights, results and their weighted sums to bf16 changes the scale fitted to all elements.

    These roundings need not cancel. Many tokens may have the same weight c. And where a token has one local expert, the
    product of c and a result, both of 8 bits, does not fall at random between two numbers of 8 bits: for c = 1 - 2^-8,
    every product is m - m / 256 units, with m from 128 to 255, and rounds down (measured on an H200: 7.5e-4 of the
    scale, all from this effect). Both effects are computed from the exact c and results.
    """
    tail = torch.zeros_like(value)
    for share in found:
        rounded = correctly_rounded(share.weight, torch.bfloat16) * correctly_rounded(share.result, torch.bfloat16)
        tail.index_add_(0, share.token, rounded)
    change = correctly_rounded(tail, torch.bfloat16) - value
    return (change * value).sum() / value.square().sum().clamp_min(1e-300)


def expert_outputs(
    arithmetic: Arithmetic, definition: Definition, inputs: Inputs, weights: torch.Tensor
) -> dict[str, Expected]:
    """float64 output; parts ``<model>_variance`` per element, ``<model>_gain`` (a variance) and ``rounding_shift``.

    Args:
        weights: float64 [seq_len, num_experts]; zero where an expert is not chosen.
    """
    found = shares(arithmetic, definition, inputs, weights)
    value = weights.new_zeros(inputs["hidden_states"].shape)
    variance = value.new_zeros((len(arithmetic.models), *value.shape))
    for share in found:
        value.index_add_(0, share.token, share.weight * share.result)
        squares = arithmetic.down_weights(inputs, share.expert).square_()
        spread = share.weight.square() * (share.variance.float() @ squares.T).double()
        variance.index_add_(1, share.token, spread + result_variances(arithmetic, share))
    gains = gain_variance(arithmetic, inputs, value, found)
    parts = {f"{model}_variance": variance[i] for i, model in enumerate(arithmetic.models)}
    parts |= {f"{model}_gain": gains[i] for i, model in enumerate(arithmetic.models)}
    return {"output": Expected(value, {**parts, "rounding_shift": rounding_shift(value, found)})}
