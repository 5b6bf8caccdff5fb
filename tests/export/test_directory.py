"""flashinfer-trace export: whole directories or none, and docs/export.md shows what its commands print."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main
from flashinfer_trace.judging.export.directory import ExportError, new_directory

EXPORT = """
import sys
from pathlib import Path
from flashinfer_trace.judging.export.directory import new_directory
with new_directory(Path("new", "set")) as directory:
    (directory / "part").write_text("")
    print("writing", flush=True)
    sys.stdin.readline()
"""
ENDING = (signal.SIGTERM, signal.SIGHUP)


def exporting(directory: Path, hangup: str = "SIG_DFL") -> subprocess.Popen[str]:
    """A process in the middle of an export; it ends the export when it reads a line."""
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGHUP, signal.{hangup})\n{EXPORT}"]
    process = subprocess.Popen(command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path):
    with exporting(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_so(tmp_path: Path):
    """As under nohup."""
    with exporting(tmp_path, "SIG_IGN") as process:
        process.send_signal(signal.SIGHUP)
        process.communicate("\n", timeout=60)
    assert process.returncode == 0 and (tmp_path / "new" / "set" / "part").is_file()


def test_signals_are_handled_as_before_afterwards(tmp_path: Path):
    before = [signal.getsignal(number) for number in ENDING]
    with new_directory(tmp_path / "set"):
        assert [signal.getsignal(number) for number in ENDING] != before
    assert [signal.getsignal(number) for number in ENDING] == before


def test_it_works_on_another_thread(tmp_path: Path):
    """Where Python allows no handlers of signals."""

    def write() -> None:
        with new_directory(tmp_path / "set"):
            pass

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "set").is_dir()


def test_an_error_removes_the_parents_that_were_made(tmp_path: Path):
    (tmp_path / "old").mkdir()
    with pytest.raises(ExportError, match="refused"), new_directory(tmp_path / "old" / "a" / "b" / "set"):
        raise ExportError("refused")
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


def test_parents_with_something_in_them_stay(tmp_path: Path):
    with pytest.raises(ExportError, match="refused"), new_directory(tmp_path / "a" / "b" / "set"):
        (tmp_path / "a" / "mine").write_text("")
        raise ExportError("refused")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "mine"]


def test_a_parent_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExportError, match="and nothing was exported; name another directory"),
        new_directory(tmp_path / "file" / "set"),
    ):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


pytest.importorskip("safetensors.torch", reason="pip install 'flashinfer-trace[verify]'")
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [one for block in BLOCKS for one in block.split("$ ")[1:] if one.startswith("flashinfer-trace ")]


@pytest.mark.parametrize("text", COMMANDS, ids=[one.splitlines()[0] for one in COMMANDS])
def test_commands_print_what_is_shown(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(Path(__file__).resolve().parents[2]))
    monkeypatch.chdir(tmp_path)
    command, _, shown = text.partition("\n")
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout == shown


pytest.importorskip("safetensors.torch", reason="pip install 'flashinfer-trace[verify]'")
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
