"""Functions that the moe references share."""

import torch


def softmax_route(routing_logits: torch.Tensor, top_k: int, norm_topk_prob: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts [seq_len, top_k] with the largest logits, best first, and their softmax weights in float64.

    The softmax is over all experts; norm_topk_prob divides the chosen weights by their sum.
    """
    # A stable sort puts the lower index first among equal values; topk does not specify an order.
    experts = routing_logits.float().argsort(dim=1, descending=True, stable=True)[:, :top_k]
    weights = torch.softmax(routing_logits.double(), dim=1).gather(1, experts)
    if norm_topk_prob:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return experts, weights


def dequantize(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Codes [rows, columns] with one scale for each block x block -> float32 [rows, columns]."""
    values = codes.float()
    values.view(scales.shape[0], block, scales.shape[1], block).mul_(scales[:, None, :, None])
    return values


def swiglu_mlp(x: torch.Tensor, gemm1: torch.Tensor, gemm2: torch.Tensor) -> torch.Tensor:
    """(silu(x W_gate') * (x W_up')) W_2' of an expert, in float32; gemm1 stacks W_up on W_gate."""
    up, gate = (x @ gemm1.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ gemm2.T


def deepseek_route(
    routing_logits: torch.Tensor, routing_bias: torch.Tensor, n_group: int, topk_group: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [seq_len, top_k] that DeepSeek-V3's router chooses, best first, and their scores in float64.

    The scores are s = sigmoid(logits). The best topk_group of n_group groups, by the sum of their two largest s + bias,
    are kept; among their experts, the top_k with the largest s + bias are chosen.
    """
    scores = torch.sigmoid(routing_logits.double())
    rows, experts = scores.shape
    groups = (scores + routing_bias).view(rows, n_group, experts // n_group)
    group_scores = groups.topk(2).values.sum(dim=2)
    # A stable sort puts the lower index first among equal values; topk does not specify an order.
    kept = group_scores.argsort(descending=True, stable=True)[:, :topk_group]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
    candidates = groups.masked_fill(dropped.unsqueeze(2), -torch.inf).flatten(1)
    chosen = candidates.argsort(descending=True, stable=True)[:, :top_k]
    return chosen, scores.gather(1, chosen)


def quantized_groups(values: torch.Tensor, block: int) -> torch.Tensor:
    """[..., k] in groups of `block`, rounded to e4m3 with the scale max(|x|, 1e-10) / 448 of each group, in float32."""
    groups = values.float().unflatten(-1, (values.shape[-1] // block, block))
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / 448.0
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def dequantize_fp4(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Bytes int8 [rows, k / 2] of two e2m1 codes each, and e4m3 scales [rows, k / block] -> float32 [rows, k].

    The low four bits are the code of the even feature. Three bits of a code choose the magnitude, the highest the sign.
    """
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    byte = codes.int() & 255
    pair = torch.stack([byte & 15, byte >> 4], dim=2)
    values = levels[pair & 7] * (1 - (pair >> 3) * 2)
    return (values.view(-1, scales.shape[1], block) * scales.float().unsqueeze(2)).flatten(1)


def tokens_of_experts(experts: torch.Tensor, num_experts: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert below num_experts that was chosen, with the tokens [n] and the places [n] of experts [tokens, top_k].

    Choices below 0 are of experts on other ranks. The choices are sorted, because asking for each expert which tokens
    chose it would wait for a GPU as many times.
    """
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    bounds = torch.arange(num_experts + 1, device=experts.device)
    ends = torch.searchsorted(experts.flatten()[order].long(), bounds).tolist()
    found = []
    for expert in range(num_experts):
        chosen = order[ends[expert] : ends[expert + 1]]
        if len(chosen) > 0:
            found.append((expert, chosen // top_k, chosen % top_k))
    return found


def rows_of_experts(expert_counts: torch.Tensor) -> list[tuple[int, int, int]]:
    """Of rows that are sorted by expert: each expert with rows, its first row, and the end of its rows."""
    found, first = [], 0
    for expert, count in enumerate(expert_counts.tolist()):
        if count:
            found.append((expert, first, first + count))
        first += count
    return found


def sorted_products(rows: torch.Tensor, weights: torch.Tensor, expert_counts: torch.Tensor) -> torch.Tensor:
    """rows [num_rows, k], sorted by expert, times the weights [num_experts, k, n] of their experts, in float32.

    One expert at a time, and only those that have rows: all of them in float32 would take up to 8 GB.
    """
    output = torch.zeros(rows.shape[0], weights.shape[2], device=rows.device)
    for expert, first, end in rows_of_experts(expert_counts):
        output[first:end] = rows[first:end].float() @ weights[expert].float()
    return output


def sorted_mxfp4_products(
    rows: torch.Tensor, weights: torch.Tensor, weights_scale: torch.Tensor, expert_counts: torch.Tensor, block: int
) -> torch.Tensor:
    """As `sorted_products`, with weights [num_experts, n, k / 2] of two e2m1 codes a byte, and their e8m0 scales.

    A scale's byte b means 2^(b - 127): for `block` features, weights_scale [num_experts, n, k / block].
    """
    output = torch.zeros(rows.shape[0], weights.shape[1], device=rows.device)
    for expert, first, end in rows_of_experts(expert_counts):
        scales = torch.exp2((weights_scale[expert].int() & 255) - 127)
        output[first:end] = rows[first:end].float() @ dequantize_fp4(weights[expert], scales, block).T
    return output
