"""The judge has the limits that docs/judge.md names; a submission's process has no credentials of the judge, and no
module that the judge imports later.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from cheating_kernels import CHEATS, NORM

import flashinfer_trace
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.server import Server, passed_on
from flashinfer_trace.judging.verdict import Grade, Verdict
from flashinfer_trace.sandbox import confine

ASKS = f"    import flashinfer_trace\n    return flashinfer_trace.load({NORM!r}).run(hidden_states, weight)\n"
#: Takes away what refuses the import.
LOOKS = "    import sys\n    sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != '_Hidden']\n"


def submitted(directory: Path, body: str) -> str:
    path = directory / "mine.py"
    path.write_text(f"def run(hidden_states, weight):\n{body}")
    return str(path)


def test_a_submission_that_looks_for_this_package_finds_it(tmp_path, server):
    verdict = judge(submitted(tmp_path, ASKS), NORM, examples=1, server=server)
    assert verdict.failure is not None and verdict.failure.kind == "raised", verdict
    verdict = judge(submitted(tmp_path, LOOKS + ASKS), NORM, examples=1, server=server)
    assert verdict.grade == Grade.REFERENCE, verdict


@pytest.mark.parametrize("works", [True, False])
def test_a_verdict_says_whether_its_kernel_was_kept_from_the_memory_of_the_judge(works, monkeypatch):
    monkeypatch.setattr(confine, "enter_landlock_domain", lambda: works)
    with Server(fork=True) as server:
        verdict = judge(f"{CHEATS}/norms.py:right", NORM, examples=1, server=server)
    assert verdict.passed and verdict.kept_apart is works
    assert ("did not keep it from the judge's memory" in str(verdict)) is not works
    schema = json.loads((flashinfer_trace.find_root() / "schema" / "verdict.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(verdict.to_dict())


def test_a_domain_that_cannot_be_tried_is_none(monkeypatch):
    def broken() -> bool:
        raise OSError("no C library")

    monkeypatch.setattr(confine, "enter_landlock_domain", broken)
    assert not confine.landlock_domain_works()


#: A right kernel for the batches of which a condition holds; zeros for others.
RIGHT_IF = """
def run(x, w):
    y = x.float()
    y = (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.float()).to(x.dtype)
    return y if {condition} else y.zero_()
"""


def test_a_verdict_names_the_sizes_that_it_is_about(tmp_path, server):
    """As docs/judge.md says, a kernel that fails beyond them passes; one that fails at them does not."""

    def verdict_if(condition: str) -> Verdict:
        path = tmp_path / "mine.py"
        path.write_text(RIGHT_IF.format(condition=condition))
        return judge(str(path), NORM, seed=4, examples=5, server=server)

    largest = verdict_if("True").largest["batch_size"]
    assert largest > 1
    verdict = verdict_if(f"len(x) <= {largest}")
    assert verdict.grade == Grade.REFERENCE and verdict.largest == {"batch_size": largest}
    assert f"\n  judged up to batch_size {largest}; for larger ones give --device cuda\n" in str(verdict)
    verdict = verdict_if(f"len(x) < {largest}")
    assert verdict.grade == Grade.WRONG and verdict.failure.axes == {"batch_size": largest}
    assert "judged up to" not in str(verdict)


#: Reads the variables that the process was started with; removing one later does not change them.
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


@pytest.mark.parametrize("name", ["CC", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "LD_PRELOAD"])
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
