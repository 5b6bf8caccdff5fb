"""Records one configuration in this process, and starts the processes of its other GPUs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.kernel_tracing.configuration.listed import Configuration
from tools.runtime_tracing import recording, sglang_runner


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
                recording.write(path, about(configuration, outcome), calls)
        except BaseException:  # SystemExit too: SGLang ends its process where a setting does not fit
            failed = True
            traceback.print_exc()
    for problem in outcome.problems:
        print(f"not wrapped: {problem}")
    state = f"failed at {outcome.reached}" if failed else "recorded"
    print(f"RESULT {configuration.name} rank {rank}: {state} after {time.monotonic() - begin:.0f} s", flush=True)
    return int(failed)


def about(configuration: Configuration, outcome: sglang_runner.Outcome) -> dict[str, Any]:
    """What describes a run: every field of schema/runtime_trace.schema.json but the tables and the calls."""
    return {
        "configuration": configuration.name,
        "model": configuration.model.name,
        "model_config": dict(configuration.model.config),
        "layers": list(configuration.model.layers),
        "server": dict(configuration.server),
        "environment": dict(configuration.environment),
        "prompts": list(configuration.prompts),
        "gpus": configuration.gpus,
        "stand_ins": list(configuration.stand_ins),
        "resolved": outcome.resolved,
        "versions": outcome.versions,
    }


@contextmanager
def _other_ranks(configuration: Configuration | None, path: Path, port: int) -> Iterator[None]:
    """The processes of ranks 1 and up, ended with this one; none if there is no configuration."""
    started = []
    if configuration is not None:
        for rank in range(1, configuration.gpus):
            command = [sys.executable, "-m", "tools.runtime_tracing", *sys.argv[1:], "--rank", str(rank)]
            log = path.with_suffix(f".rank{rank}.log").open("w")
            started.append(subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT))
            log.close()
    try:
        yield
    finally:
        for process in started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def end(status: int) -> None:
    """Ends the process at once: threads and processes of SGLang would keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
