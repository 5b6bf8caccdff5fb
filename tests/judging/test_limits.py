"""What the judge does not do is what docs/judge.md says that it does not."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from cheating_kernels import CHEATS, NORM

import flashinfer_trace
from flashinfer_trace.judging import domain
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.process import Server
from flashinfer_trace.judging.verdict import Grade

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
    monkeypatch.setattr(domain, "enter", lambda: works)
    with Server(fork=True) as server:
        verdict = judge(f"{CHEATS}/norms.py:right", NORM, examples=1, server=server)
    assert verdict.passed and verdict.kept_apart is works
    assert ("did not keep it from the judge's memory" in str(verdict)) is not works
    schema = json.loads((flashinfer_trace.find_root() / "schema" / "verdict.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(verdict.to_dict())


def test_a_domain_that_cannot_be_tried_is_none(monkeypatch):
    def broken() -> bool:
        raise OSError("no C library")

    monkeypatch.setattr(domain, "enter", broken)
    assert not domain.works()
