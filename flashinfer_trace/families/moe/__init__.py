"""Mixtures of experts: routers, experts, and the steps around them."""

from __future__ import annotations

from flashinfer_trace.families.moe.deepseek import FP8_FAMILIES as DEEPSEEK
from flashinfer_trace.families.moe.softmax import UNSORTED as SOFTMAX

FAMILIES = (*DEEPSEEK, *SOFTMAX)
