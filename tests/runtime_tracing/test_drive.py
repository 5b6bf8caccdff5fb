"""Configurations run in processes of their own: crashes and endless runs do not stop the others."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tools.runtime_tracing.configurations import Configuration, Model
from tools.runtime_tracing.drive import LAST_START, Machine, drive

MODEL = Model("toy", {}, (1,))
#: Records, crashes or hangs, as the name of the configuration says.
RECORDER = """
import pathlib, subprocess, sys, time
name, path = sys.argv[1], pathlib.Path(sys.argv[3])
began = time.time()
if name.startswith("crash"):
    sys.exit("the cause")
if name.startswith("hang"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    path.with_suffix(".child").write_text(str(child.pid))
    time.sleep(60)
time.sleep(0.3)
path.write_text(f"{began} {time.time()}")
"""
COMMAND = [sys.executable, "-c", RECORDER]


def times(path: Path) -> tuple[float, float]:
    began, ended = path.read_text().split()
    return float(began), float(ended)


def test_crashes_and_endless_runs_are_told(tmp_path: Path):
    chosen = [Configuration(name, MODEL, limit_s=2) for name in ("hang", "crash", "good")]
    lines = drive(chosen, tmp_path, Machine(3, 100, LAST_START + 30), COMMAND)
    by_name = {line.partition(":")[0]: line for line in lines}
    assert by_name["good"].startswith("good: recorded in")
    assert "failed with status 1" in by_name["crash"] and "the cause" in by_name["crash"]
    assert "ended at its limit after 2 s" in by_name["hang"]
    child = int((tmp_path / "hang.child").read_text())
    for _ in range(50):  # what it started has ended with it
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"process {child} is still running")
    assert len((tmp_path / "summary.txt").read_text().splitlines()) >= 3


def test_what_needs_more_memory_than_is_free_waits(tmp_path: Path):
    chosen = [Configuration(name, MODEL, memory_gib=60) for name in ("one", "two")]
    drive(chosen, tmp_path, Machine(2, 100, LAST_START + 30), COMMAND)
    first, second = times(tmp_path / "one.json"), times(tmp_path / "two.json")
    assert second[0] >= first[1]


def test_nothing_starts_when_the_time_is_used_up(tmp_path: Path):
    lines = drive([Configuration("late", MODEL)], tmp_path, Machine(1, 100, LAST_START - 1), COMMAND)
    assert lines == ["late: not started, the time was used up"]


#: Two processes that hang in a collective call, as far as a signal can tell: rank 0, and rank 1, which has a log of its
#: own.
HANGS = """
import pathlib, sys, time
from tools.runtime_tracing.record import dump_stacks_when_terminated
path = pathlib.Path(sys.argv[3])
path.with_suffix(".rank1.log").write_text("the cause on rank 1")
def waits_for_another_rank():
    time.sleep(60)
dump_stacks_when_terminated()
waits_for_another_rank()
"""


def test_a_late_run_tells_where_each_rank_hangs(tmp_path: Path):
    began = time.monotonic()
    two = Configuration("hang-tp2", MODEL, gpus=2, limit_s=3)
    (line,) = drive([two], tmp_path, Machine(1, 100, LAST_START + 30), [sys.executable, "-c", HANGS])
    assert line.startswith("hang-tp2: ended at its limit after 3 s")
    assert "in waits_for_another_rank" in line and "of the next rank:\n    the cause on rank 1" in line
    assert time.monotonic() - began < 20
    assert (tmp_path / "summary.txt").read_text() == f"{line}\n"


def test_runs_are_spread_over_the_gpus(tmp_path: Path):
    recorder = "import os, pathlib, sys, time; time.sleep(0.5); "
    recorder += "pathlib.Path(sys.argv[3]).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    chosen = [Configuration(name, MODEL) for name in ("one", "two", "three", "four")]
    drive(chosen, tmp_path, Machine(4, 100, LAST_START + 30, devices=2), [sys.executable, "-c", recorder])
    assert [(tmp_path / f"{one.name}.json").read_text() for one in chosen] == ["0", "1", "0", "1"]
