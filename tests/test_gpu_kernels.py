"""`pytest -m gpu`: every embedded run() against every real kernel of its family, over drawn shapes."""

from __future__ import annotations

import pytest

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.evidence import record
from flashinfer_trace.harness.verify import Job, verify

PAIRS = [
    pytest.param(definition, kernel, id=f"{definition.name}-{kernel.label}")
    for definition in flashinfer_trace.definitions()
    for kernel in family_of(definition).kernels_of(definition)
]


@pytest.fixture(scope="session")
def poisoned() -> list[str]:
    """The kernel that left the CUDA context unusable, once one has: everything after it would fail for its sake."""
    return []


@pytest.mark.gpu
@pytest.mark.parametrize(("definition", "kernel"), PAIRS)
def test_reference_and_kernel_meet_their_bounds(definition, kernel, cuda_device, examples, poisoned, request):
    import torch

    if poisoned:
        pytest.fail(f"not run: the CUDA context is unusable since {poisoned[0]}")
    reason = kernel.unavailable(torch.cuda.get_device_capability(cuda_device))
    if reason:
        pytest.skip(f"{kernel.label}: {reason}")
    seed = request.config.getoption("--seed")
    job = Job(definition, family_of(definition), kernel, cuda_device)
    report = verify(job, examples=examples, seed=seed)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        poisoned.append(request.node.name)
    assert report.status == "passed", report.message
    assert report.cases >= examples
    directory = request.config.getoption("--record-evidence")
    if directory:
        record(directory, definition, kernel, report)


def test_every_definition_has_a_real_kernel():
    without = [d.name for d in flashinfer_trace.definitions() if not family_of(d).kernels_of(d)]
    assert not without, f"no kernel in the family records computes {without}"
