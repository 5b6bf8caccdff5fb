"""flashinfer-trace check-many: a line for each submission, whatever happens to the run, and the summary."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main, many
from flashinfer_trace.judging.many import ManyError, Results, Settings, lost, numbers, read_tasks, summary

NAME = "rmsnorm_h512"
RIGHT = """import torch
def run(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
"""
WRONG = "def run(x, w): return x"


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "submissions.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def sources(*texts: str) -> list[dict[str, str]]:
    return [{"definition": NAME, "source": text} for text in texts]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_is_killed_goes_on_without_a_lost_or_doubled_line(tmp_path):
    """Lines may be added meanwhile. Equal submissions, which samples of a model may be, have a line each."""
    (tmp_path / "mine.py").write_text(RIGHT + "def other(x, w): return w")
    spec = {"language": "python", "entry_point": "a.py::run", "destination_passing_style": False}
    solution = {"name": "s", "definition": NAME, "spec": spec, "sources": [{"path": "a.py", "content": RIGHT}]}
    lines = [
        *({"definition": NAME, "file": "mine.py", "id": "first"}, {"definition": NAME, "file": "mine.py:other"}),
        *({"solution": solution}, *sources(WRONG, WRONG)),
    ]
    path, out = written(tmp_path, *lines), tmp_path / "verdicts.jsonl"
    options = ["check-many", str(path), "--out", str(out), "--jobs", "1", "--examples", "1", "--seed", "4"]
    command = [sys.executable, "-m", "flashinfer_trace", *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(flashinfer_trace.__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = out.read_bytes()
    there = before.count(b"\n")
    assert 0 < there < 5
    written(tmp_path, *lines, {"solution": {**solution, "spec": {**spec, "language": "fortran"}}})
    result = CliRunner().invoke(main, [*options, "--format", "json"])
    assert result.exit_code == 0 and f"{out}: {there} of 6 are done; resuming" in result.stderr, result.output
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1]) and len(read(out)) == 6
    found = {line["line"]: line for line in read(out)}
    assert [found[number]["grade"] for number in range(1, 7)] == [
        *("reference-grade", "wrong", "reference-grade", "wrong", "wrong", "not judged")
    ]
    assert found[1]["id"] == "first" and found[1]["seed"] == 4 and found[5]["seed"] == 8 and found[1]["commit"]
    assert found[4]["submission_sha256"] == found[5]["submission_sha256"] != found[1]["submission_sha256"]
    assert found[1]["verdict"]["grade"] == "reference-grade" and found[1]["gpu"] == "cpu"
    assert found[6]["code"] == "no-submission" and "fortran" in found[6]["message"]
    assert json.loads(result.stdout)["grades"] == {"not judged": 1, "reference-grade": 2, "wrong": 3}
    again = CliRunner().invoke(main, options)
    assert again.exit_code == 0 and len(read(out)) == 6, again.output
    assert "2 of 6 submissions are right, 0 timed\n" in again.stdout and "fast_p: 0: 0.333 (no times" in again.stdout


def test_killed_at_any_byte_nothing_is_lost_or_doubled(tmp_path):
    """A killed run leaves the beginning of the file: each such file can be resumed."""
    tasks = read_tasks(written(tmp_path, *sources(WRONG, RIGHT, WRONG)))
    out = tmp_path / "verdicts.jsonl"
    with Results(out, tasks) as results:
        for task in tasks:
            results.add(lost(task, Settings(), "é"))
    whole = out.read_bytes()
    for size in sorted({*range(0, len(whole), 19), *range(len(whole) - 3, len(whole) + 1)}):
        out.write_bytes(whole[:size])
        with Results(out, tasks) as results:
            assert len(results.lines) == whole[:size].count(b"\n")
            for task in results.missing:
                results.add(lost(task, Settings(), "é"))
        assert out.read_bytes() == whole


def test_two_runs_never_write_into_one_file(tmp_path):
    tasks = read_tasks(written(tmp_path, *sources(WRONG)))
    with Results(tmp_path / "out", tasks), pytest.raises(ManyError, match="another run writes into it"):
        Results(tmp_path / "out", tasks).__enter__()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: Expecting property name"),
        ("[]", ":2: is not a JSON object; write one such as"),
        ({"definition": NAME}, "needs one of file, source, solution, and has none"),
        ({"definition": NAME, "source": "x", "file": "y"}, "and has file, source"),
        ({"definition": NAME, "source": ""}, "source must be text, and not empty"),
        ({"definition": NAME, "source": "x", "gpu": 1}, r"has unknown fields \['gpu'\]"),
        ({"definition": NAME, "file": "none.py"}, "file none.py cannot be read"),
        ({"source": "x"}, "names no Definition"),
        ({"definition": "rmsnorm_h513", "source": "x"}, "rmsnorm_h512"),
        ({"solution": {"definition": NAME}, "function": "run"}, "leave out function"),
    ],
)
def test_a_line_that_is_none_is_an_error_before_anything_is_judged(tmp_path, line, message):
    with pytest.raises(ManyError, match=message):
        read_tasks(written(tmp_path, *sources(RIGHT), line))
    result = CliRunner().invoke(main, ["check-many", str(tmp_path / "submissions.jsonl"), "--out", f"{tmp_path}/out"])
    assert result.exit_code == 2 and not (tmp_path / "out").exists(), result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"line": 1}', "is not a verdict of check-many"),
        ("nothing", "is not a verdict of check-many"),
        ({"line": 2, "submission_sha256": "0", "definition": NAME}, "lines may only be added at the end"),
    ],
)
def test_a_file_of_other_verdicts_stays_as_it_is(tmp_path, line, message):
    path, out = written(tmp_path, *sources(RIGHT)), tmp_path / "out"
    out.write_text(text := f"{line if isinstance(line, str) else json.dumps(line)}\n")
    result = CliRunner().invoke(main, ["check-many", str(path), "--out", str(out)])
    assert result.exit_code == 2 and message in " ".join(result.output.split()) and out.read_text() == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "0-"), "is neither a GPU nor a range of GPUs"),
        (("--gpus", "0-3"), "torch sees 0 GPUs"),
        (("--cluster", "auto", "--jobs", "2"), "leave out --jobs"),
    ],
)
def test_devices_that_are_not_there(tmp_path, options, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    result = CliRunner().invoke(
        main, ["check-many", str(written(tmp_path, *sources(RIGHT))), "--out", f"{tmp_path}/out", *options]
    )
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_numbers_of_gpus():
    assert numbers("0-2,7, 1") == [0, 1, 2, 7]


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "flashinfer_trace.cli.cluster", raising=False)
    path = written(tmp_path, *sources(RIGHT))
    result = CliRunner().invoke(main, ["check-many", str(path), "--out", f"{tmp_path}/out", "--cluster", "auto"])
    assert result.exit_code == 1 and "pip install 'flashinfer-trace[cluster]'" in result.output


def test_a_judge_that_dies_costs_its_submission_only(tmp_path, monkeypatch):
    monkeypatch.setattr(many, "ATTEMPTS", 1)
    tasks = read_tasks(written(tmp_path, *sources(RIGHT)))

    def kill() -> None:
        while not (running := multiprocessing.active_children()):
            time.sleep(0.01)
        os.kill(running[0].pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    (line,) = many._in_processes(tasks, ["cpu"], Settings(examples=1))
    assert (line["line"], line["code"], line["grade"]) == (1, "judge-died", "not judged")
    assert "exit code -9" in line["message"]


def test_the_summary():
    """pass@k is 1 - C(n - c, k) / C(n, k), and fast_p counts what is right and faster than the fastest real kernel."""
    lines = [
        {"definition": name, "grade": grade, "passed": grade != "wrong", "code": "", "ratio": ratio}
        for name, grade, ratio in [
            *(("a", "reference-grade", 1.2), ("a", "kernel-grade", 0.9), ("a", "wrong", None), ("a", "wrong", None)),
            *(("b", "wrong", None), ("b", "reference-grade", 2.5)),
        ]
    ]
    found = summary(lines)
    assert found["pass_at"] == pytest.approx({"1": 0.5, "2": ((1 - 1 / 6) + 1) / 2})
    assert found["fast"] == pytest.approx(
        {"0": 3 / 6, "0.5": 3 / 6, "0.8": 3 / 6, "1": 2 / 6, "1.5": 1 / 6, "2": 1 / 6}
    )
    assert found["definitions"]["a"] == {"kernel-grade": 1, "reference-grade": 1, "wrong": 2} and found["timed"] == 3
    assert summary([{**lines[0], "ratio": None}])["fast"] == {
        "0": 1.0,
        **dict.fromkeys(("0.5", "0.8", "1", "1.5", "2")),
    }
