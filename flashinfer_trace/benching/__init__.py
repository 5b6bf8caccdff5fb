"""Times kernels on workloads: a submission, and the real kernels of its family, side by side.

Each workload gives fresh inputs again and again. Every kernel gets each of them, in a process of its own, for a series
of calls, and every output of a timed call is judged by the bounds of verification. docs/benchmarking.md says how, and
what can be believed.
"""

from __future__ import annotations

from flashinfer_trace.benching.campaign import Campaign, campaign
from flashinfer_trace.benching.measure import bench
from flashinfer_trace.benching.report import Report
from flashinfer_trace.benching.statistics import Policy

__all__ = ["Campaign", "Policy", "Report", "bench", "campaign"]
