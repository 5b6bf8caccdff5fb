"""The verdicts that --record-verdicts writes, and the part of docs/judge.md that is made from them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import execnet
import jsonschema
import pytest
import torch
from cheating_kernels import ALL, OF_VALUES
from recorded_verdicts import ATTEMPTS, Recorder, entry, run_of, with_memory
from test_known_kernels import kernels_of_each_family

import flashinfer_trace
from flashinfer_trace import load
from flashinfer_trace.dataset.evidence import read
from flashinfer_trace.families import family_of
from flashinfer_trace.judging.verdict import Failure, Grade, Verdict
from flashinfer_trace.kernels import current_label
from tools.shared.findings import read_findings
from tools.site.cheats import THEIRS, VERDICTS, section

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads(Path(__file__).with_name("verdicts.schema.json").read_text(encoding="utf-8"))
ASKED = json.loads((ROOT / THEIRS).read_text(encoding="utf-8"))
ON_A_GPU = {"gpu": "NVIDIA H200", "capability": "9.0", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0"}
RUN = {
    "date": "2026-01-02",
    "environment": {**ON_A_GPU, "python": "3.12.3"},
    "libraries": {"sgl-kernel": "0.3.21"},
    "package_sha256": "0" * 64,
}
WRONG = Verdict("rmsnorm_h512", "a", "cuda", "own", grade=Grade.WRONG, failure=Failure("values", ""), seconds=1.234)
FULL = Verdict("rmsnorm_h512", "a", "cuda", "own", failure=Failure("raised", "OutOfMemoryError: CUDA out of memory."))
RIGHT = Verdict("rmsnorm_h512", "b", "cuda", "own", grade=Grade.REFERENCE, cases=30, seconds=2.0)


def valid(document: dict[str, Any]) -> dict[str, Any]:
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


def recorded(path: Path, *found: tuple[str, str, Verdict], run: dict[str, Any] = RUN) -> dict[str, Any]:
    """The file after these verdicts."""
    for kind, name, verdict in found:
        Recorder(path).add(run, entry(kind, name, verdict))
    return valid(json.loads(path.read_text(encoding="utf-8")))


def test_verdicts_are_written_by_kind_definition_and_name(tmp_path):
    path = tmp_path / "new" / "verdicts.json"
    document = recorded(path, ("kernels", "real", RIGHT), ("cheats", "zeros", WRONG), ("cheats", "in_float16", WRONG))
    assert [(one["kind"], one["name"]) for one in document["verdicts"]] == [
        *[("cheats", "in_float16"), ("cheats", "zeros"), ("kernels", "real")],
    ]
    first, *_, last = document["verdicts"]
    assert (first["failure"], first["seconds"], last["cases"]) == ("values", 1.23, 30) and "failure" not in last
    assert sum(line.startswith('    {"kind": ') for line in path.read_text().splitlines()) == 3, "a line for each"


def test_a_later_verdict_replaces_that_of_the_same_kernel_only(tmp_path):
    path = tmp_path / "verdicts.json"
    recorded(path, ("cheats", "zeros", RIGHT), ("cheats", "in_float16", WRONG))
    document = recorded(path, ("cheats", "zeros", WRONG), run={**RUN, "date": "2026-01-03"})
    assert [one["grade"] for one in document["verdicts"]] == ["wrong", "wrong"] and document["date"] == "2026-01-03"


@pytest.mark.parametrize("change", [{"package_sha256": "1" * 64}, {"libraries": {}}])
def test_verdicts_on_another_state_are_not_mixed(change, tmp_path):
    path = tmp_path / "verdicts.json"
    recorded(path, ("cheats", "zeros", WRONG))
    document = recorded(path, ("cheats", "in_float16", WRONG), run={**RUN, **change})
    assert [one["name"] for one in document["verdicts"]] == ["in_float16"]


@pytest.mark.parametrize(
    ("full", "then", "found"), [(0, RIGHT, RIGHT), (0, WRONG, WRONG), (2, RIGHT, RIGHT), (ATTEMPTS, RIGHT, FULL)]
)
def test_a_kernel_is_judged_again_when_the_gpu_had_no_memory_left(full, then, found):
    verdicts = iter([*[FULL] * full, then])
    assert with_memory(lambda: next(verdicts), pause=0.0) is found


def test_it_is_when_the_judge_had_none_left_and_raises_at_last():
    left = iter([True, False, *[True] * ATTEMPTS])

    def judged():
        if next(left):
            raise torch.OutOfMemoryError
        return RIGHT

    assert with_memory(judged, pause=0.0) is RIGHT
    with pytest.raises(torch.OutOfMemoryError):
        with_memory(judged, pause=0.0)


def test_workers_can_send_what_verdicts_are_taken_on():
    """execnet sends plain types only: torch's version is a class of its own."""
    found = run_of("cpu")
    assert execnet.loads(execnet.dumps(found)) == found


