"""Fixtures of the tests of families."""

from __future__ import annotations

import sys

import emulated_moe
import emulated_sgl_kernel
import pytest
import torch


@pytest.fixture
def sgl_kernel(monkeypatch):
    """sgl_kernel, SGLang's routers and torch's grouped_mm, emulated on a CPU."""
    for name, module in emulated_moe.gates().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "sgl_kernel", emulated_sgl_kernel)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", emulated_sgl_kernel.grouped_mm, raising=False)
    monkeypatch.setattr("flashinfer_trace.families.moe.kernels.WORKSPACE_BYTES", 16)
    return emulated_sgl_kernel
