"""Names mean one thing: every name of flashinfer-bench's dataset is compared with ours; exceptions are listed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest

import flashinfer_trace
from flashinfer_trace.dataset.flashinfer_bench import (
    Compatibility,
    constants_of,
    differences,
    load_compatibility,
    matching,
)
from flashinfer_trace.dataset.validation import validate_paths
from tools.site.compatibility_page import prose, state_of

ROOT = flashinfer_trace.find_root()
OURS = {one.name: one for one in flashinfer_trace.definitions()}


def known() -> Compatibility:
    found = load_compatibility(ROOT)
    assert found is not None
    return found


def data_of(name: str) -> dict[str, object]:
    path = OURS[name].path
    assert path is not None
    loaded: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


COMMON = sorted(known().definitions.keys() & OURS.keys())


def test_the_comparison_covers_the_names_that_were_common_from_the_start():
    assert len(known().definitions) == 156
    assert len(COMMON) >= 126


@pytest.mark.parametrize("name", COMMON)
def test_a_common_name_takes_the_same_workloads_and_solutions_or_says_why_not(name):
    found = {one.place for one in differences(known().definitions[name], data_of(name))}
    assert found == set(known().kept(name))


def test_every_name_is_here_elsewhere_or_listed_as_missing():
    states = {name: state_of(name, known(), set(OURS))[0] for name in known().definitions}
    assert set(states.values()) == {"drop-in", "listed difference", "under another name", "missing"}
    excused = [*known().decisions["elsewhere"], *known().decisions["missing"]]
    assert [name for name in COMMON if matching(excused, name)] == [], "they exist: remove the excuse"


@pytest.mark.parametrize("section", ["differences", "behavior", "elsewhere", "missing", "evaluation"])
def test_every_decision_is_about_something(section):
    names = {*known().definitions, *OURS} if section == "evaluation" else set(known().definitions)
    idle = [
        (entry["names"], pattern)
        for entry in known().decisions[section]
        for pattern in entry["names"]
        if not any(matching([{"names": [pattern]}], name) for name in names)
    ]
    assert idle == []


@pytest.mark.parametrize("name", ["compatibility", "flashinfer_bench"])
def test_the_data_follow_their_schemas(name):
    schema = json.loads((ROOT / "schema" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads((ROOT / "schema" / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("name", "place", "change"),
    [
        ("rmsnorm_h4096", "/constants/EPS", lambda d: d.update(reference=d["reference"].replace("1e-5", "1e-6"))),
        ("gemm_n4096_k4096", "/inputs/A/dtype", lambda d: d["inputs"]["A"].update(dtype="bfloat16")),
        ("gemm_n4096_k4096", "/axes/m", lambda d: d["axes"].update(m=d["axes"].pop("M"))),
        ("top_k_sampling_from_probs_v128256", "/outputs/samples/dtype",
         lambda d: d["outputs"]["samples"].update(dtype="int32")),
        ("fused_add_rmsnorm_h7168", "/outputs", lambda d: d["outputs"].update(residual_out=d["outputs"]["output"])),
        ("mla_ragged_prefill_causal_h16_qk192_vo128", "/axes/qk_dim", lambda d: d["axes"]["qk_dim"].update(value=128)),
        ("rmsnorm_h128", "/op_type", lambda d: d.update(op_type="layernorm")),
        ("rmsnorm_h128", "/inputs", lambda d: d.update(inputs=dict(reversed(d["inputs"].items())))),
    ],
)  # fmt: skip
def test_each_kind_of_difference_is_found(name, place, change):
    data = copy.deepcopy(data_of(name))
    change(data)
    assert place in {one.place for one in differences(known().definitions[name], data)}


def test_validate_refuses_another_function_under_a_common_name(tmp_path: Path):
    data = data_of("rmsnorm_h4096_eps1e6")
    text = json.dumps({**data, "name": "rmsnorm_h4096"})
    path = OURS["rmsnorm_h4096"].path
    assert path is not None
    assert "name-meaning" in {one.rule for one in validate_paths([path], ROOT, {path: text}).problems}


def test_axes_of_our_own_that_are_constant_cost_nothing():
    name = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
    assert set(OURS[name].axes) > set(known().definitions[name]["axes"])
    assert list(differences(known().definitions[name], data_of(name))) == []


def test_constants_are_read_inside_and_outside_of_functions():
    assert constants_of("EPS = 1e-5\ndef run(x):\n    TOP_K = 8\n    BLOCK = 128\n") == {"EPS": 1e-5, "TOP_K": 8}
    assert constants_of("def run(:") == {}


def test_commands_in_a_remark_are_code_and_the_rest_is_literal():
    assert prose("Use `a | b` and not <c>, d*e or `f") == "Use `a \\| b` and not \\<c\\>, d\\*e or \\`f"
