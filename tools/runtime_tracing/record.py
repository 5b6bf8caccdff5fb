"""Records one configuration in this process, and starts the processes of its other GPUs."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.runtime_tracing import recording, sglang_runner
from tools.runtime_tracing.configurations import Configuration

#: Seconds that a rank has, after another one failed, to fail as well and to say why.
LAST_WORDS = 5.0


#: Packages without which SGLang runs no kernel; what else it needs depends on the configuration.
REQUIRED = ("torch", "sgl_kernel", "sglang")


def check_packages() -> None:
    """Checks that what records is installed. It imports nothing: a run sets environment variables before it does.

    Raises:
        RecordingError: a package is missing. The message says which, and what to do.
    """
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        instead = "docs/runtime_tracing.md says what to install; tools.trace reads recorded runs and needs none of it"
        raise recording.RecordingError(f"recording needs {', '.join(missing)}, which cannot be imported; {instead}")


def record(configuration: Configuration, path: Path, rank: int = 0, port: int | None = None) -> int:
    """Runs a configuration and, on rank 0, writes its trace. The process must end afterwards.

    Returns:
        0 if every step ran; 1 if one failed, which the output tells. A failed run writes no trace.
    """
    outcome = sglang_runner.Outcome()
    begin = time.monotonic()
    port = port or random.randrange(20000, 60000)
    failed = False
    with _other_ranks(configuration if rank == 0 else None, path, port):
        try:
            sglang_runner.run(configuration, outcome, rank, port)
            if rank == 0:
                calls = recording.recorded_calls(outcome.log, outcome.phases, outcome.launches)
                about = configuration.about(configuration.gpus, outcome.resolved, outcome.versions)
                recording.write(path, about, calls)
        except BaseException:  # SystemExit too: SGLang ends its process where a setting does not fit
            failed = True
            traceback.print_exc()
    for problem in outcome.problems:
        print(f"not wrapped: {problem}")
    state = f"failed at {outcome.reached}" if failed else "recorded"
    print(f"RESULT {configuration.name} rank {rank}: {state} after {time.monotonic() - begin:.0f} s", flush=True)
    return int(failed)


def dump_stacks_when_terminated() -> None:
    """Makes SIGTERM write what each thread was doing before it ends the process, also while a collective call hangs."""
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


@contextmanager
def _other_ranks(configuration: Configuration | None, path: Path, port: int) -> Iterator[None]:
    """The processes of ranks 1 and up, ended with this one; none without a configuration."""
    started: list[subprocess.Popen[bytes]] = []
    if configuration is not None:
        for rank in range(1, configuration.gpus):
            command = [sys.executable, "-m", "tools.runtime_tracing", *sys.argv[1:], "--rank", str(rank)]
            with path.with_suffix(f".rank{rank}.log").open("wb") as log:
                process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
            started.append(process)
    finished = threading.Event()
    if started:
        threading.Thread(target=_end_with, args=(started, finished), daemon=True).start()
    try:
        yield
    finally:
        finished.set()
        for process in started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with(others: Sequence[subprocess.Popen[bytes]], finished: threading.Event) -> None:
    """Ends this process soon after another rank has failed, without which it would wait in its next collective call."""
    while not finished.wait(0.2):
        failed = [rank for rank, process in enumerate(others, 1) if process.poll()]
        if failed and not finished.wait(LAST_WORDS):
            for process in others:
                process.kill()
            print(f"rank {failed[0]} failed with status {others[failed[0] - 1].returncode}; its log says why")
            end(1)


def end(status: int) -> None:
    """Ends the process at once: threads and processes of SGLang would keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
