"""The dataset in the forms that other evaluators take: a TraceSet of flashinfer-bench, and problems of KernelBench."""

from __future__ import annotations
