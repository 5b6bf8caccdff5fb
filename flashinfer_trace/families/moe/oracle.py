"""Routing and the expert MLPs in float64, and the error models of the kernels that compute them.

Routing counts ranks and does not sort. The softmax is 1 / sum over j of exp(l_j - l_i), over all experts or over the
chosen ones.

Error models. With z = gemm1's output, y = silu(gate) * up and weights c of the chosen experts, an error of y_i with
variance s_i^2 reaches output j as c W2_ji times itself. The errors of different i are independent and of zero mean, so
the output's error has variance V_j = sum over experts of c^2 sum_i (W2_ji s_i)^2. It exceeds L sqrt(V_j) with a
probability of at most 2 exp(-L^2 / 2). The roundings of each implementation determine s_i; `Arithmetic` lists them:

- ``float32`` (the references): products and sums in float32 only.
- ``hopper`` (sgl-kernel's pipeline): z, y, the result of each expert and c rounded to bf16. With fp8 weights the
  products have short accumulators, and y is rounded to e4m3 in groups of 128.
- ``blackwell`` (trtllm-gen, fp8 weights): z and y rounded to e4m3 in groups of 128; results rounded to bf16.

V_j hides a scale that is off by one per cent, but the average over all elements does not: see `gain_variance`. In that
average, roundings of c need not cancel, because routing may give many tokens the same c. Their common part is known:
see `rounding_shift`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flashinfer_trace.families.quantized import (
    BLOCK,
    blocks_of,
    blockwise_product,
    chosen_by_rank,
    dequantized,
    e4m3_variance,
    float_variance,
    ranks,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.verdict.compare import Expected, correctly_rounded, unit_roundoff

U32 = unit_roundoff(torch.float32)
#: Roundings of a weight c in float32: sigmoid or softmax, the sum of chosen scores, division, factor.
WEIGHT_ROUNDINGS = 16
#: Hopper's tensor cores add fp8 products with 13 bits after the leading bit of the largest, and drop the rest. Each of
#: the 128 products of a block and of its 4 accumulators loses a part of one unit, uniform in [0, 1), with the sign of
#: the term. The unit is at most 2^-13 of the root of the summed squares of the products; together, 132 / 3 units^2.
TRUNCATION_VARIANCE = 132 / 3 * 2.0**-26
#: Elements of the largest temporary of experts that are computed together, by kind of device: a GPU takes as long to be
#: told what to do as to do it with a few million numbers, a CPU does best with what fits its cache.
BATCH_ELEMENTS = {"cpu": 2**16, "cuda": 2**29}


@dataclass(frozen=True)
class Arithmetic:
    """One format of activations and weights: its exact products, and the roundings of each implementation.

    Attributes:
        models: names of the error models; the first is ``float32``.
        gate_up: (inputs, experts [e], tokens [e, n]) -> z [e, n, 2 * intermediate_size], and the summed squares of the
            products in each z; float64.
        down: (inputs, experts, y) -> results [e, n, hidden_size], float64.
        down_weights: (inputs, experts) -> W2 [e, hidden_size, intermediate_size], float32.
        z_variances: (z, squares) -> variances by model, [models, e, n, 2 * intermediate_size], on top of float32's.
        y_variances: (y) -> variances by model, [models, e, n, intermediate_size], on top of float32's.
        rounds_results: for each model, whether the result of each expert is rounded to bf16.
        rounds_weights: for each model, whether c is rounded to bf16.
    """

    models: tuple[str, ...]
    gate_up: Callable[[Inputs, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    down: Callable[[Inputs, torch.Tensor, torch.Tensor], torch.Tensor]
    down_weights: Callable[[Inputs, torch.Tensor], torch.Tensor]
    z_variances: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    y_variances: Callable[[torch.Tensor], torch.Tensor]
    rounds_results: tuple[bool, ...]
    rounds_weights: tuple[bool, ...]


@dataclass
class Share:
    """The terms that some experts add, padded to the largest number of tokens of one of them.

    Attributes:
        experts: their numbers [e].
        token: the tokens of each [e, n]; the number of all tokens where it is padding.
        weight: c, float64 [e, n, 1]; 0 for padding.
        result: o [e, n, hidden_size].
        variance: of y by model, [models, e, n, intermediate_size].
    """

    experts: torch.Tensor
    token: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    variance: torch.Tensor


# The formats


def chosen(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """tensor[index]. fp8 is indexed as bytes, because not every version of torch indexes it."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)[index].view(tensor.dtype)
    return tensor[index]


