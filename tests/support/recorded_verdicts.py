"""`pytest -m gpu_harness tests/judging --record-verdicts=FILE`: what the judge says of cheats and of real kernels.

Each test leaves its verdict in the properties of its report, so one process writes the file, whichever made the
verdict. The file is written anew after each test: a run that is ended leaves what it found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import all_families
from flashinfer_trace.format.files import json_text, write_text
from flashinfer_trace.judging.bench.environment import environment
from flashinfer_trace.judging.verdict import Verdict

#: A test's property with its verdict, and the subject of it.
PROPERTY = "verdict"
#: Whom verdicts are on, in the order of the file.
KINDS = ("cheats", "honest", "kernels")
#: How often a kernel is judged for which other workers leave the GPU no memory, and how many seconds apart.
ATTEMPTS, PAUSE = 8, 10.0


def with_memory(judged: Callable[[], Verdict], pause: float = PAUSE) -> Verdict:
    """The verdict of a call of `judged`, after others that failed only because the GPU had no memory left: for the
    kernel, or for the judge."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(torch.OutOfMemoryError):
            verdict = judged()
            if verdict.failure is None or not verdict.failure.out_of_memory:
                return verdict
        torch.cuda.empty_cache()
        time.sleep(pause)
    return judged()


def machine(device: str) -> dict[str, Any]:
    """The date, and the machine with its software, as JSON; which of many cards of one model it was is left out."""
    found = dataclasses.asdict(environment(device))
    name = "gpu" if found["capability"] else "processor"
    known = {name: found.pop("gpu"), **{key: value for key, value in found.items() if value and key != "card"}}
    return {"date": datetime.now(timezone.utc).date().isoformat(), "environment": known}


def package_sha256() -> str:
    """SHA-256 of all code of the package, under its names: which version of it judged."""
    package = Path(flashinfer_trace.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()


def libraries() -> dict[str, str]:
    """The versions of the installed libraries that real kernels are of."""
    found = {}
    for name in sorted({kernel.library for family in all_families() for kernel in family.kernels}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_of(device: str) -> dict[str, Any]:
    """The origin of verdicts: the date, the machine, the libraries, and the version of the package."""
    return {**machine(device), "libraries": libraries(), "package_sha256": package_sha256()}


def entry(kind: str, name: str, verdict: Verdict) -> dict[str, Any]:
    """A line of the file.

    Args:
        kind: one of `KINDS`.
        name: of the cheat, the honest kernel, or the real one.
    """
    failure = {} if verdict.failure is None else {"failure": verdict.failure.kind}
    return {
        **{"kind": kind, "name": name, "definition": verdict.definition, "grade": verdict.grade},
        **{**failure, "cases": verdict.cases, "seconds": round(verdict.seconds, 2)},
    }


class Recorder:
    """Writes the verdicts that tests leave in their reports into a file, replacing older ones.

    Verdicts on another machine, or of another version of the code, are not kept next to new ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of each phase of each test; in the process that collects them."""
        if report.when == "call":
            for name, value in report.user_properties:
                if name == PROPERTY:
                    assert isinstance(value, dict)
                    self.add(value["run"], value["entry"])

    def add(self, run: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Adds a verdict, and writes the file."""
        before = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        same = all(before.get(name) == value for name, value in run.items() if name != "date")
        lines = {_key(one): one for one in [*(before["verdicts"] if same else []), found]}
        ordered = [lines[key] for key in sorted(lines)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, _text({**run, "verdicts": ordered}))


def _key(line: Mapping[str, Any]) -> tuple[int, str, str]:
    return KINDS.index(line["kind"]), line["definition"], line["name"]


def _text(document: Mapping[str, Any]) -> str:
    """The file: a line for each verdict."""
    head = json_text({"$schema": "verdicts.schema.json", **document, "verdicts": []})
    lines = ",\n".join(f"    {json.dumps(one)}" for one in document["verdicts"])
    return head.replace('"verdicts": []', f'"verdicts": [\n{lines}\n  ]')
