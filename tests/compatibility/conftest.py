"""flashinfer-bench's evaluators without a GPU, and its Definitions, from a clone of its repository or a release."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import Bench

import flashinfer_trace
from flashinfer_trace.dataset.flashinfer_bench import load_compatibility
from tools.compatibility import published
from tools.compatibility.__main__ import FOLDER, git

ROOT = flashinfer_trace.find_root()


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


@pytest.fixture(scope="session")
def release() -> Path:
    """The Definitions of flashinfer-bench's release; CI fetches them first."""
    directory = ROOT / published.DEFAULT
    if not directory.is_dir():
        reason = f"no {published.DEFAULT}; `python -m tools.compatibility.published` fetches it"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    return directory


@pytest.fixture(scope="session")
def theirs(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Any]]:
    """Reads a Definition of theirs by its name: from the clone at the commit of the table, else from the release."""
    known = load_compatibility(ROOT)
    assert known is not None
    clone = os.environ.get("FLASHINFER_BENCH_CLONE")
    directory = None if clone else request.getfixturevalue("release")

    def read(name: str) -> dict[str, Any]:
        path = f"{FOLDER}/{known.definitions[name]['op_type']}/{name}.json"
        if clone:
            loaded: dict[str, Any] = json.loads(git(Path(clone), "show", f"{known.source['commit']}:{path}"))
            return loaded
        file = directory / f"{name}.json"
        if not file.is_file():
            pytest.skip(f"{published.DISTRIBUTION} {published.VERSION} has no {name}; FLASHINFER_BENCH_CLONE has it")
        loaded = json.loads(file.read_text(encoding="utf-8"))
        return loaded

    return read