def test_one_process_writes_the_verdicts_of_all_workers(tmp_path):
    path, file = tmp_path / "verdicts.json", tmp_path / "test_two.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('name', ['one', 'two', 'three', 'four'])\n"
        "def test_judged(name, record_property):\n"
        "    line = {'kind': 'cheats', 'name': name, 'definition': 'd', 'grade': 'unproven'}\n"
        "    line |= {'cases': 0, 'seconds': 1}\n"
        f"    record_property('verdict', {{'run': {RUN!r}, 'entry': line}})\n"
        "    assert name != 'two'\n"
    )
    command = [sys.executable, "-m", "pytest", str(file), f"--record-verdicts={path}", "-n", "2", "-p", "conftest"]
    options = ["-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT)])
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert "3 passed" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr
    names = {one["name"] for one in valid(json.loads(path.read_text()))["verdicts"]}
    assert names == {"one", "two", "three", "four"}, "a verdict that fails its test is recorded, too"


def test_what_a_run_is_described_by():
    found = run_of("cpu")
    assert found["environment"].keys() == {"processor", "torch", "python"} and "torch" in found["libraries"]
    assert len(found["package_sha256"]) == 64


@pytest.mark.skipif(not (ROOT / VERDICTS).exists(), reason=f"{VERDICTS} is not recorded yet")
def test_the_recorded_verdicts_are_those_that_are_wanted():
    """All cheats are rejected for the right reason; what is wrong of other kernels is a defect that is described.

    Kernels that had not run when the verdicts were recorded await the next recording.
    """
    document = valid(json.loads((ROOT / VERDICTS).read_text(encoding="utf-8")))
    cheats = {one["name"]: one for one in document["verdicts"] if one["kind"] == "cheats"}
    assert cheats.keys() == {cheat.function for cheat in ALL if cheat.gpu}
    assert all(cheats[one.function]["failure"] in one.kinds for one in ALL if one.gpu)
    capability = (int(document["environment"]["capability"].partition(".")[0]), 0)
    # By family: which of its Definitions is judged changes when smaller ones come.
    wanted = {
        (family_of(one).name, label)
        for of_family in kernels_of_each_family().values()
        for label, (one, kernel) in of_family.items()
        if kernel.unavailable(capability) is None
    }
    judged = {
        (family_of(load(one["definition"])).name, current_label(one["name"]))
        for one in document["verdicts"]
        if one["kind"] == "kernels"
    }
    ran = {
        entry.kernel_label
        for one in flashinfer_trace.definitions()
        if (evidence := read(ROOT, one)) is not None
        for entry in evidence.entries
        if entry.run.started_at[:10] <= document["date"]
    }
    assert not {label for _, label in wanted - judged} & ran
    labels = {label for of_family in kernels_of_each_family().values() for label in of_family}
    assert not {label for _, label in judged - wanted} & labels
    findings = {path.rpartition(".")[2] for one in read_findings(ROOT) for path in one.kernels}
    for one in document["verdicts"]:
        right = one["grade"] in (Grade.REFERENCE, Grade.KERNEL)
        assert one["kind"] == "cheats" or right or one["name"].rpartition(".")[2] in findings, one
        if one["kind"] == "kernels" and current_label(one["name"]) in labels:
            kernels = family_of(load(one["definition"])).kernels
            assert current_label(one["name"]) in {kernel.label for kernel in kernels}, one


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_recording_is_a_column(tmp_path):
    kernels = [("kernels", "norm", RIGHT), ("kernels", "bad", WRONG), ("honest", "norms.py:right", RIGHT)]
    document = recorded(tmp_path / "f", ("cheats", "zeros", WRONG), ("cheats", "in_the_input", WRONG), *kernels)
    on_a_gpu = {**RUN, "flashinfer_bench": "0.1.2", "verdicts": {"on_another_stream": "PASSED"}}
    theirs = {"cpu": ASKED["cpu"], "cuda": on_a_gpu}
    text = section(ALL, document, theirs)
    assert "| On an NVIDIA H200 |" in text and "NVIDIA H200 with torch 2.11.0 on 2026-01-02" in text
    assert row(text, "zeros")[3] == "wrong: `values`"
    assert row(text, "zeros")[4] == f"`{ASKED['cpu']['verdicts']['zeros']}`"
    assert row(text, "in_another_process")[3] == "cheats on a CPU only"
    assert row(text, "greedy")[3] == "not recorded"
    unasked = section(ALL, document, {**theirs, "cuda": {**on_a_gpu, "verdicts": {}}})
    assert row(unasked, "on_another_stream")[4] == "not run"
    assert row(unasked, "quantised_toward_zero")[4] == "cannot compare float8_e4m3fn"
    assert row(text, "on_another_stream")[4] == "`PASSED` *GPU*"
    total = sum(one.gpu for one in ALL)
    wanted = f"rejected 1 of {total} cheats for the right reason ({total - 2} not run there yet). It passed"
    assert wanted in text, "the other one for another"
    assert "1 of 1 honest kernels next to them, and 1 of 2 real ones" in text
    assert "- `bad` for `rmsnorm_h512`: wrong: `values`" in text
    counts = re.search(r"(\d+) of the (\d+) real kernels need another GPU; not judged: (\d+)\.", text)
    assert counts is not None
    elsewhere, every, unjudged = map(int, counts.groups())
    assert elsewhere >= 8 and every == elsewhere + unjudged + 2


def test_every_verdict_of_flashinfer_bench_says_on_what_it_was_taken():
    for device, run in ASKED.items():
        assert device in ("cpu", "cuda") and run["flashinfer_bench"] == "0.1.2"
        assert run["date"] and run["environment"]["torch"] and ("gpu" in run["environment"]) == (device == "cuda")
    asked = {name for run in ASKED.values() for name in run["verdicts"]}
    unasked = {"quantised_toward_zero", "marks_only_what_is_true", *OF_VALUES}
    assert asked == {cheat.function for cheat in ALL} - unasked
