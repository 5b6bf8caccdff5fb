"""Times kernels on workloads: a submission, and the real kernels of its family, side by side.

Each workload gives fresh inputs again and again. Every kernel gets each of them, in a process of its own, for a series
of calls, and every output of a timed call is judged by the bounds of verification. docs/benchmarking.md says how, and
what can be believed.
"""

from __future__ import annotations

from flashinfer_trace.judging.bench.measure import bench
from flashinfer_trace.judging.bench.report import Benchmarks, Report, bench_all
from flashinfer_trace.judging.bench.statistics import Policy

__all__ = ["Benchmarks", "Policy", "Report", "bench", "bench_all"]
