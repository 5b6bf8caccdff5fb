"""One Definition of each family, exported with its first workload."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.judging import traffic
from flashinfer_trace.judging.export import cases


@dataclasses.dataclass(frozen=True)
class Exported:
    """Where an export lies, what was exported, and what was left out."""

    directory: Path
    definitions: dict[str, Definition]
    left_out: dict[str, str]


@pytest.fixture(scope="session")
def one_each() -> dict[str, Definition]:
    """Family -> the Definition of it with the smallest weights."""
    found: dict[str, Definition] = {}
    for definition in sorted(flashinfer_trace.definitions(), key=lambda one: (input_bytes(one), one.name)):
        found.setdefault(family_of(definition).name, definition)
    return found


def only_first(definition: Definition) -> tuple[traffic.Workload, ...]:
    """Only that: the others cost minutes, and differ in sizes alone."""
    root = definition.root or flashinfer_trace.find_root()
    smallest = traffic.fitting(definition, traffic.load_traffic(root))[0]
    return (traffic._drawn(definition, dataclasses.replace(smallest, quick=True)),)


@pytest.fixture
def first_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of a test take the first workload only."""
    monkeypatch.setattr(cases, "workloads", only_first)


@pytest.fixture(scope="session")
def exported(one_each: dict[str, Definition], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    pytest.importorskip("safetensors.torch", reason="pip install 'flashinfer-trace[verify]'")
    from flashinfer_trace.judging.export.trace_set import write_trace_set

    directory = tmp_path_factory.mktemp("trace_set")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "workloads", only_first)
        summary = write_trace_set(directory, one_each.values(), lambda name: None)
    names = {row["name"] for row in summary.rows}
    chosen = {one.name: one for one in one_each.values() if one.name in names}
    return Exported(directory, chosen, summary.left_out["definitions"])
