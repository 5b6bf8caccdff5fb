"""The stacks of releases that the dataset speaks of: today's, which *verified* means, and the one before.

If today's releases dropped a kernel, its evidence is of the last release that has it. `python -m tools.follow`
compares stacks; pyproject's extra ``gpu`` and constraints-gpu.txt install today's. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Distribution -> version.
Versions = Mapping[str, str]
#: The releases that people run, and that evidence is recorded with.
TODAY: Versions = {
    "sglang": "0.5.23",
    "flashinfer-python": "0.7.2",
    "sglang-kernel": "0.4.10",
    "sgl-deep-gemm": "0.2.3.post2",
    "sgl-flash-mla": "1.0.0",
    "flash-attn-4": "4.0.0b18",
    "triton": "3.8.0",
    "torch": "2.14.1",
}
#: The releases that the table of kernels described before: the places of moved and of dropped kernels name it.
BEFORE: Versions = {"sglang": "0.5.11", "flashinfer-python": "0.6.12", "sglang-kernel": "0.4.2"}
