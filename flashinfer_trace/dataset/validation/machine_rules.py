"""Rules on the machine that a run of evidence names: facts that are of no one machine, and one that stands out.

A line of evidence names its run, which says when and on which machine it was recorded. Lines of the same moment count
as both before and after each other.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from flashinfer_trace.dataset.evidence_run import TIME_FORMAT
from flashinfer_trace.dataset.validation.problems import quote
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.roots import shared
from flashinfer_trace.kernels.stacks import BEFORE

#: Oldest versions that pyproject.toml allows: an older one cannot have run the harness.
OLDEST = {"hypothesis": "6.135", "python": "3.10", "torch": "2.8"}
#: Builds of torch that use no NVIDIA GPU, by how their local version begins.
_NOT_CUDA = ("cpu", "rocm", "xpu")
#: A value that no other line has stands out if so many lines before it and after it, all at most so far away, agree on
#: another one. After an upgrade no line has the old value, so a new value is never between lines of the old one.
NEIGHBORS, NEAR = 20, timedelta(hours=1)

Place = tuple[str, ...]
GPU_NAME: Place = ("gpu", "name")
CAPABILITY: Place = ("gpu", "compute_capability")


def contradictions(run: Mapping[str, Any], root: Path) -> Iterator[tuple[Place, str]]:
    """Place and text of what cannot be of one machine: figures that were edited, or copied from another run.

    Raises:
        JsonSourceError, KeyError, TypeError, AttributeError: schema/gpus.json cannot be used.
    """
    gpu, libraries, known = run["gpu"], run["libraries"], _capabilities(root)
    if (capability := known.get(gpu["name"], gpu["compute_capability"])) != gpu["compute_capability"]:
        text = f"{gpu['name']} has compute capability {capability}, not {quote(gpu['compute_capability'])}"
        yield CAPABILITY, text
    yield from _builds(run)
    installed_here = {**libraries, "python": run["python"], "torch": run["torch"]}
    for name, needed in {**OLDEST, **BEFORE}.items():
        if name in installed_here and _numbers(installed_here[name]) < _numbers(needed):
            place = ("libraries", name) if name in libraries else (name,)
            yield place, f"{name} is {quote(installed_here[name])}, but evidence is of {needed} or a later version"


def _builds(run: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Finds what the build of torch contradicts."""
    torch, cuda = run["torch"], run["cuda"]
    public, _, local = torch.partition("+")
    build = local.removeprefix("cu")
    if local.startswith(_NOT_CUDA):
        yield ("torch",), f"torch {quote(torch)} is not for CUDA"
    elif build != local and build.isdecimal() and build != cuda.replace(".", ""):
        yield ("cuda",), f"torch {quote(torch)} is not for CUDA {quote(cuda)}"
    if (distribution := run["libraries"].get("torch", public).partition("+")[0]) != public:
        yield (
            ("libraries", "torch"),
            f"torch is {quote(distribution)}, but the run has {quote(torch)}",
        )


def _numbers(version: str) -> list[int]:
    """The numbers of a release, for comparing versions; what follows them (rc1, +cu130) does not count."""
    release = re.match(r"\d{1,9}(?:\.\d{1,9})*", version)
    return [int(number) for number in release.group().split(".")] if release else []


def _capabilities(root: Path) -> Mapping[str, str]:
    """GPU, as CUDA names it -> its compute capability, by schema/gpus.json."""
    table = shared(root, "schema", "gpus.json")
    return _read_capabilities(table, table.stat().st_mtime_ns) if table.exists() else {}


@functools.lru_cache(maxsize=8)
def _read_capabilities(path: Path, _modified: int) -> dict[str, str]:
    return {name: gpu["compute_capability"] for gpu in load_object(path)["gpus"].values() for name in gpu["names"]}


class Line(NamedTuple):
    """A line of evidence: which of which file, counted from 0, and the name of its run."""

    path: Path
    number: int
    run: str


class _Facts(NamedTuple):
    """When a run began, and what it says of its machine by the place in its header."""

    started: datetime
    facts: Mapping[Place, str]


def odd_ones(lines: Sequence[Line], headers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Line, str]]:
    """The lines whose machine the other lines contradict, and what is odd."""
    runs = {name: _facts(headers[name]) for name in {line.run for line in lines}}
    by_gpu: dict[str, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: runs[line.run].started):
        by_gpu[runs[line.run].facts[GPU_NAME]].append(line)
    for gpu, own in by_gpu.items():
        (usual, _), *others = Counter(runs[line.run].facts[CAPABILITY] for line in own).most_common()
        for line in own if others else ():
            if (capability := runs[line.run].facts[CAPABILITY]) != usual:
                yield line, f"{gpu} has compute capability {usual} elsewhere, not {capability}"
        for place in dict.fromkeys(place for line in own for place in runs[line.run].facts):
            yield from _standing_out(place, [line for line in own if place in runs[line.run].facts], runs)
    yield from _standing_out(GPU_NAME, sorted(lines, key=lambda line: runs[line.run].started), runs)


def _facts(header: Mapping[str, Any]) -> _Facts:
    facts: dict[Place, str] = {(name,): header.get(name, "") for name in ("driver", "python", "torch", "cuda")}
    facts |= {(part, name): value for part in ("gpu", "libraries") for name, value in header[part].items()}
    return _Facts(datetime.strptime(header["started_at"], TIME_FORMAT), facts)


def _standing_out(place: Place, lines: Sequence[Line], runs: Mapping[str, _Facts]) -> Iterator[tuple[Line, str]]:
    """The lines, in order of time, whose fact at `place` no other has, amid lines that agree on another one."""
    counts = Counter(runs[line.run].facts[place] for line in lines)
    for line in lines if 1 in counts.values() else ():
        own, value = runs[line.run].started, runs[line.run].facts[place]
        if counts[value] > 1:
            continue
        others = [runs[one.run] for one in lines if one is not line]
        before = [one for one in others if own - NEAR <= one.started <= own][-NEIGHBORS:]
        after = [one for one in others if own <= one.started <= own + NEAR][:NEIGHBORS]
        values = {one.facts[place] for one in (*before, *after)}
        if len(values) == 1 and len(before) == len(after) == NEIGHBORS:
            found, usual = (quote(one) if one else "missing" for one in (value, values.pop()))
            yield line, f"{place[-1]} of its run is {found}, but {usual} in all lines just before and after it"
