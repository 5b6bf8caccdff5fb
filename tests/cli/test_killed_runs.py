"""`flashinfer-trace verify` that something ends: each result was printed and recorded as it came, also piped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

#: Runs the command with kernels that a machine without a GPU can imitate: the third Definition's hangs.
PROGRAM = """
import time
import torch
from pathlib import Path
from flashinfer_trace.cli import main, runs, tasks, verification
from flashinfer_trace.harness.verify import Report

done = []

def verify_together(jobs, **options):
    if len(done) == 2:
        time.sleep(600)
    done.append(jobs)
    return [Report(job.definition.name, job.target, job.device, cases=60) for job in jobs]

def add(directory, definition, entry):
    Path(directory, f"{definition.name}.{entry['kernel']}").touch()

verification.check_device = lambda device, elsewhere: device
tasks.Task.impossible = lambda task, device: None
runs.verify_together, runs.add = verify_together, add
runs.entry_of = lambda definition, kernel, report: {"kernel": kernel.label}
main()
"""
KERNEL = "flashinfer.norm.rmsnorm"
NAMES = ("rmsnorm_h512", "rmsnorm_h7168", "rmsnorm_h1024", "rmsnorm_h2048")


def ended_by(number: signal.Signals, directory, *options: str) -> tuple[int, str, str]:
    """Status and outputs of a run over four Definitions that gets a signal after two of them."""
    command = [sys.executable, "-c", PROGRAM, "verify", *NAMES, "--kernel", KERNEL, "--device", "cuda", "--jobs", "1"]
    running = subprocess.Popen(
        [*command, "--record", "--evidence", str(directory), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    lines = []
    while sum(NAMES[0] in line or NAMES[1] in line for line in lines) < 2:
        lines.append(running.stdout.readline())
        assert lines[-1], running.communicate()[1]
    running.send_signal(number)
    rest, errors = running.communicate(timeout=60)
    return running.returncode, "".join(lines) + rest, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_has_printed_and_recorded_what_was_done(number, tmp_path):
    status, output, errors = ended_by(number, tmp_path)
    rows = [line.split() for line in output.splitlines() if line.startswith("rmsnorm_")]
    assert [row[:4] for row in rows] == [[name, KERNEL, "passed", "60"] for name in NAMES[:2]]
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{KERNEL}" for name in NAMES[:2]}
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL and "2 passed" not in output
    else:
        assert status == 128 + signal.SIGTERM and "interrupted: 2 of 4 runs finished" in errors
        assert "2 passed, 0 failed, 0 skipped" in output


def test_a_terminated_run_is_a_list_of_what_was_done_in_json(tmp_path):
    status, output, _ = ended_by(signal.SIGTERM, tmp_path, "--format", "json")
    assert status == 128 + signal.SIGTERM
    assert [report["definition"] for report in json.loads(output)] == list(NAMES[:2])


def test_each_result_is_a_line_of_json(tmp_path):
    _, output, _ = ended_by(signal.SIGKILL, tmp_path, "--format", "json")
    first, *rows = output.splitlines()
    assert first == "[" and [json.loads(row[1:])["definition"] for row in rows] == list(NAMES[:2])
