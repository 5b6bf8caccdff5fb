"""Mixtures of experts: DeepSeek routing, and softmax routing alone or with experts.

`inputs` makes what all of them take, `experts` and `oracle` say what they must give and how far kernels may be off,
`pipeline` is sgl-kernel's way through the experts; the kernels that each routing calls stand beside it.
"""

from __future__ import annotations

from flashinfer_trace.families.moe.deepseek import FAMILIES as DEEPSEEK
from flashinfer_trace.families.moe.softmax import FAMILIES as SOFTMAX

__all__ = ["FAMILIES"]

FAMILIES = (*DEEPSEEK, *SOFTMAX)
