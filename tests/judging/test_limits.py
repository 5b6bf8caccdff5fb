"""What the judge does not do is what docs/judge.md says that it does not."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from cheating_kernels import CHEATS, NORM

import flashinfer_trace
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.server import Server
from flashinfer_trace.judging.verdict import Grade, Verdict
from flashinfer_trace.sandbox import landlock

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
    monkeypatch.setattr(landlock, "enter_domain", lambda: works)
    with Server(fork=True) as server:
        verdict = judge(f"{CHEATS}/norms.py:right", NORM, examples=1, server=server)
    assert verdict.passed and verdict.kept_apart is works
    assert ("did not keep it from the judge's memory" in str(verdict)) is not works
    schema = json.loads((flashinfer_trace.find_root() / "schema" / "verdict.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(verdict.to_dict())


def test_a_domain_that_cannot_be_tried_is_none(monkeypatch):
    def broken() -> bool:
        raise OSError("no C library")

    monkeypatch.setattr(landlock, "enter_domain", broken)
    assert not landlock.domain_works()


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
