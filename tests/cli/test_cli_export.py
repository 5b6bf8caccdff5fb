"""flashinfer-trace export: whole directories or none."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main

pytest.importorskip("safetensors.torch", reason="pip install 'flashinfer-trace[export]'")
trace_set = importlib.import_module("flashinfer_trace.judging.export.trace_set")
NAMES = ["rmsnorm_h128", "min_p_sampling_from_probs_v32000"]


def test_it_says_what_it_wrote_and_what_it_left_out(tmp_path: Path):
    out = tmp_path / "new" / "set"
    result = CliRunner().invoke(main, ["export", "fib", str(out), *NAMES, "--format", "json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["definitions"] == 1
    assert document["left_out"]["definitions"].keys() == {"min_p_sampling_from_probs_v32000"}
    assert (out / "definitions" / "rmsnorm" / "rmsnorm_h128.json").is_file()
    assert [each.name for each in out.parent.iterdir()] == ["set"], "nothing else is left there"


def test_kernelbench_in_text(tmp_path: Path):
    result = CliRunner().invoke(main, ["export", "kernelbench", str(tmp_path / "problems"), *NAMES])
    assert result.exit_code == 0, result.output
    assert "1 Definition, 1 workload" in result.stdout
    assert "left out 1 Definition: samples is drawn" in result.stdout


@pytest.mark.parametrize("kind", ["file", "full"])
def test_an_occupied_place_is_refused(kind: str, tmp_path: Path):
    out = tmp_path / "out"
    if kind == "full":
        out.mkdir()
        (out / "mine").write_text("kept")
    else:
        out.write_text("kept")
    result = CliRunner().invoke(main, ["export", "fib", str(out), "rmsnorm_h128"])
    assert result.exit_code == 2
    assert "name a new directory, or remove it first" in result.output
    assert (out / "mine" if kind == "full" else out).read_text() == "kept"


def test_an_empty_directory_is_filled(tmp_path: Path):
    assert CliRunner().invoke(main, ["export", "fib", str(tmp_path), "rmsnorm_h128"]).exit_code == 0
    assert (tmp_path / "README.md").is_file()


@pytest.mark.parametrize("out", [".", "../work"])
def test_the_current_directory_is_not_replaced(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    result = CliRunner().invoke(main, ["export", "fib", out, NAMES[0]])
    assert result.exit_code == 2 and f"{out} is the current directory; name a new one" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["work"] and not any((tmp_path / "work").iterdir())


def test_nothing_that_can_be_exported_is_no_success(tmp_path: Path):
    result = CliRunner().invoke(main, ["export", "fib", str(tmp_path / "out"), "min_p_sampling_from_probs_v32000"])
    assert result.exit_code == 2
    assert "nothing was exported" in result.output and "1 Definition: " in result.output
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_set, "write_card", fail)
    result = CliRunner().invoke(main, ["export", "fib", str(tmp_path / "out"), "rmsnorm_h128"])
    assert result.exit_code == 2
    assert "No space left on device" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extent", ["quick", "full"])
def test_problems_have_no_workloads_to_choose(tmp_path: Path, extent: str):
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["export", "kernelbench", str(out), "rmsnorm_h128", "--workloads", extent])
    assert result.exit_code == 2 and f"--workloads {extent} is for fib" in result.output
    assert not out.exists()


def test_an_unknown_name_is_refused_before_anything_is_written(tmp_path: Path):
    result = CliRunner().invoke(main, ["export", "fib", str(tmp_path / "out"), "rmsnorm_h12"])
    assert result.exit_code == 2
    assert "no Definition matches" in result.output
    assert list(tmp_path.iterdir()) == []
