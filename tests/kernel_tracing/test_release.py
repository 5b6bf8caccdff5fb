"""The pinned release of sglang: the committed trace matches the sources, and every frame of it is checked."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from release import ROOT, SOURCES, analysis, needs_sources
from tools.kernel_tracing.report.trace import document
from tools.resolver_benchmark.defined_names import calls_of

from tools.kernel_tracing.report import render
from tools.kernel_tracing.report.trace_files import dumps
from tools.kernel_tracing.verify import check

TRACES = ROOT / "traces" / "kernel_traces.json"
REPORT = ROOT / "traces" / "kernel_traces.md"
CHAINS = json.loads((ROOT / "tests" / "kernel_tracing" / "chains_0_5_8.json").read_text())["chains"]
AGAIN = "write them again: python -m tools.kernel_tracing --model deepseek --sources .sources"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(TRACES.read_text())
    return trace


def test_the_committed_trace_follows_its_schema(committed: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "schema" / "kernel_traces.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(committed)


def test_the_committed_report_is_that_of_the_committed_trace(committed: dict[str, Any]) -> None:
    assert render.render(committed) == REPORT.read_text(), AGAIN


@needs_sources
def test_the_committed_trace_is_what_the_sources_give() -> None:
    traced = document(analysis("deepseek"))
    assert traced.pop("problems") == []
    assert dumps(traced) == TRACES.read_text(), AGAIN


@needs_sources
def test_every_committed_frame_passes_the_independent_check(committed: dict[str, Any]) -> None:
    assert check.check(committed, SOURCES) == []


@needs_sources
@pytest.mark.parametrize("chain", CHAINS, ids=[f"{chain['kernel']}: {chain['note']}" for chain in CHAINS])
def test_chains_that_were_verified_by_reading_are_in_the_call_graph(chain: dict[str, Any]) -> None:
    solved = analysis("deepseek")
    kernels = [one for one in solved.kernels if (one.name, one.source) == (chain["kernel"], chain["source"])]
    places = [(frame["file"], frame["line"], frame["function"]) for frame in chain["frames"]]
    assert any(solved.chains.holds(kernel, places) for kernel in kernels)
    assert not any(solved.chains.holds(kernel, places[1:]) for kernel in kernels)


def test_chains_are_complete() -> None:
    assert len(CHAINS) >= 12
    for chain in CHAINS:
        last = [frame for frame in chain["frames"] if not frame.get("optional")][-1]
        assert last["function"].rpartition(".")[2] in ("forward", "forward_batch_generation")
        assert {frame.keys() >= {"file", "line", "function", "call", "condition"} for frame in chain["frames"]} == {
            True
        }


@needs_sources
def test_the_chains_fit_the_release() -> None:
    calls: dict[str, dict[tuple[int, str], str]] = {}
    for chain in CHAINS:
        for frame in chain["frames"]:
            file = frame["file"]
            if file not in calls:
                calls[file] = calls_of((SOURCES / file).read_text(encoding="utf-8"))
            called = "".join(frame["call"].split())
            callers = {
                caller
                for (line, call), caller in calls[file].items()
                if line == frame["line"] and "".join(call.split()) == called
            }
            assert callers == {frame["function"]}, f"{chain['kernel']}: {file}:{frame['line']} {frame['call']}"
