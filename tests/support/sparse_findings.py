"""Probes of sparse attention's top-k and of gated activations: see kernel_findings, which lists them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

KEYS, TOP_K = 16384, 2048
#: sgl-kernel's gated activations -> what each does to the gate.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh_and_mul": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu_and_mul": torch.nn.functional.silu,
    "gelu_and_mul": torch.nn.functional.gelu,
}


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def positions(scores: torch.Tensor) -> torch.Tensor:
    import sgl_kernel

    return sgl_kernel.fast_topk_v2(scores, numbers(KEYS), TOP_K)


def slots(scores: torch.Tensor, row_starts: torch.Tensor | None) -> torch.Tensor:
    """Slots of a page table that has key i in slot i. Without row_starts, the kernel of decoding runs."""
    import sgl_kernel

    table = torch.arange(KEYS, dtype=torch.int32, device="cuda")[None]
    return sgl_kernel.fast_topk_transform_fused(scores, numbers(KEYS), table, numbers(0, 1), TOP_K, row_starts)


def rows(scores: torch.Tensor) -> torch.Tensor:
    """Rows of ragged keys that begin at 0."""
    import sgl_kernel

    return sgl_kernel.fast_topk_transform_ragged_fused(scores, numbers(KEYS), numbers(0), TOP_K, numbers(0))


def crowded_bin(choose: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Scores in 1 to 1.2, which have the upper byte of their float16 form in common."""
    scores = torch.rand(1, KEYS, device="cuda") * 0.2 + 1.0
    found = choose(scores)[0].long()
    smallest = scores[0].topk(TOP_K).values.min()
    within = found[(found >= 0) & (found < KEYS)].unique()
    return len(within) == TOP_K and bool((scores[0, within] >= smallest).all())


def half_of_a_vector(name: str) -> bool:
    """Rows of 12 + 12 features: the wrapper checks the bytes of both halves together."""
    import sgl_kernel

    x = torch.ones(4, 24, dtype=torch.bfloat16, device="cuda")
    try:
        output = getattr(sgl_kernel, name)(x)
        torch.cuda.synchronize()
    except ValueError:
        return True
    return bool(((output.float() - ACTIVATIONS[name](torch.ones(1, device="cuda"))).abs() < 0.01).all())


def strided_rows(name: str) -> bool:
    """Every other row of a matrix, whose rows differ."""
    import sgl_kernel

    every = torch.arange(8, device="cuda")[:, None].expand(8, 32).to(torch.bfloat16).contiguous()
    try:
        output = getattr(sgl_kernel, name)(every[::2])
    except (RuntimeError, ValueError):
        return True
    gate, up = every[::2].float().chunk(2, dim=1)
    return bool(torch.allclose(output.float(), ACTIVATIONS[name](gate) * up, rtol=0.02, atol=0.01))


#: Name, probe, and whether it may end the process.
PROBES: tuple[tuple[str, Callable[[], bool], bool], ...] = (
    ("fast_topk_v2: more than 4096 scores in one bin", lambda: crowded_bin(positions), False),
    ("gelu_tanh_and_mul: rows of half a vector", lambda: half_of_a_vector("gelu_tanh_and_mul"), True),
    ("gelu_tanh_and_mul: strides are ignored", lambda: strided_rows("gelu_tanh_and_mul"), False),
    (
        "fast_topk_transform_fused: more than 4096 scores in one bin",
        lambda: crowded_bin(lambda scores: slots(scores, numbers(0))),
        False,
    ),
    (
        "fast_topk_transform_fused without row_starts: more than 4096 scores in one bin",
        lambda: crowded_bin(lambda scores: slots(scores, None)),
        False,
    ),
    ("fast_topk_transform_ragged_fused: more than 4096 scores in one bin", lambda: crowded_bin(rows), False),
    ("silu_and_mul: rows of half a vector", lambda: half_of_a_vector("silu_and_mul"), True),
    ("gelu_and_mul: rows of half a vector", lambda: half_of_a_vector("gelu_and_mul"), True),
    ("silu_and_mul: strides are ignored", lambda: strided_rows("silu_and_mul"), False),
    ("gelu_and_mul: strides are ignored", lambda: strided_rows("gelu_and_mul"), False),
)
