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


def dequantise(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Codes [rows, columns] with one scale for each block x block -> float32 [rows, columns]."""
    values = codes.float()
    values.view(scales.shape[0], block, scales.shape[1], block).mul_(scales[:, None, :, None])
    return values


def swiglu_mlp(x: torch.Tensor, gemm1: torch.Tensor, gemm2: torch.Tensor) -> torch.Tensor:
    """(silu(x W_gate') * (x W_up')) W_2' of an expert, in float32; gemm1 stacks W_up on W_gate."""
    up, gate = (x @ gemm1.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ gemm2.T
