"""Queries or keys of a gated delta net divided by their length: y = x / sqrt(sum of x^2 + EPS), rounded once."""

import torch

HEAD_SIZE = 128
EPS = 1e-6


def run(x: torch.Tensor) -> torch.Tensor:
    """x [num_rows, head_size], a row for each head of a token -> y, of the shape and dtype of x."""
    assert x.shape[1] == HEAD_SIZE
    values = x.float()
    return (values * torch.rsqrt(values.square().sum(dim=1) + EPS)[:, None]).to(x.dtype)
