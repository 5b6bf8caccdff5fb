"""Mixtures of experts: DeepSeek routing, and softmax routing alone or with experts.

`inputs` makes the inputs that they share. `experts` and `oracle` compute the expected outputs and how far kernels may
be off. `pipeline` computes the experts with sgl-kernel. Each routing has a module with its kernels.
"""

from __future__ import annotations

from flashinfer_trace.families.moe.deepseek import FAMILIES as DEEPSEEK
from flashinfer_trace.families.moe.softmax import FAMILIES as SOFTMAX

FAMILIES = (*DEEPSEEK, *SOFTMAX)
