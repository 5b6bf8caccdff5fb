"""Rules on the machine that a run of evidence names: facts that are of no one machine, and one that stands out."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from flashinfer_trace.dataset.evidence_run import TIME_FORMAT
from flashinfer_trace.dataset.validation.problems import quote
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.roots import shared
from flashinfer_trace.kernels.names import load_kernel_paths

__all__ = ["OLDEST", "Known", "Machines", "known_facts"]

#: Oldest versions that pyproject.toml allows: an older one cannot have run the harness.
OLDEST = {"hypothesis": "6.135", "python": "3.10", "torch": "2.8"}
#: Builds of torch that use no NVIDIA GPU, by how their local version begins.
_NOT_CUDA = ("cpu", "rocm", "xpu")
#: A value that no other run has stands out if so many runs before it and after it, all at most so far away, agree on
#: another one. After an upgrade no run has the old value, so that a new value is never between runs of the old one.
NEIGHBOURS, NEAR = 20, timedelta(hours=1)

Place = tuple[str, ...]
GPU_NAME: Place = ("environment", "gpu", "name")
CAPABILITY: Place = ("environment", "gpu", "compute_capability")


class Known(NamedTuple):
    """What the data beside the evidence says of machines.

    Attributes:
        capabilities: GPU, as CUDA names it -> its compute capability (schema/gpus.json).
        pinned: distribution -> the version whose kernels schema/kernel_paths.json lists.
    """

    capabilities: Mapping[str, str]
    pinned: Mapping[str, str]

    def contradictions(self, run: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
        """Place and text of what cannot be of one machine: figures that were edited, or copied from another run."""
        environment, kernel = run["environment"], run["kernel"]
        gpu, libraries = environment["gpu"], environment["libraries"]
        library, version = kernel["library"], kernel["version"]
        if (installed := libraries.get(library)) != version:
            found = f"has {quote(installed)}" if installed else "does not list it"
            yield ("kernel", "version"), f"{library} is {quote(version)}, but the environment {found}"
        if (capability := self.capabilities.get(gpu["name"], gpu["compute_capability"])) != gpu["compute_capability"]:
            yield (
                CAPABILITY,
                f"{gpu['name']} has compute capability {capability}, not {quote(gpu['compute_capability'])}",
            )
        yield from _builds(environment)
        installed_here = {**libraries, "python": environment["python"], "torch": environment["torch"]}
        for name, needed in {**OLDEST, **self.pinned}.items():
            if name in installed_here and _numbers(installed_here[name]) < _numbers(needed):
                place = ("libraries", name) if name in libraries else (name,)
                text = f"{name} is {quote(installed_here[name])}, but evidence is of {needed} or a later version"
                yield ("environment", *place), text


def _builds(environment: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """What the build of torch contradicts."""
    torch, cuda = environment["torch"], environment["cuda"]
    public, _, local = torch.partition("+")
    build = local.removeprefix("cu")
    if local.startswith(_NOT_CUDA):
        yield ("environment", "torch"), f"torch {quote(torch)} is not for CUDA"
    elif build != local and build.isdecimal() and build != cuda.replace(".", ""):
        yield ("environment", "cuda"), f"torch {quote(torch)} is not for CUDA {quote(cuda)}"
    if (distribution := environment["libraries"].get("torch", public).partition("+")[0]) != public:
        yield (
            ("environment", "libraries", "torch"),
            f"torch is {quote(distribution)}, but the environment has {quote(torch)}",
        )


def _numbers(version: str) -> list[int]:
    """The numbers of a release, by which versions are compared; what follows them (rc1, +cu130) does not count."""
    release = re.match(r"\d{1,9}(?:\.\d{1,9})*", version)
    return [int(number) for number in release.group().split(".")] if release else []


def known_facts(root: Path) -> Known:
    """What the dataset at `root` says of machines; nothing of what it lacks.

    Raises:
        KernelPathsError: schema/kernel_paths.json is unusable.
        JsonSourceError, KeyError, TypeError, AttributeError: schema/gpus.json is.
    """
    table = shared(root, "schema", "gpus.json")
    capabilities = _capabilities(table, table.stat().st_mtime_ns) if table.exists() else {}
    return Known(capabilities, dict(each.split(" ", 1) for each in load_kernel_paths(root).versions.values()))


@functools.lru_cache(maxsize=8)
def _capabilities(path: Path, _modified: int) -> dict[str, str]:
    """The compute capability of each GPU that schema/gpus.json names."""
    return {name: gpu["compute_capability"] for gpu in load_object(path)["gpus"].values() for name in gpu["names"]}


@dataclass(frozen=True)
class _Run:
    """A run of the evidence: which entry of which file, when it ended, and its facts by their place in the entry."""

    path: Path
    index: int
    ended: str
    facts: Mapping[Place, str]


class Machines:
    """The machines of a whole dataset's evidence, each run of which is compared with the others."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def add(self, path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
        """Takes in the runs of a file that follows the schema."""
        for index, entry in enumerate(entries):
            environment = entry["environment"]
            software = {name: environment.get(name, "") for name in ("driver", "python", "torch", "cuda")}
            parts: dict[Place, Mapping[str, str]] = {
                ("environment",): software,
                ("environment", "gpu"): environment["gpu"],
                ("environment", "libraries"): environment["libraries"],
            }
            facts = {(*place, name): value for place, part in parts.items() for name, value in part.items()}
            self._runs.append(_Run(path, index, entry["recorded_at"], facts))

    def odd_ones(self) -> Iterator[tuple[Path, int, Place, str]]:
        """File, entry, place and text of what the other runs contradict."""
        by_gpu: dict[str, list[_Run]] = defaultdict(list)
        for run in sorted(self._runs, key=lambda run: run.ended):
            by_gpu[run.facts[GPU_NAME]].append(run)
        for gpu, runs in by_gpu.items():
            yield from _other_capabilities(gpu, runs)
            for place in dict.fromkeys(place for run in runs for place in run.facts):
                yield from _standing_out(place, [run for run in runs if place in run.facts])
        yield from _standing_out(GPU_NAME, [run for runs in by_gpu.values() for run in runs])


def _other_capabilities(gpu: str, runs: Sequence[_Run]) -> Iterator[tuple[Path, int, Place, str]]:
    (usual, _), *others = Counter(run.facts[CAPABILITY] for run in runs).most_common()
    for run in runs if others else ():
        if (capability := run.facts[CAPABILITY]) != usual:
            yield run.path, run.index, CAPABILITY, f"{gpu} has compute capability {usual} elsewhere, not {capability}"


def _standing_out(place: Place, runs: Sequence[_Run]) -> Iterator[tuple[Path, int, Place, str]]:
    """The runs whose fact at `place` no other run has, amid runs that agree on another one."""
    counts = Counter(run.facts[place] for run in runs)
    if 1 not in counts.values():
        return
    runs = sorted(runs, key=lambda run: run.ended)
    for number, run in enumerate(runs):
        around = runs[max(number - NEIGHBOURS, 0) : number] + runs[number + 1 : number + 1 + NEIGHBOURS]
        if counts[run.facts[place]] > 1 or len(around) < 2 * NEIGHBOURS:
            continue
        first, ended, last = (datetime.strptime(one.ended, TIME_FORMAT) for one in (around[0], run, around[-1]))
        values = {one.facts[place] for one in around}
        if len(values) == 1 and ended - first <= NEAR and last - ended <= NEAR:
            found, usual = (quote(value) if value else "missing" for value in (run.facts[place], values.pop()))
            text = f"{place[-1]} is {found}, but {usual} in all runs just before and after it"
            yield run.path, run.index, place, text
