"""Dry runs at the price of one import for all: a process imports SGLang, and each run is a fork of it.

SGLang sets environment variables when it completes the arguments of a server, and its modules read some of them when
they are imported. So the first run of a process imports the models itself. The process then imports them under the
variables of that run, and a run that sets others is left to another process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.dry_run import findings, release
from tools.dry_run.run import Process
from tools.runtime_tracing import recording
from tools.runtime_tracing.configurations import Configuration

#: A run that takes longer is ended, in seconds.
LONGEST = 600
#: The CPU seconds and the bytes of memory that a run may need.
SECONDS, MEMORY = 60, 2 << 30
#: The exit status of a run that sets other environment variables than those that the models were imported under.
_OTHER_VARIABLES = 3
#: Variables that differ from run to run and that no module reads when it is imported.
_OF_A_RUN = ("SGLANG_RUN_ID", "SGLANG_CACHE_DIR")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        name: of the run.
        output: everything that was printed.
        record, content: what was recorded, and its file; None and empty if the run failed.
        seconds, memory: what it took, with the import of SGLang: CPU seconds, and bytes at most.
    """

    name: str
    output: str
    record: recording.Recording | None = None
    content: bytes = b""
    seconds: float = 0.0
    memory: int = 0

    @property
    def fits(self) -> bool:
        """Whether it needed no more time and memory than a run may."""
        return self.seconds <= SECONDS and self.memory <= MEMORY

    @property
    def line(self) -> str:
        """The outcome for a reader: what it took, or the end of its output."""
        if self.record is None:
            end = [f"    {line[:500]}" for line in self.output.splitlines()[-30:]]
            return "\n".join([f"{self.name}: failed", *end])
        took = f"{self.name}: recorded, {self.seconds:.0f} s, {self.memory / 1e9:.1f} GB"
        return took if self.fits else f"{took}: more than {SECONDS} s or {MEMORY / 1e9:.1f} GB"


def run_many(runs: Mapping[str, tuple[Configuration, str]], jobs: int = 1) -> Iterator[Outcome]:
    """Runs plans, in processes that import SGLang once for each release, kind of GPU and environment.

    Args:
        runs: name -> plan, and the release of SGLang that runs it.
        jobs: runs at a time.

    Raises:
        ReleaseError: a release is not known, or not installed.
    """
    groups: dict[str, list[str]] = {}
    for name, (plan, version) in runs.items():
        _installed(version)
        key = (version, plan.gpu, sorted(plan.environment.items()), plan.stand_ins)
        groups.setdefault(repr(key), []).append(name)
    for names in groups.values():
        while names:
            outcomes = _in_process({name: runs[name] for name in names}, jobs)
            yield from (one for one in outcomes if one is not None)
            names = [name for name, one in zip(names, outcomes, strict=True) if one is None]


def _installed(version: str) -> release.Release:
    chosen = release.read(version)
    if not chosen.site.exists():
        command = f"python -m tools.fetch_sources --install --release {version}"
        raise release.ReleaseError(f"{chosen.site}: SGLang {version} is not installed; run {command}")
    return chosen


def _in_process(runs: Mapping[str, tuple[Configuration, str]], jobs: int) -> list[Outcome | None]:
    """Runs plans in a new process; None for those that another process must run."""
    with tempfile.TemporaryDirectory(prefix="dry-run-") as directory:
        folder = Path(directory)
        version = next(iter(runs.values()))[1]
        (folder / "plans").write_bytes(pickle.dumps(([plan for plan, _ in runs.values()], version, jobs)))
        command = [sys.executable, "-c", f"from tools.dry_run.many import serve; serve({directory!r})"]
        with (folder / "output").open("wb") as output:
            root = Path(__file__).resolve().parents[2]
            subprocess.run(command, cwd=root, stdout=output, stderr=subprocess.STDOUT, check=False)
        return [_outcome(name, folder, folder / str(index)) for index, name in enumerate(runs)]


def _outcome(name: str, shared: Path, own: Path) -> Outcome | None:
    """The outcome by the files in a run's folder. If it did not begin, its output is that of the importing process."""
    took = json.loads((own / "took").read_text(encoding="utf-8")) if (own / "took").exists() else {"status": 1}
    if took["status"] == _OTHER_VARIABLES:
        return None
    text = next(path for path in (own / "output", shared / "output") if path.exists()).read_text(errors="replace")
    if took["status"]:
        return Outcome(name, text)
    record = own / "record.json"
    return Outcome(name, text, recording.read(record), record.read_bytes(), took["seconds"], took["memory"])


