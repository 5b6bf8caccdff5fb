"""Probes of sparse attention's top-k and of gated activations: see kernel_findings, which lists them."""

from __future__ import annotations

import torch

KEYS = 16384


def crowded_bin() -> bool:
    """Scores in 1 to 1.2, which have the upper byte of their float16 form in common."""
    import sgl_kernel

    scores = torch.rand(1, KEYS, device="cuda") * 0.2 + 1.0
    lengths = torch.full((1,), KEYS, dtype=torch.int32, device="cuda")
    found = sgl_kernel.fast_topk_v2(scores, lengths, 2048)[0].long()
    smallest = scores[0].topk(2048).values.min()
    within = found[(found >= 0) & (found < KEYS)]
    return len(within) == 2048 and bool((scores[0, within] >= smallest).all())


def half_of_a_vector() -> bool:
    """Rows of 12 + 12 features: the wrapper checks the bytes of both halves together."""
    import sgl_kernel

    x = torch.ones(4, 24, dtype=torch.bfloat16, device="cuda")
    try:
        output = sgl_kernel.gelu_tanh_and_mul(x)
        torch.cuda.synchronize()
    except ValueError:
        return True
    return bool(((output.float() - 0.8412).abs() < 0.01).all())


def strided_rows() -> bool:
    """Every other row of a matrix, whose rows differ."""
    import sgl_kernel

    every = torch.arange(8, device="cuda")[:, None].expand(8, 32).to(torch.bfloat16).contiguous()
    try:
        output = sgl_kernel.gelu_tanh_and_mul(every[::2])
    except (RuntimeError, ValueError):
        return True
    gate, up = every[::2].float().chunk(2, dim=1)
    wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    return bool(torch.allclose(output.float(), wanted, rtol=0.02, atol=0.01))


PROBES = (
    ("fast_topk_v2: more than 4096 scores in one bin", crowded_bin, False),
    ("gelu_tanh_and_mul: rows of half a vector", half_of_a_vector, True),
    ("gelu_tanh_and_mul: strides are ignored", strided_rows, False),
)
