"""The kernels that a machine with a GPU can run."""

from __future__ import annotations

import pytest

from flashinfer_trace.harness.family import Kernel


def skip_unusable(kernel: Kernel, capability: tuple[int, int], require_gpu: bool) -> None:
    """Skips what this machine cannot run, with the reason; --require-gpu asks for libraries that are not optional."""
    missing = kernel.missing()
    reason = kernel.unavailable(capability) or missing
    if reason is None:
        return
    if reason == missing and require_gpu and kernel.known.skipped() is None:
        pytest.fail(f"--require-gpu: {kernel.label} {missing}")
    pytest.skip(f"{kernel.label}: {reason}")