def serve(directory: str) -> None:
    """Imports SGLang and forks for each plan of a folder; what each leaves is in a folder of its own."""
    folder = Path(directory)
    plans, version, jobs = pickle.loads((folder / "plans").read_bytes())
    process = Process(_installed(version))
    process.begin(plans[0], folder)
    before = dict(os.environ)
    imported: _Variables | None = None
    running: dict[int, Path] = {}
    for index, plan in enumerate(plans):
        own = folder / str(index)
        own.mkdir()
        if not (child := os.fork()):
            os.environ.clear()
            os.environ.update(before)
            _child(process, plan, own, imported)
        running[child] = own
        if imported is None:
            _wait(running)
            if index + 1 < len(plans):
                imported = _import_models(process, own / "variables")
        while len(running) >= jobs:
            _wait(running)
    while running:
        _wait(running)


class _Variables(NamedTuple):
    """The environment variables that models were imported under, and the names of those that these imports set."""

    values: Mapping[str, str]
    by_imports: set[str]

    def fit(self, others: Mapping[str, str]) -> bool:
        """Whether a run has the same variables: those that imports set it may not have."""
        names = self.values.keys() | others.keys()
        different = {name for name in names if self.values.get(name) != others.get(name)}
        return different <= {*_OF_A_RUN, *(self.by_imports - others.keys())}


def _import_models(process: Process, path: Path) -> _Variables | None:
    """Imports the models under the environment variables of a run; None if SGLang refused its server."""
    if not path.exists():
        return None
    os.environ.clear()
    os.environ.update(json.loads(path.read_text(encoding="utf-8")))
    by_imports: set[str] = set()
    with _noted(by_imports):
        process.import_models()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    return _Variables(dict(os.environ), by_imports)


@contextlib.contextmanager
def _noted(names: set[str]) -> Iterator[None]:
    """Collects the environment variables that are set, also to what they are already."""
    kind: Any = type(os.environ)
    real = {name: getattr(kind, name) for name in ("__setitem__", "setdefault")}

    def noting(method: Any) -> Any:
        def call(self: Any, key: str, value: str) -> Any:
            names.add(key)
            return method(self, key, value)

        return call

    for name, method in real.items():
        setattr(kind, name, noting(method))
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(kind, name, method)


def _child(process: Process, plan: Configuration, own: Path, imported: _Variables | None) -> None:
    """Runs a plan, and ends the process: 0 recorded, 1 failed, or `_OTHER_VARIABLES`."""
    with (own / "output").open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    signal.alarm(LONGEST)
    refused = ""
    try:
        server = process.resolve(plan, own)
        if imported is None:
            (own / "variables").write_text(json.dumps(dict(os.environ)), encoding="utf-8")
        elif not imported.fit(os.environ):
            os._exit(_OTHER_VARIABLES)
        about, calls = process.run(plan, server)
    except BaseException:  # SystemExit too: SGLang ends its process where a setting does not fit
        refused = traceback.format_exc()
    found = findings.lines()
    if not refused and not found:
        recording.write(own / "record.json", about, calls)
    print("\n".join([*found, refused.rstrip()]), file=sys.stderr, flush=True)
    os._exit(int(bool(refused or found)))  # threads of SGLang would keep the process


def _wait(running: dict[int, Path]) -> None:
    """Until one of the forks ends; writes its exit status, and what it took."""
    child, status, used = os.wait3(0)
    own = running.pop(child)
    imports = resource.getrusage(resource.RUSAGE_SELF)  # a run alone needs them too
    seconds = sum(one.ru_utime + one.ru_stime for one in (imports, used))
    took = {"status": os.waitstatus_to_exitcode(status), "seconds": seconds, "memory": used.ru_maxrss << 10}
    (own / "took").write_text(json.dumps(took), encoding="utf-8")
    if os.WIFSIGNALED(status):
        with (own / "output").open("a", encoding="utf-8") as file:
            print(f"ended by {signal.Signals(os.WTERMSIG(status)).name}", file=file)
