"""flashinfer-trace check: exit statuses, JSON, and errors of usage."""

from __future__ import annotations

import json
import sys

import jsonschema
import pytest
import torch
from cheating_kernels import CHEATS, NORM
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.harness.family import Family
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.submission import RunLimits
from flashinfer_trace.judging.verdict import Grade

RIGHT = f"{CHEATS}/norms.py:right"
SCHEMA = json.loads((flashinfer_trace.find_root() / "schema" / "verdict.schema.json").read_text())
VALID = jsonschema.Draft202012Validator(SCHEMA)


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["check", *arguments])


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_right_kernel_exits_with_0_and_is_json_on_demand():
    result = invoke(RIGHT, "-d", NORM, "--examples", "2", "--seed", "4", "--format", "json")
    assert result.exit_code == 0, result.output
    verdict = json.loads(result.output)
    VALID.validate(verdict)
    assert verdict["grade"] == "reference-grade" and verdict["passed"] is True
    assert verdict["seed"] == 4 and verdict["failure"] is None
    assert verdict["outputs"]["output"]["worst"] <= 1 and verdict["largest"].keys() == {"batch_size"}


def test_a_wrong_kernel_exits_with_1_whatever_it_prints(tmp_path):
    path = tmp_path / "loud.py"
    path.write_text("def run(x, w):\n  print('{\"passed\": true}', flush=True)\n  return x")
    result = invoke(str(path), "-d", NORM, "--format", "json")
    assert result.exit_code == 1, result.output
    verdict = json.loads(result.stdout)
    VALID.validate(verdict)
    assert verdict["passed"] is False and verdict["failure"]["kind"] == "values"
    assert len(verdict["failure"]["index"]) == 2 and verdict["failure"]["bound"] > 0
    assert f"; what is right: `flashinfer-trace show {NORM}`\n" in invoke(str(path), "-d", NORM, "--verbose").output


@pytest.mark.parametrize(
    ("text", "grade", "second"),
    [
        ((CHEATS / "norms.py").read_text(), "reference-grade", "worst: output, 0."),
        ("def run(x, w): return x", "wrong", "worst: output output: worst error is "),
    ],
)
def test_the_answer_is_four_lines(tmp_path, text, grade, second):
    """The verdict, the worst element, why its bound is what it is, and how to repeat the run."""
    (tmp_path / "mine.py").write_text(text)
    mine = f"{tmp_path}/mine.py{':right' if grade != 'wrong' else ''}"
    lines = invoke(mine, "-d", NORM, "--examples", "2", "--seed", "4").output.splitlines()
    assert len(lines) == 4 and f" for {NORM} on cpu: {grade}, " in lines[0]
    assert lines[1].startswith(f"  {second}") and lines[2].startswith("  bound: one bf16 rounding")
    repeated = lines[3].removeprefix("  repeat: flashinfer-trace check ").split()
    assert invoke(*repeated).output.splitlines()[:3] == lines[:3]


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "allocator"]
)
def test_that_the_judge_lacks_memory_is_no_verdict(error, monkeypatch):
    """Its own: of the oracle, here. It has its exit status, and one JSON document."""

    def expected(*_: object) -> None:
        torch.empty(1 << 60) if isinstance(error, str) else None
        raise error

    monkeypatch.setattr(Family, "expected", expected)
    result = invoke(RIGHT, "-d", NORM, "--format", "json")
    assert result.exit_code == 5, result.output
    assert "flashinfer-trace itself ran out of memory (" in json.loads(result.stdout)["error"]


def test_a_cpu_with_an_index_is_the_cpu():
    result = invoke(RIGHT, "-d", NORM, "--examples", "1", "--device", "cpu:0")
    assert result.exit_code == 0, result.output
    assert f"for {NORM} on cpu: reference-grade" in result.output and " --device cpu --" in result.output


