"""Directories of exports: nothing is left of one that does not end well."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

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
