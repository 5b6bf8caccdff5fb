"""What a submission's process has of the one that judges it: no credentials, and no module that it imports later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cheating_kernels import CHEATS, NORM

from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.server import Server, passed_on

#: What the process was started with, which removing a variable does not change.
READS = """
import os
from pathlib import Path

found = Path("/proc/self/environ").read_bytes().decode() + repr(dict(os.environ))
assert "hidden-from-it" not in found and "CUDA_VISIBLE_DEVICES" in found

exec(Path(FILE).read_text())
run = right
"""


def test_a_submission_gets_no_credentials(tmp_path, monkeypatch):
    for name in ("SOME_API_TOKEN", "NVIDIA_API_KEY", "TORCH_PASSWORD", "CCTOKEN"):
        monkeypatch.setenv(name, "hidden-from-it")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    path = tmp_path / "reads.py"
    path.write_text(READS.replace("FILE", repr(str(CHEATS / "norms.py"))))
    with Server() as server:
        verdict = judge(str(path), NORM, examples=1, server=server)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", ["CC", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "TRITON_CACHE_DIR"])
def test_compilers_and_cuda_get_theirs(name):
    assert passed_on(name)


def test_the_command_starts_a_new_process(tmp_path):
    """A copy of its own would hold the environment that it was started with."""
    path = tmp_path / "reads.py"
    path.write_text(READS.replace("FILE", repr(str(CHEATS / "norms.py"))))
    command = [sys.executable, "-c", "from flashinfer_trace.cli import main; main()"]
    done = subprocess.run(
        [*command, "check", str(path), "-d", NORM, "--examples", "1"],
        env={"PATH": os.defpath, "HOME": str(tmp_path), "SOME_TOKEN": "hidden-from-it", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / ".hypothesis").exists(), "Hypothesis writes where caches are"


#: Judges a kernel, and prints the modules that were imported after the submission's process had begun.
LATE = """
import sys
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.process import SubmissionProcess

there = []
loaded = SubmissionProcess.loaded

def noted(self):
    there.append(set(sys.modules))
    loaded(self)

SubmissionProcess.loaded = noted
assert judge(FILE, NAME, examples=3, twin=True).passed
print(*sorted(set(sys.modules) - there[0]))
"""


@pytest.mark.parametrize(
    ("file", "name"), [("norms.py:right", NORM), ("samplers.py:honest", "top_k_top_p_sampling_from_probs_v128256")]
)
def test_nothing_is_imported_once_a_submission_runs(file, name):
    """It may write wherever its user may, also to files of libraries."""
    text = LATE.replace("FILE", repr(str(CHEATS / file))).replace("NAME", repr(name))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split()