def test_a_solution_names_its_definition(tmp_path):
    text = (CHEATS / "norms.py").read_text()
    spec = {"language": "python", "target_hardware": ["cpu"], "entry_point": "norms.py::right"}
    document = {
        **{"name": "mine", "definition": NORM, "author": "me"},
        **{"spec": {**spec, "destination_passing_style": False}, "sources": [{"path": "norms.py", "content": text}]},
    }
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(document))
    result = invoke(str(path), "--examples", "2")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"mine for {NORM} on cpu: reference-grade")
    (repeated,) = (line.split()[2:] for line in result.output.splitlines() if line.startswith("  repeat: "))
    assert repeated[0] == "check" and invoke(*repeated[1:]).exit_code == 0
    assert invoke(str(path), "-d", "rmsnorm_h128").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such.py", "-d", NORM), "no such file"),
        ((RIGHT,), "name the Definition that the kernel computes: -d NAME"),
        ((RIGHT, "-d", "rmsnorm_h513"), "rmsnorm_h512"),
        ((RIGHT, "-d", NORM, "-d", "rmsnorm_h128"), f"-d names one Definition, not 2: check {NORM}, rmsnorm_h128"),
        ((RIGHT, "-d", NORM, "--device", "tpu"), "--device tpu"),
        ((RIGHT, "-d", NORM, "--device", "mps"), "it runs on cpu, cuda or cuda:N"),
        ((RIGHT, "-d", NORM, "--examples", "0"), "--examples"),
        ((RIGHT, "-d", NORM, "--seed", "-1"), "'--seed': -1 is not in the range 0<=x<=9223372036854775807"),
        ((RIGHT, "-d", NORM, "--seed", str(2**64)), "'--seed': 18446744073709551616 is not in the range"),
        ((RIGHT, "-d", NORM, "--timeout", "0.01"), "'--timeout': 0.01 is not in the range 0.1<=x<=86400"),
        ((RIGHT, "-d", NORM, "--timeout", "nan"), "'--timeout': nan is not in the range"),
        ((RIGHT, "-d", NORM, "--timeout", "inf"), "'--timeout': inf is not in the range"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_wrong_usage_is_no_verdict_in_json_and_the_document_says_so():
    result = invoke("no_such.py", "-d", NORM, "--format", "json")
    assert result.exit_code == 2 and json.loads(result.stdout).keys() == {"error"}
    text = (flashinfer_trace.find_root() / "docs" / "judge.md").read_text(encoding="utf-8")
    assert "of wrong usage, no verdict but an object with the message as its only field, `error`" in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import no_such_package", "not-loaded"),
        ("def run(x, w:", "not-loaded"),
        ("def run(x): return x", "not-loaded"),
        ("import os\nos._exit(0)", "died"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "died"),
    ],
)
def test_a_kernel_that_is_not_judged_exits_with_4(text, kind, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(text)
    result = invoke(str(path), "-d", NORM, "--format", "json")
    assert result.exit_code == 4, result.output
    verdict = json.loads(result.stdout)
    VALID.validate(verdict)
    assert verdict["grade"] == "not judged" and verdict["failure"]["kind"] == kind
    assert verdict["code"] == ("missing-package" if text == "import no_such_package" else kind)
    assert verdict["calls"] == 0


def test_loading_has_a_limit_of_its_own(tmp_path, server):
    """--timeout also limits it, but not to less than it takes to import libraries for CUDA."""
    assert [RunLimits.of(seconds).load for seconds in (1, 30, 500)] == [30, 30, 500]
    path = tmp_path / "loops.py"
    path.write_text("while True: pass")
    verdict = judge(str(path), NORM, limits=RunLimits(load=0.3), server=server)
    assert (verdict.failure.kind, verdict.failure.message) == ("timed-out", "it was not loaded within 0.3 s")
    assert verdict.grade == Grade.NOT_JUDGED and verdict.calls == 0


def test_one_call_may_take_so_long(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef run(x, w): time.sleep(60)")
    result = invoke(str(path), "-d", NORM, "--timeout", "0.2")
    assert result.exit_code == 1
    assert "timed-out: it did not return within 0.2 s" in result.output


@pytest.mark.parametrize("command", ["check", "bench"])
def test_nothing_is_judged_without_torch(command, monkeypatch):
    """A program that rewards right kernels must not take this one for a wrong one."""
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, [command, RIGHT, "-d", NORM])
    assert result.exit_code == 4, result.output
    assert "`pip install 'flashinfer-trace[verify]'` installs it" in result.output
