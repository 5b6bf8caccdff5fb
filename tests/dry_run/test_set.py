"""The committed records of today's models: all there, small, of the newest release, and without anything measured."""

from __future__ import annotations

import json

import jsonschema
import pytest

from flashinfer_trace import find_root
from tools.dry_run import compare, plans, release
from tools.runtime_tracing import recording

FOLDER = find_root() / "traces" / "dry"
NAMES = json.loads(plans.SET.read_text(encoding="utf-8"))["set"]
SCHEMA = json.loads((find_root() / "schema" / "runtime_trace.schema.json").read_text(encoding="utf-8"))


def test_the_records_are_those_of_the_set_and_small():
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(NAMES)
    assert sum(path.stat().st_size for path in FOLDER.glob("*.json")) < 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_of_its_plan_and_measures_nothing(name):
    path, plan = FOLDER / f"{name}.json", plans.of_configuration(name)
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), SCHEMA)
    run = recording.read(path)
    assert run.document["versions"]["sglang"] == release.DEFAULT
    assert (run.document["model_config"], run.document["server"]) == (dict(plan.model.config), dict(plan.server))
    assert {call.phase for call in run.calls} == set(plan.phases)
    assert not any(call.launches for call in run.calls)
    kernels = [call for call in run.calls if call.library != "torch"]
    assert len(kernels) > 20
    prepares = [call for call in kernels if call.kernel.rpartition(".")[2] in recording.PREPARING]
    assert all(call.stack and (call.arguments or call in prepares) for call in kernels)


@pytest.mark.parametrize("name", sorted({*NAMES} & {*plans.named("gpu")}))
def test_a_gpu_ran_the_same(name):
    """The others that a GPU recorded have no record here: python -m tools.dry_run --compare."""
    recorded = recording.read(find_root() / "traces" / "runtime" / release.DEFAULT / f"{name}.json")
    found = compare.compare(recorded, recording.read(FOLDER / f"{name}.json").calls)
    assert found.differences == ()
    assert found.equal > 70 and found.arguments >= found.equal - 4
