"""The committed trace is what the sources give, and says what a model cannot run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from built_pages import pages
from release import ROOT, SOURCES, needs_sources

from flashinfer_trace import definitions
from tools.kernel_tracing.__main__ import main
from tools.kernel_tracing.configuration.listed import configurations
from tools.kernel_tracing.configuration.requested import ConfigurationError, check_fields
from tools.kernel_tracing.report import by_model, merge, render
from tools.kernel_tracing.report.again import compared
from tools.kernel_tracing.report.arguments import chosen
from tools.kernel_tracing.report.evaluation import Evaluation, evaluate_all
from tools.kernel_tracing.report.trace_files import completed, dumps, load_traces
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.rules.categories import OTHER
from tools.kernel_tracing.source.sources import find_sources
from tools.kernel_tracing.verify.check import check
from tools.op_tracing.__main__ import MODEL
from tools.op_tracing.__main__ import dumps as dumps_ops
from tools.op_tracing.check import check as check_ops
from tools.op_tracing.definitions import covered, page_cover
from tools.op_tracing.trace import trace
from tools.runtime_tracing.compare import marked
from tools.runtime_tracing.recording import read_all
from tools.shared.markdown import escape

TRACES = ROOT / "traces" / "kernel_traces.json"
OP_TRACES = ROOT / "traces" / "op_traces.json"
AGAIN = "write it again: python -m tools.kernel_tracing, then python -m tools.runtime_tracing --mark"
#: What one committed file may have, in bytes.
LARGEST, LARGEST_PAGE = 1_000_000, 200_000


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return load_traces(TRACES)


@pytest.fixture(scope="module")
def evaluations() -> list[Evaluation]:
    """All listed configurations, evaluated again: the most expensive step of these tests, so it is done once."""
    return evaluate_all(list(configurations().values()), SOURCES)


@pytest.fixture(scope="module")
def again(evaluations: list[Evaluation]) -> dict[str, Any]:
    """The trace of the evaluations."""
    return completed(merge.merged(evaluations, find_sources(SOURCES), merge.PLATFORM, "all"))


def test_the_committed_trace_follows_its_schema() -> None:
    schema = json.loads((ROOT / "schema" / "kernel_traces.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(TRACES.read_text()))


def test_the_committed_files_are_small() -> None:
    assert TRACES.stat().st_size < LARGEST


def test_the_pages_are_those_of_the_committed_trace_and_small(committed: dict[str, Any]) -> None:
    built = render.pages(committed, page_cover(definitions(), covered(definitions())))
    assert {f"traces/kernels/{name}" for name in built} == {
        name for name in pages() if name.startswith("traces/kernels")
    }
    assert all(len(text.encode()) < LARGEST_PAGE for text in built.values())


def test_the_index_counts_the_chains_of_each_entry_point(committed: dict[str, Any]) -> None:
    _, _, section = render.pages(committed, render.Cover())[render.INDEX].partition("## Entry points\n")
    rows = [line.split("|") for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert len(rows) >= 5 and rows[0][1].startswith(" `ModelRunner.forward`")
    assert sum(int(cells[2]) for cells in rows) == sum(len(kernel["chains"]) for kernel in committed["kernels"])


def test_the_page_of_models_lists_the_kernels_of_each(committed: dict[str, Any]) -> None:
    """Qwen3's norm of queries and keys, which Qwen2.5 lacks, and what only its mixture of experts calls."""
    page = render.pages(committed, render.Cover())[by_model.PAGE]
    found = {}
    for section in page.split("\n## ")[1:]:
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| [")]
        found[section.partition("\n")[0]] = {row[0].removeprefix("| [").partition("]")[0]: row[3] for row in rows}
    assert set(found) == {one["model"] for one in committed["configurations"]}
    assert found["qwen3_8b"]["qknorm"] == "enable_deterministic_inference=false" and "qknorm" not in found["qwen2.5_7b"]
    assert found["qwen3_8b"]["run_rope"] == "always"
    assert "topk_softmax" in found["qwen3_30b_a3b"] and "topk_softmax" not in found["qwen3_8b"]
    of = {one["name"]: one["model"] for one in committed["configurations"]}
    uses = {
        (of[name], kernel["source"], kernel["definition"]["file"], kernel["definition"]["line"], kernel["name"])
        for kernel in committed["kernels"]
        for chain in kernel["chains"]
        for name in chain["configurations"]
    }
    assert page.count("\n| [") == len(uses)


def test_what_a_graph_captures_has_the_phase_that_replays_it() -> None:
    frames = [{"function": "forward"}, {"function": serving_steps.CAPTURE}, {"function": "ModelRunner.__init__"}]
    assert by_model.shown_phases({"frames": frames}, ["load"]) == ["decode (captured)"]
    assert by_model.shown_phases({"frames": frames[:1]}, ["load", "decode"]) == ["load", "decode"]
    assert by_model.CAPTURED in by_model.PHASES and by_model.CAPTURED in render.GRAPHS


@needs_sources
def test_the_committed_trace_is_what_the_sources_give(committed: dict[str, Any], again: dict[str, Any]) -> None:
    assert list(compared(committed, again)) == [], AGAIN  # what differs, one line each
    runs = read_all(ROOT / "traces" / "runtime")
    assert dumps(marked(copy.deepcopy(again), runs)) == TRACES.read_text(), AGAIN


@needs_sources
def test_the_committed_op_trace_is_what_the_sources_give(evaluations: list[Evaluation]) -> None:
    names = {one.name for one in chosen(MODEL)}
    of_model = [one for one in evaluations if one.configuration.name in names]
    again = "write it again: python -m tools.op_tracing --traces traces/kernel_traces.json"
    assert dumps_ops(trace(of_model, find_sources(SOURCES), merge.PLATFORM, MODEL)) == OP_TRACES.read_text(), again


@needs_sources
def test_every_listed_model_is_in_execution_order(committed: dict[str, Any], evaluations: list[Evaluation]) -> None:
    """The order of one graph for all configurations is that of each, so it is also that of a graph for fewer."""
    ops = trace(evaluations, find_sources(SOURCES), merge.PLATFORM, committed["model"])
    assert not [text for text in check_ops(ops, committed, evaluations) if text.startswith("graph: ")]


@needs_sources
def test_the_report_of_one_model_leaves_the_committed_trace_alone(tmp_path: Path) -> None:
    before, report, data = TRACES.read_bytes(), tmp_path / "glm.md", tmp_path / "glm.json"
    for written in (["--out", str(report)], ["--out", str(report), "--json", str(data)]):
        assert main(["--model", "glm4_9b", "--sources", str(SOURCES), *written]) == 0
    text = report.read_text(encoding="utf-8")
    kernels = [kernel["name"] for kernel in load_traces(data)["kernels"]]
    assert len(kernels) > 10 and all(f"\n## {escape(name)}\n" in text for name in kernels)
    assert "do not edit" not in text and "Definitions:" not in text
    assert TRACES.read_bytes() == before


@needs_sources
def test_server_arguments_are_those_of_the_release() -> None:
    sources = find_sources(SOURCES)
    for one in configurations().values():
        check_fields(one.server, sources)
    with pytest.raises(
        ConfigurationError, match=r"atention_backend: .* no such field; did you mean attention_backend\?"
    ):
        check_fields(["atention_backend"], sources)
    with pytest.raises(ConfigurationError, match=r"server_args of these sources has no such field$"):
        check_fields(["zzz"], sources)


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


def test_no_recorded_configuration_uses_multicast(committed: dict[str, Any]) -> None:
    """FlashInfer's fused all-reduce may, which not every host that records allows (docs/runtime_tracing.md)."""
    recorded = {one["name"] for one in committed["configurations"] if one["recorded"]}
    fused = next(kernel for kernel in committed["kernels"] if kernel["name"] == "allreduce_fusion")
    assert not recorded & {name for chain in fused["chains"] for name in chain["configurations"]}


#: Runs whose configuration is the release's default, with stand-ins for FlashAttention 3.
DEFAULTS = ("deepseek_v3-fp8-fa3_stand_in", "llama_3.1_8b-bf16-fa3_stand_in")
#: Kernels that a configuration lists and its run did not launch, each with the reason.
NOT_LAUNCHED = {
    ("llama_3.1_8b-bf16-fa3_stand_in", "get_scheduler_metadata"): "FlashAttention 3's planner is replaced with it",
}


def _of_run(committed: dict[str, Any], name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Kernels and chains of a prefill and a decode step of a configuration."""
    return [
        (kernel, chain)
        for kernel in committed["kernels"]
        for chain in kernel["chains"]
        if {"prefill", "decode"} & set(chain["configurations"].get(name, ()))
    ]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_ops_of_a_default_configuration_run_the_kernels_that_its_run_shows(
    committed: dict[str, Any], name: str
) -> None:
    found = [(kernel, chain) for kernel, chain in _of_run(committed, name) if not chain["group"]]
    listed = {(chain["op"], kernel["name"]) for kernel, chain in found}
    seen = {(chain["op"], kernel["name"]) for kernel, chain in found if name in chain["seen"]}
    assert listed and listed == seen


def test_what_a_configuration_lists_was_launched_or_is_explained(committed: dict[str, Any]) -> None:
    runs = sorted({run for kernel in committed["kernels"] for chain in kernel["chains"] for run in chain["seen"]})
    assert len(runs) >= 30
    silent = set()
    for name in runs:
        listed = {kernel["name"] for kernel, _ in _of_run(committed, name)}
        launched = {kernel["name"] for kernel, chain in _of_run(committed, name) if name in chain["seen"]}
        assert len(launched) >= 0.9 * len(listed), name
        silent |= {(name, kernel) for kernel in listed - launched}
    assert silent == set(NOT_LAUNCHED)