def fp8_weights(inputs: Inputs, name: str, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return chosen(inputs[f"{name}_weights"], experts), inputs[f"{name}_weights_scale"][experts]


def fp8_gate_up(inputs: Inputs, experts: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_scales = chosen(inputs["hidden_states"], token).double(), inputs["hidden_states_scale"].T[token]
    codes, scales = fp8_weights(inputs, "gemm1", experts)
    x_squares = (blocks_of(x) * x_scales.unsqueeze(-1)).flatten(-2).float().square()
    squares = (x_squares @ dequantized(codes, scales, torch.float32).square_().mT).double()
    return blockwise_product(x, x_scales, codes, scales), squares


def fp8_z_variances(z: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    truncated = squares * TRUNCATION_VARIANCE
    return torch.stack(
        [torch.zeros_like(z), truncated + float_variance(z, torch.bfloat16), truncated + e4m3_variance(z)]
    )


def fp8_y_variances(y: torch.Tensor) -> torch.Tensor:
    requantized = y.square() * TRUNCATION_VARIANCE + e4m3_variance(y)
    return torch.stack([torch.zeros_like(y), requantized + float_variance(y, torch.bfloat16), requantized])


def bf16_gate_up(inputs: Inputs, experts: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weights = inputs["hidden_states"][token], inputs["gemm1_weights"][experts]
    squares = x.float().square() @ weights.float().square_().mT
    return x.double() @ weights.double().mT, squares.double()


def bf16_variances(values: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.zeros_like(values), float_variance(values, torch.bfloat16)])


FP8_BLOCKS = Arithmetic(
    models=("float32", "hopper", "blackwell"),
    gate_up=fp8_gate_up,
    down=lambda inputs, experts, y: blockwise_product(y, None, *fp8_weights(inputs, "gemm2", experts)),
    down_weights=lambda inputs, experts: dequantized(*fp8_weights(inputs, "gemm2", experts), torch.float32),
    z_variances=fp8_z_variances,
    y_variances=fp8_y_variances,
    rounds_results=(False, True, True),
    rounds_weights=(False, True, False),
)
BF16 = Arithmetic(
    models=("float32", "hopper"),
    gate_up=bf16_gate_up,
    down=lambda inputs, experts, y: y @ inputs["gemm2_weights"][experts].double().mT,
    down_weights=lambda inputs, experts: inputs["gemm2_weights"][experts].float(),
    z_variances=bf16_variances,
    y_variances=bf16_variances,
    rounds_results=(False, True),
    rounds_weights=(False, True),
)


# The experts


def activation_variances(
    arithmetic: Arithmetic, z: torch.Tensor, squares: torch.Tensor, hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [e, n, intermediate_size] and its variances by model [models, e, n, intermediate_size].

    Args:
        z: gemm1's output, float64 [e, n, 2 * intermediate_size], up then gate.
        squares: sum of the squared products in each z.
    """
    up, gate = z.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    y = silu * up
    slope = torch.cat([silu, up * sigmoid * (1 + gate * (1 - sigmoid))], dim=-1).square()
    # float32 in any order: n u times the sum of |products|, which is at most sqrt(n) times the root of summed squares,
    # divided by sqrt(n) because errors are independent. Dequantization adds 2 roundings.
    summed = squares * ((hidden_size + 2) * U32) ** 2
    second = y.shape[-1] + 6  # roundings of gemm2, relative to each term, and of silu
    of_z = summed + arithmetic.z_variances(z, squares)
    of_up, of_gate = (of_z * slope).chunk(2, dim=-1)
    return y, of_up + of_gate + y.square() * (second * U32) ** 2 + arithmetic.y_variances(y)


def shares(arithmetic: Arithmetic, definition: Definition, inputs: Inputs, weights: torch.Tensor) -> list[Share]:
    """All local experts that got a token, those with about as many together."""
    axes, device = definition.const_axes, weights.device
    count, first = len(weights), int(inputs["local_expert_offset"])
    local = weights[:, first : first + axes["num_local_experts"]]
    pairs = (local.T != 0).nonzero()
    expert_of, token_of = pairs.T.tolist()
    tokens: dict[int, list[int]] = {}
    for expert, token in zip(expert_of, token_of, strict=True):
        tokens.setdefault(expert, []).append(token)
    found = []
    for group in grouped(tokens, definition, device):
        longest = len(tokens[group[0]])
        rows = [tokens[expert] + [count] * (longest - len(tokens[expert])) for expert in group]
        numbers = torch.tensor([[expert, *row] for expert, row in zip(group, rows, strict=True)]).to(device)
        experts, token = numbers[:, 0], numbers[:, 1:]
        real = token.clamp_max(count - 1)
        weight = torch.where(token < count, local[real, experts.unsqueeze(1)], 0.0).unsqueeze(2)
        z, squares = arithmetic.gate_up(inputs, experts, real)
        y, variance = activation_variances(arithmetic, z, squares, axes["hidden_size"])
        found.append(Share(experts, token, weight, arithmetic.down(inputs, experts, y), variance))
    return found


def grouped(tokens: Mapping[int, Sequence[int]], definition: Definition, device: torch.device) -> Iterator[list[int]]:
    """Experts by descending number of tokens, as many together as BATCH_ELEMENTS allows."""
    axes = definition.const_axes
    features = 2 * axes["intermediate_size"]
    blocks = axes["hidden_size"] // BLOCK + 1
    group: list[int] = []
    for expert in sorted(tokens, key=lambda expert: len(tokens[expert]), reverse=True):
        longest = len(tokens[(*group, expert)[0]])
        elements = (len(group) + 1) * features * (axes["hidden_size"] + longest * blocks)
        if group and elements > BATCH_ELEMENTS[device.type]:
            yield group
            group = []
        group.append(expert)
    if group:
        yield group


def result_variances(arithmetic: Arithmetic, share: Share) -> torch.Tensor:
    """Variances by model of c * o, [models, e, n, hidden_size], from roundings after the sum over y."""
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

    Args:
        value: the expected result, and one more row of zeros, for padding.
    """
    total = value.new_zeros(len(arithmetic.models))
    rounds_results = value.new_tensor(arithmetic.rounds_results)
    rounds_weights = value.new_tensor(arithmetic.rounds_weights)
    bf16 = torch.bfloat16
    for share in found:
        direction = value[share.token]
        slopes = share.weight * (direction.float() @ arithmetic.down_weights(inputs, share.experts)).double()
        total += (share.variance * slopes.square()).sum(dim=(1, 2, 3))
        along = (share.result * direction).sum(dim=2, keepdim=True).square()
        each = (share.weight * direction).square() * float_variance(share.result, bf16)
        total += each.sum() * rounds_results
        total += (float_variance(share.weight, bf16) * along).sum() * rounds_weights
    total += (value[:-1].square() * float_variance(value[:-1], bf16)).sum()
    return total / value.square().sum().square().clamp_min(1e-300)


def rounding_shift(value: torch.Tensor, found: list[Share]) -> torch.Tensor:
    """How much rounding weights, results and their weighted sums to bf16 changes the scale fitted to all elements.
    These need not cancel: tokens may share a weight c, and where a token has one local expert, c times a result of 8
    bits does not fall at random: for c = 1 - 2^-8 every product rounds down (measured on an H200: 7.5e-4 of the
    scale)."""
    tail = torch.zeros_like(value)
    for share in found:
        rounded = correctly_rounded(share.weight, torch.bfloat16) * correctly_rounded(share.result, torch.bfloat16)
        tail.index_add_(0, share.token.flatten(), rounded.flatten(0, 1))
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
    count, hidden_size = len(inputs["hidden_states"]), definition.const_axes["hidden_size"]
    models = len(arithmetic.models)
    # The last row takes the results for padding.
    value = weights.new_zeros(count + 1, hidden_size)
    variance = weights.new_zeros(models, count + 1, hidden_size)
    for share in found:
        token = share.token.flatten()
        value.index_add_(0, token, (share.weight * share.result).flatten(0, 1))
        squares = arithmetic.down_weights(inputs, share.experts).square_()
        # The models of an expert side by side: its weights are multiplied once.
        of_y = share.variance.float().transpose(0, 1).flatten(1, 2) @ squares.mT
        spread = of_y.double().view(len(token) // share.token.shape[1], models, -1, hidden_size).transpose(0, 1)
        spread = share.weight.square() * spread + result_variances(arithmetic, share)
        variance.index_add_(1, token, spread.flatten(1, 2))
    value[count] = 0.0
    gains = gain_variance(arithmetic, inputs, value, found)
    parts = {f"{model}_variance": variance[i, :count] for i, model in enumerate(arithmetic.models)}
    parts |= {f"{model}_gain": gains[i] for i, model in enumerate(arithmetic.models)}
    return {"output": Expected(value[:count], {**parts, "rounding_shift": rounding_shift(value, found)})}


def in_groups(scores: torch.Tensor, groups: int) -> torch.Tensor:
    return scores.view(scores.shape[0], groups, scores.shape[1] // groups)


def grouped_choice(definition: Definition, choice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """s + bias [rows, experts] with -inf in groups that are dropped, and the scores of the groups [rows, groups]."""
    axes = definition.const_axes
    groups = in_groups(choice, axes.get("n_group", 1))
    if "n_group" not in axes:
        return choice, choice.new_zeros(len(choice), 1)
    scores = torch.where(chosen_by_rank(groups, 2), groups, 0.0).sum(dim=2)
    kept = chosen_by_rank(scores, axes["topk_group"]).unsqueeze(2)
    return torch.where(kept, groups, -torch.inf).flatten(1), scores


def route(definition: Definition, inputs: Inputs) -> torch.Tensor:
    """DeepSeek routing: weights [seq_len, num_experts] in float64, zero where an expert is not chosen."""
    scores = torch.sigmoid(inputs["routing_logits"].double())
    candidates, _ = grouped_choice(definition, scores + inputs["routing_bias"].double())
    chosen = torch.where(chosen_by_rank(candidates, definition.const_axes["top_k"]), scores, 0.0)
    return chosen / chosen.sum(dim=1, keepdim=True) * float(inputs["routed_scaling_factor"])


def softmax_route(definition: Definition, inputs: Inputs) -> torch.Tensor:
    """Softmax routing: weights [seq_len, num_experts] in float64, zero where an expert is not chosen."""
    logits = inputs["routing_logits"].double()
    chosen = chosen_by_rank(logits, definition.const_axes["top_k"])
    counted = torch.where(chosen, logits, -torch.inf) if inputs["norm_topk_prob"] else logits
    return chosen / torch.exp(counted.unsqueeze(1) - logits.unsqueeze(2)).sum(dim=2)


def experts_oracle(
    arithmetic: Arithmetic, routed: Callable[[Definition, Inputs], torch.Tensor], definition: Definition, inputs: Inputs
) -> dict[str, Expected]:
    return expert_outputs(arithmetic, definition, inputs, routed(definition, inputs))


def ranked(scores: torch.Tensor, count: int) -> torch.Tensor:
    order = torch.empty_like(scores, dtype=torch.int64)
    index = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return order.scatter_(1, ranks(scores), index)[:, :count]


def topk_softmax_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The router alone; ``distance`` is how far a chosen logit is below the best, ``experts`` their number."""
    logits = inputs["routing_logits"].double()
    ids = ranked(logits, definition.const_axes["top_k"])
    weights = softmax_route(definition, inputs).gather(1, ids)
    distance = (logits.gather(1, ids[:, :1]) - logits.gather(1, ids)).abs()
    experts = torch.tensor(float(logits.shape[1]), dtype=torch.float64, device=logits.device)
    return {"topk_weights": Expected(weights, {"distance": distance, "experts": experts}), "topk_ids": Expected(ids)}
