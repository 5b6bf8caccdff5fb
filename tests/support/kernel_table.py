"""Another table of kernels for one family, as a test makes it up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashinfer_trace import kernels
from flashinfer_trace.kernels.table import KernelFacts

Change = Callable[[list[KernelFacts]], list[KernelFacts]]


def change_kernels(monkeypatch: pytest.MonkeyPatch, family: str, change: Change) -> None:
    """Has the table say otherwise of a family, until the test ends."""
    changed = {one.label: one for one in change(list(kernels.in_table(family).values()))}
    by_family = {**kernels._by_family(), family: changed}
    monkeypatch.setattr(kernels, "_by_family", lambda: by_family)
