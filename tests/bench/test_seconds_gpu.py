"""How long a user waits on a GPU: under 10 s for a verdict, and under 60 s for the quick workloads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu_harness

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
#: The walk-through's kernels: in Triton for one size, and in torch for any.
TRITON, TORCH, *_ = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
KERNELS = [("rmsnorm_h512", TRITON), ("rmsnorm_h7168", TORCH)]
#: Seconds: of `check`, once Triton and the libraries have compiled what they keep, and of `bench --workloads quick`.
CHECK, BENCH = 10, 60


def seconds(directory: Path, *arguments: str) -> float:
    """How long the command takes in a process of its own, from its start to its end."""
    code = "from flashinfer_trace.cli import main; main()"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=directory, capture_output=True, text=True)
    taken = time.perf_counter() - started
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"flashinfer-trace {' '.join(arguments)}: {taken:.1f} s")
    return taken


@pytest.fixture(params=KERNELS, ids=lambda pair: pair[0])
def submission(request: pytest.FixtureRequest, tmp_path: Path, cuda_device: str) -> tuple[Path, tuple[str, ...]]:
    """A directory with a kernel, and the arguments that name it and its Definition."""
    name, text = request.param
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    return tmp_path, ("mine.py", "-d", name)


def test_a_verdict_takes_less_than_ten_seconds(submission):
    directory, named = submission
    first, warm = (seconds(directory, "check", *named, "--device", "cuda") for _ in range(2))
    assert warm < CHECK, f"{warm:.1f} s, after {first:.1f} s in the first run"


def test_quick_workloads_take_less_than_a_minute(submission):
    assert shutil.which("nvidia-smi"), "bench asks nvidia-smi for clocks"
    directory, named = submission
    taken = seconds(directory, "bench", *named, "--workloads", "quick")
    assert taken < BENCH, f"{taken:.1f} s"
