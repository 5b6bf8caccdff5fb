"""The committed trace is what the sources give, and says what a model cannot run."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from release import ROOT, SOURCES, needs_sources

from flashinfer_trace import definitions
from tools.kernel_tracing.configuration.listed import configurations
from tools.kernel_tracing.report import merge, render
from tools.kernel_tracing.report.again import compared
from tools.kernel_tracing.report.evaluation import evaluate_all
from tools.kernel_tracing.report.trace_files import completed, load_traces
from tools.kernel_tracing.rules.categories import OTHER
from tools.kernel_tracing.source.sources import find_sources
from tools.kernel_tracing.verify.check import check
from tools.op_tracing.definitions import covered, definitions_of

TRACES = ROOT / "traces" / "kernel_traces.json"
AGAIN = "write it again: python -m tools.kernel_tracing, then python -m tools.runtime_tracing --mark"
#: What one committed file may have, in bytes.
LARGEST, LARGEST_PAGE = 1_000_000, 200_000


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return load_traces(TRACES)


@pytest.fixture(scope="module")
def again() -> dict[str, Any]:
    """The trace, evaluated again."""
    listed = list(configurations().values())
    return completed(merge.merged(evaluate_all(listed, SOURCES), find_sources(SOURCES), merge.PLATFORM, "all"))


def test_the_committed_trace_follows_its_schema() -> None:
    schema = json.loads((ROOT / "schema" / "kernel_traces.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(TRACES.read_text()))


def test_the_committed_files_are_small() -> None:
    assert TRACES.stat().st_size < LARGEST
    for path in (ROOT / "traces" / "kernels").glob("*.md"):
        assert path.stat().st_size < LARGEST_PAGE, path


def test_the_committed_pages_are_those_of_the_committed_trace(committed: dict[str, Any]) -> None:
    known = covered(definitions())
    directory = ROOT / "traces" / "kernels"
    pages = render.pages(committed, lambda kernel: definitions_of(kernel, known))
    assert {path.name for path in directory.iterdir()} == set(pages)
    for name, text in pages.items():
        assert (directory / name).read_text() == text, "write them again: python -m tools.generate_docs"


@needs_sources
def test_the_committed_trace_is_what_the_sources_give(committed: dict[str, Any], again: dict[str, Any]) -> None:
    assert list(compared(committed, again)) == [], AGAIN


@needs_sources
def test_every_committed_frame_passes_the_independent_check() -> None:
    assert check(json.loads(TRACES.read_text()), SOURCES) == []


def _mutants(trace: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The trace with one false condition, op, undecided test, source, category or frame each."""
    found = []
    for number in range(0, len(trace["kernels"]), 11):
        for field in ("configurations", "phases", "op", "undecided", "source", "category", "frame", "chain"):
            mutant = {**trace, "kernels": list(trace["kernels"])}
            kernel = mutant["kernels"][number] = copy.deepcopy(trace["kernels"][number])
            chain = kernel["chains"][-1]
            name = next(iter(chain["configurations"]))
            if field == "configurations":
                others = [one["name"] for one in trace["configurations"] if one["name"] not in chain["configurations"]]
                chain["configurations"][others[0] if others else "none"] = chain["configurations"].pop(name)
            elif field == "phases":
                chain["configurations"][name] = ["load"] if chain["configurations"][name] != ["load"] else ["decode"]
            elif field == "undecided":
                chain["undecided"] = [*chain["undecided"], "x > 1"]
            elif field == "frame":
                chain["frames"][-1] = {**chain["frames"][-1], "line": chain["frames"][-1]["line"] + 1}
            elif field == "chain":
                kernel["chains"].pop()
            else:
                (chain if field == "op" else kernel)[field] = "jit" if kernel["source"] != "jit" else "triton"
            found.append((f"{kernel['name']}: {field}", mutant))
    return found


@needs_sources
def test_every_mutated_condition_op_source_and_frame_is_noticed(
    committed: dict[str, Any], again: dict[str, Any]
) -> None:
    mutants = _mutants(committed)
    assert len(mutants) >= 50
    assert [name for name, mutant in mutants if not list(compared(mutant, again))] == []


def test_every_kernel_has_a_category(committed: dict[str, Any]) -> None:
    assert [kernel["name"] for kernel in committed["kernels"] if kernel["category"] == OTHER] == []


def test_the_default_path_is_first(committed: dict[str, Any]) -> None:
    default = committed["configurations"][0]["name"]
    assert default == "deepseek_v3-fp8"
    for kernel in committed["kernels"]:
        if any(default in chain["configurations"] for chain in kernel["chains"]):
            assert default in kernel["chains"][0]["configurations"], kernel["name"]
            assert not kernel["chains"][0]["undecided"], kernel["name"]


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "gemma", "qwen", "mixtral", "glm", "mistral", "olmo", "phi"])
def test_a_model_without_latent_attention_has_none_of_its_kernels(committed: dict[str, Any], model: str) -> None:
    names = {one["name"] for one in committed["configurations"] if one["model"].startswith(model)}
    assert names
    latent = [
        (kernel["name"], chain["frames"][0]["file"])
        for kernel in committed["kernels"]
        for chain in kernel["chains"]
        if names & set(chain["configurations"])
        if {"mla", "nsa"} & set(kernel["name"].lower().replace(".", "_").split("_"))
        or any("/nsa" in frame["file"] or "mla_backend" in frame["file"] for frame in chain["frames"])
    ]
    assert latent == []
