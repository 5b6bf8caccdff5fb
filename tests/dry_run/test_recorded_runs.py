"""How a dry run is compared with the recorded run that it repeats; test_live_runs.py repeats some."""

from __future__ import annotations

import dataclasses
import json

import pytest

from flashinfer_trace import find_root
from tools.dry_run import compare, plans
from tools.runtime_tracing import recording

ROOT = find_root()
RUNS = ROOT / "traces" / "runtime"


@pytest.fixture(scope="module")
def run():
    return recording.read(RUNS / "llama_3.1_8b-bf16-flashinfer.json")


def test_a_run_is_equal_to_itself(run):
    found = compare.compare(run, run.calls)
    assert found.differences == ()
    assert found.arguments == found.equal > 100


def test_a_missing_chain_and_another_line_are_differences(run):
    kernel = next(call for call in run.calls if call.library == "sgl_kernel")
    moved = kernel.stack[0]._replace(line=kernel.stack[0].line + 1)
    changed = dataclasses.replace(kernel, stack=(moved, *kernel.stack[1:]))
    calls = [changed if call is kernel else call for call in run.calls]
    found = compare.compare(run, calls)
    assert {one.side for one in found.unexplained} == {"recorded", "dry"}
    assert "NOT EXPLAINED" in "\n".join(compare.report(found))


def test_every_explained_difference_has_a_reason_and_names_recorded_runs():
    names = [path.stem for path in RUNS.rglob("*.json")]
    for one in json.loads(compare.EXPLAINED.read_text(encoding="utf-8")):
        assert set(one) == {"run", "side", "place", "why"}, one
        assert len(one["why"]) > 20
        assert [name for name in names if compare.fnmatch.fnmatchcase(name, one["run"])], one


def test_a_plan_repeats_what_was_recorded(run):
    plan, version = plans.of_record(RUNS / f"{run.name}.json")
    assert version == "0.5.11"
    assert (plan.gpu, plan.phases) == ("h200", ("prefill", "decode", "extend"))
    assert plan.prompts == tuple(run.document["prompts"])
