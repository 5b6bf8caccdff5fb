"""Hopper's fp8 tensor core, emulated on a CPU: how it cuts terms off, as measured on the real one."""

from __future__ import annotations

import torch


def truncating_product(a: torch.Tensor, b: torch.Tensor, kept_bits: int = 13, step: int = 32) -> torch.Tensor:
    """a [..., m, k] @ b [..., n, k].mT of codes, float64, in an accumulator of `kept_bits` after the leading one."""
    running = torch.zeros(*a.shape[:-1], b.shape[-2], dtype=torch.float64)
    for start in range(0, a.shape[-1], step):
        rows, columns = a[..., start : start + step].double(), b[..., start : start + step].double()
        terms = rows.unsqueeze(-2) * columns.unsqueeze(-3)
        terms = torch.cat([terms, running.unsqueeze(-1)], dim=-1)
        top = terms.abs().amax(dim=-1, keepdim=True)
        running = cut(terms, top, kept_bits).sum(dim=-1)
        running = cut(running, running.abs(), kept_bits)
    return running


def cut(terms: torch.Tensor, top: torch.Tensor, kept_bits: int) -> torch.Tensor:
    """Terms cut off, toward zero, below `kept_bits` after the leading bit of `top`."""
    unit = torch.exp2((torch.frexp(top).exponent - 1 - kept_bits).double())
    return (terms / unit).trunc() * unit
