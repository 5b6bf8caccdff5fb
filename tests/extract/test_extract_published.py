"""Ten configurations as published, which models/ does not have: the plan is what a person read in the model's code.

Each fixture in published/ says where its configuration comes from (`checked`), what the code does (`read`), which
Definitions each op needs (`ops`), why other ops have none (`unsupported`: a part of the reason), and which ops this
configuration never calls (`skipped`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flashinfer_trace
from tools.extract_definitions.models import available, load_config
from tools.extract_definitions.needs import Options, Request
from tools.extract_definitions.plan import Planner
from tools.extract_definitions.traces import usage_of

ROOT = flashinfer_trace.find_root()
FIXTURES = {path.stem: path for path in sorted(Path(__file__).with_name("published").glob("*.json"))}


def planned(name, **changes):
    """The needs of a fixture's configuration, by op and op_type, the reasons of other ops, and ops never called."""
    data = json.loads(FIXTURES[name].read_text())
    return data, plan_of(name, {**data["config"], **changes})


def plan_of(name, config):
    model = load_config(ROOT, FIXTURES[name], name)
    model = type(model)(model.name, model.title, config, model.path)
    request = Request(model, usage_of(model.architecture, None), Options())
    ops, unsupported = Planner(ROOT, ROOT / "definitions").needs_of(request)
    found = {
        op: {op_type: sorted(name for name, of in names.items() if of == op_type) for op_type in set(names.values())}
        for op, names in ops.items()
    }
    return found, unsupported, sorted(op for op in request.unused if request.usage.op(op) and op not in ops)


def test_there_are_ten_and_none_is_a_model_of_the_dataset():
    assert len(FIXTURES) == 10 and not set(FIXTURES) & set(available(ROOT))


@pytest.mark.parametrize("name", FIXTURES)
def test_the_plan_is_what_a_person_read_in_the_code(name):
    expected, (ops, unsupported, skipped) = planned(name)
    assert expected["checked"] and expected["read"]
    assert ops == expected["ops"]
    assert sorted(unsupported) == sorted(expected["unsupported"])
    assert {op: reason for op, reason in unsupported.items() if expected["unsupported"][op] not in reason} == {}
    assert skipped == expected["skipped"]
