"""flashinfer-bench's evaluators without a GPU, and a clone of its repository if there is one."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from bench_support import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    pytest.importorskip("flashinfer_bench", reason="pip install --no-deps flashinfer-bench==0.1.2")
    pytest.importorskip("safetensors.torch", reason="flashinfer-bench reads inputs from safetensors files")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    from flashinfer_bench.bench.evaluators import sampling

    draws = sampling._sample_token_distributions
    # It asks for 500,000 draws, which take half a minute; 20,000 tell our wrong samplers from right ones as well.
    few = functools.partial(lambda *given, num_trials, count: draws(*given, num_trials=count), count=20_000)
    monkeypatch.setattr(sampling, "_sample_token_distributions", few)
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def clone() -> Path:
    """A clone of flashinfer-bench's repository with the commit of the table; its code is in no file of ours."""
    found = os.environ.get("FLASHINFER_BENCH_CLONE")
    if not found:
        pytest.skip("FLASHINFER_BENCH_CLONE does not name a clone of flashinfer-bench's repository")
    return Path(found)
