"""Records a list of configurations, several at a time, each in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.runtime_tracing.configurations import Configuration

#: Seconds before the end of the whole drive within which nothing is started.
LAST_START = 45.0
#: Lines of a failed run's output that the summary shows, of each rank.
TAIL = 12
#: Seconds that a late run has to write where it hangs, before it is killed.
GRACE = 3.0


@dataclass
class Machine:
    """The resources that the runs share.

    Attributes:
        jobs: most configurations at a time.
        memory_gib: GPU memory that may be in use.
        budget_s: seconds for everything.
        devices: GPUs that the configurations for one GPU are spread over.
    """

    jobs: int
    memory_gib: int
    budget_s: float
    devices: int = 1


@dataclass
class _Running:
    configuration: Configuration
    process: subprocess.Popen[bytes]
    began: float
    deadline: float
    device: int


def drive(chosen: Sequence[Configuration], out: Path, machine: Machine, command: Sequence[str]) -> list[str]:
    """Runs configurations and returns a line for each, in the order in which they ended.

    Args:
        out: where ``<name>.json`` and ``<name>.log`` are written.
        command: what records one configuration; its name and ``--out PATH`` are added.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + machine.budget_s
    waiting, running, lines = list(chosen), list[_Running](), list[str]()
    while waiting or running:
        for one in [one for one in running if one.process.poll() is not None or time.monotonic() > one.deadline]:
            running.remove(one)
            lines.append(_ended(one, out))
            print(lines[-1], flush=True)
        if time.monotonic() > end - LAST_START:
            lines += [f"{one.name}: not started, the time was used up" for one in waiting]
            waiting.clear()
        following = next((one for one in waiting if _fits(one, running, machine)), None)
        if following is None:
            time.sleep(0.2)
            continue
        waiting.remove(following)
        busy = [one.device for one in running]
        device = min(range(machine.devices), key=busy.count)
        running.append(_start(following, out, end, command, device if machine.devices > 1 else None))
    (out / "summary.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines


def _fits(configuration: Configuration, running: Sequence[_Running], machine: Machine) -> bool:
    used = sum(one.configuration.memory_gib for one in running)
    free = used + configuration.memory_gib <= machine.memory_gib or not running
    return len(running) < machine.jobs and free


def _start(configuration: Configuration, out: Path, end: float, command: Sequence[str], device: int | None) -> _Running:
    log = (out / f"{configuration.name}.log").open("wb")
    path = out / f"{configuration.name}.json"
    path.unlink(missing_ok=True)
    chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    # A session of its own, to end every process that it starts with it.
    process = subprocess.Popen(
        [*command, configuration.name, "--out", str(path)],
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **chosen},
    )
    log.close()
    now = time.monotonic()
    return _Running(configuration, process, now, min(now + configuration.limit_s, end), device or 0)


def _ended(one: _Running, out: Path) -> str:
    late = one.process.poll() is None
    if late:
        _signal(one, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(GRACE)
    _signal(one, signal.SIGKILL)
    status = one.process.wait()
    name, seconds = one.configuration.name, time.monotonic() - one.began
    path = out / f"{name}.json"
    if status == 0 and path.exists():
        return f"{name}: recorded in {seconds:.0f} s, {path.stat().st_size // 1024} KiB"
    how = "ended at its limit" if late else f"failed with status {status}"
    others = range(1, one.configuration.gpus)
    tails = [_tail(out / f"{name}.log"), *(_tail(out / f"{name}.rank{rank}.log") for rank in others)]
    return f"{name}: {how} after {seconds:.0f} s" + "\n    of the next rank:".join(tails)


def _signal(one: _Running, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(one.process.pid, number)


def _tail(log: Path) -> str:
    """The end of a log, indented below a line of the summary."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else "no output"
    return "".join(f"\n    {line[:300]}" for line in text.splitlines()[-TAIL:])


def recorder() -> list[str]:
    """The command that records one configuration of this checkout's list."""
    return [sys.executable, "-m", "tools.runtime_tracing", "--configuration"]
