"""The recorded runs and the committed static trace agree."""

from __future__ import annotations

import pytest

from flashinfer_trace import find_root
from tools.runtime_tracing.compare import Comparison, compare
from tools.runtime_tracing.recording import read_all
from tools.runtime_tracing.static import read_static

#: The part of the chains that ran which the static trace must have. Every kernel and call line must be there.
CHAINS = 0.98


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    root = find_root()
    static = read_static(root / "traces" / "kernel_traces.json")
    found = [compare(run, static) for run in read_all(root / "traces" / "runtime")]
    related = [one for one in found if not one.unrelated]
    if not related:
        pytest.skip(f"no run can be compared with the committed static trace: {found[0].unrelated}")
    return related


def test_every_kernel_and_call_line_that_ran_is_in_the_static_trace(comparisons: list[Comparison]):
    for one in comparisons:
        assert not one.kernels.missing, one.run
        assert not one.lines.missing, one.run


def test_nearly_every_chain_that_ran_is_in_the_static_trace(comparisons: list[Comparison]):
    found = {text for one in comparisons for text in one.chains.found}
    missing = {text for one in comparisons for text in one.chains.missing}
    assert len(found) >= CHAINS * len(found | missing), sorted(missing)
