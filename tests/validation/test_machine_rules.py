"""Machines that evidence names: what is of no one machine is refused, and what stands out among the other runs."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from flashinfer_trace.dataset.evidence_run import TIME_FORMAT, fields_of, line_of, run_name
from flashinfer_trace.dataset.validation import Problem
from flashinfer_trace.dataset.validation.machine_rules import NEIGHBORS, OLDEST
from flashinfer_trace.format.files import json_line

from .conftest import FIXTURES, REPOSITORY, Dataset, read_fixture

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Json = dict[str, Any]
EVIDENCE = "evidence/rmsnorm/rmsnorm_h8.jsonl"
FILES = read_fixture(FIXTURES / "valid" / "verified.json")["files"]
LINE: Json = {**fields_of(json.loads(FILES[EVIDENCE])), "library": "flashinfer-python"}
HEADER: Json = next(content for name, content in FILES.items() if name.startswith("evidence/runs/"))
LIBRARIES = {"flashinfer-python": "0.6.12", "hypothesis": "6.168.3", "sglang-kernel": "0.4.2", "triton": "3.6.0"}
STARTED = datetime(2026, 11, 22, 17, 0, 0)


def runs(count: int, start: datetime = STARTED, **facts: Any) -> list[Json]:
    """Headers of runs of one line each, that begin a second after each other, with other facts of the machine."""
    found = []
    for number in range(count):
        started = (start + timedelta(seconds=number)).strftime(TIME_FORMAT)
        same = {"driver": "580.159.04", "libraries": dict(LIBRARIES)}
        found.append(copy.deepcopy(HEADER) | same | facts | {"started_at": started})
    return found


def problems(dataset: Dataset, minimal: Json, headers: list[Json]) -> list[Problem]:
    """Problems with lines of these runs, each of another kernel."""
    dataset.add(minimal)
    lines = []
    for number, header in enumerate(headers):
        dataset.write(f"evidence/runs/{run_name(header)}.json", header)
        lines.append({**LINE, "kernel": f"flashinfer.norm.kernel{number}", "run": run_name(header)})
    dataset.write(EVIDENCE, "".join(json_line(line_of(line)) for line in lines))
    return dataset.problems()


def environment(**fields: Any) -> Callable[[Json], object]:
    return lambda header: header.update(fields)


def libraries(**fields: str) -> Callable[[Json], object]:
    return lambda header: header["libraries"].update(
        {name.replace("_", "-"): version for name, version in fields.items()}
    )


#: Runs that one edit makes impossible: the edit, the place in its header, and the message.
CONTRADICTIONS: dict[str, tuple[Callable[[Json], object], str, str]] = {
    "another distribution of torch": (
        libraries(torch="2.12.0"),
        "libraries/torch",
        'torch is "2.12.0", but the run has "2.11.0+cu130"',
    ),
    "another CUDA": (environment(cuda="12.8"), "cuda", 'torch "2.11.0+cu130" is not for CUDA "12.8"'),
    "a build of torch for another CUDA": (environment(torch="2.11.0+cu128"), "cuda", "is not for CUDA"),
    "a build of torch for a CPU": (environment(torch="2.11.0+cpu"), "torch", "is not for CUDA"),
    "another capability": (
        lambda e: e["gpu"].update(compute_capability="10.0"),
        "gpu/compute_capability",
        'NVIDIA H200 has compute capability 9.0, not "10.0"',
    ),
    "a Python that cannot run the harness": (environment(python="3.9.1"), "python", "python is"),
    "a torch that cannot run the harness": (environment(torch="2.7.1+cu130"), "torch", "of 2.8 or a later"),
    "an old hypothesis": (libraries(hypothesis="6.99.9"), "libraries/hypothesis", "of 6.135 or a later"),
    "an older library than the pinned one": (
        libraries(sglang_kernel="0.4.1"),
        "libraries/sglang-kernel",
        'sglang-kernel is "0.4.1", but evidence is of 0.4.2 or a later version',
    ),
    "a driver that is no version": (environment(driver="newest"), "driver", "driver is"),
    "a CUDA that is no version": (environment(cuda="None"), "cuda", "cuda is"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_facts_of_no_one_machine_are_refused(dataset: Dataset, minimal: Json, name: str) -> None:
    (entry,) = runs(1)
    change, place, message = CONTRADICTIONS[name]
    change(entry)
    (problem,) = problems(dataset, minimal, [entry])
    assert (problem.rule, problem.file) == ("evidence-invalid", f"evidence/runs/{run_name(entry)}.json")
    assert problem.pointer == f"/{place}" and message in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    "change",
    [
        environment(driver="590.44.01", python="3.13.1", libraries={**LIBRARIES, "hypothesis": "6.170.15"}),
        environment(torch="2.12.0a0+git1234", cuda="13.1"),
        environment(gpu={"name": "NVIDIA B200", "compute_capability": "10.0"}),
        libraries(sglang_kernel="0.5.0rc1", triton="3.5.0"),
    ],
)
def test_a_newer_machine_or_another_gpu_is_accepted(
    dataset: Dataset, minimal: Json, change: Callable[[Json], object]
) -> None:
    (entry,) = runs(1)
    change(entry)
    assert problems(dataset, minimal, [entry]) == []


#: One edit of one run amid others: the edit and the place.
STANDING_OUT: dict[str, tuple[Callable[[Json], object], str]] = {
    "driver": (environment(driver="580.159.05"), "driver"),
    "no driver": (lambda e: e.pop("driver"), "driver"),
    "python": (environment(python="3.12.4"), "python"),
    "torch": (environment(torch="2.11.1+cu130"), "torch"),
    "hypothesis": (libraries(hypothesis="6.170.15"), "hypothesis"),
    "triton": (libraries(triton="3.6.1"), "triton"),
    "GPU": (lambda e: e["gpu"].update(name="NVIDIA H100 80GB HBM3"), "name"),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", STANDING_OUT)
def test_a_fact_that_one_line_alone_has_amid_others_is_refused(
    dataset: Dataset, minimal: Json, name: str, together: bool
) -> None:
    """Also of a header that is a copy of another one but for that fact, and so began in the same moment."""
    headers = runs(2 * NEIGHBORS + 1)
    for header in headers if together else ():
        header["started_at"] = STARTED.strftime(TIME_FORMAT)
    assert problems(dataset, minimal, headers) == []
    change, place = STANDING_OUT[name]
    change(headers[NEIGHBORS])
    (problem,) = problems(dataset, minimal, headers)
    assert (problem.rule, problem.file) == ("evidence-invalid", EVIDENCE)
    assert (problem.pointer, problem.line) == (f"/{NEIGHBORS}/1", NEIGHBORS + 1)
    assert re.match(rf"{place} of its run is .* in all lines just before and after it", problem.message)
    assert dataset.problems(dataset.root / EVIDENCE) == [], "among the runs of one file, it is no exception"


def test_one_gpu_has_one_capability_also_if_nothing_else_knows_it(dataset: Dataset, minimal: Json) -> None:
    headers = runs(3, gpu={"name": "Test GPU", "compute_capability": "9.0"})
    assert problems(dataset, minimal, headers) == []
    headers[1]["gpu"] = {"name": "Test GPU", "compute_capability": "12.0"}
    (problem,) = problems(dataset, minimal, headers)
    assert (problem.file, problem.pointer) == (EVIDENCE, "/1/1")
    assert problem.message == "Test GPU has compute capability 9.0 elsewhere, not 12.0"


def test_new_runs_are_accepted_among_older_ones(dataset: Dataset, minimal: Json) -> None:
    """After an upgrade: many runs, a single one minutes later, and another machine on the same day."""
    newer = {"driver": "590.44.01", "libraries": {**LIBRARIES, "hypothesis": "6.170.15"}}
    old = runs(3 * NEIGHBORS)
    after = STARTED + timedelta(minutes=5)
    assert problems(dataset, minimal, [*old, *runs(1, after, **newer)]) == []
    assert problems(dataset, minimal, [*old, *runs(3 * NEIGHBORS, after, **newer)]) == []
    other = runs(1, after, gpu={"name": "NVIDIA B200", "compute_capability": "10.0"}, **newer)
    assert problems(dataset, minimal, [*old, *other, *runs(3 * NEIGHBORS, STARTED + timedelta(hours=2))]) == []


def test_the_oldest_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [f"python{project['requires-python']}", *project["optional-dependencies"]["verify"]]
    lowest = dict(re.match(r"(\w+)>=([\d.]+)", each).groups() for each in needed)  # type: ignore[union-attr]
    assert {name: lowest[name] for name in OLDEST} == OLDEST
