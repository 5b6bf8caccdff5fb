"""How precisely torch multiplies matrices on a GPU, whatever the process was set to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_sums() -> Iterator[None]:
    """Products of float16 matrices are summed in float32: by default, cuBLAS may add parts in float16."""
    options = torch.backends.cuda.matmul
    before = options.allow_fp16_reduced_precision_reduction, options.allow_fp16_accumulation
    options.allow_fp16_reduced_precision_reduction = options.allow_fp16_accumulation = False
    try:
        yield
    finally:
        options.allow_fp16_reduced_precision_reduction, options.allow_fp16_accumulation = before


@contextmanager
def full_precision_products() -> Iterator[None]:
    """As `float32_sums`, and products of float32 matrices in float32, never TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with float32_sums():
            yield
    finally:
        torch.set_float32_matmul_precision(before)
