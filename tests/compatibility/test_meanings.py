"""A common name means the same function: what the table says of it is true of our reference, and of theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from meaning_probes import PROBES, VOCABULARY, small
from test_theirs import EXPERTS

import flashinfer_trace
from flashinfer_trace import Definition
from flashinfer_trace.dataset.flashinfer_bench import matching, table_path
from tools.compatibility import published

ROOT = flashinfer_trace.find_root()
OURS = {one.name: one for one in flashinfer_trace.definitions()}
TABLE = json.loads(table_path(ROOT).read_text(encoding="utf-8"))
COMMON = sorted(TABLE["definitions"].keys() & OURS.keys())
RELEASED = sorted(path.stem for path in (ROOT / published.DEFAULT).glob("*.json") if path.stem in OURS)


def untrue(definition: Definition, run: Callable[..., Any], name: str) -> dict[str, Any]:
    """The facts of the table that do not hold for a function, each with what holds instead.

    Numbers are those of bfloat16 results.
    """
    facts = {one["fact"]: one["value"] for one in matching(TABLE["semantics"], name)}
    found = {fact: PROBES[fact](definition, run) for fact in facts}
    return {
        fact: value
        for fact, value in found.items()
        if value != (facts[fact] if isinstance(value, str) else pytest.approx(facts[fact], rel=0.02))
    }


@pytest.mark.parametrize("name", COMMON)
def test_our_reference_means_what_the_table_says(name: str) -> None:
    assert matching(TABLE["semantics"], name), "say what the name means"
    definition = small(OURS[name])
    assert untrue(definition, definition.compiled, name) == {}


def test_every_fact_is_about_a_common_name_and_has_a_probe() -> None:
    entries = TABLE["semantics"]
    assert {one["fact"] for one in entries} == set(PROBES)
    assert [one for one in entries if not any(matching([one], name) for name in COMMON)] == []


#: Name -> what is changed in its reference, and the fact that tells.
CHANGES = [
    ("gqa_ragged_prefill_causal_h16_kv2_d128", "math.log2(math.e)", "1.0", "lse_of_8_equal_keys"),
    ("rmsnorm_h128", ".mul_(weight)", ".mul_(1 + weight)", "norm_of_ones_with_weight_1"),
    ("rmsnorm_h4096", "EPS = 1e-5", "EPS = 1e-6", "epsilon"),
    (
        "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
        "scores.gather(1, experts)",
        "(scores + routing_bias.float()).gather(1, experts)",
        "expert_of_8_equal_ones_times_2_with_up_1_and_gate_8",
    ),
    (
        "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
        "groups.topk(2, dim=2)",
        "groups.topk(1, dim=2)",
        "score_of_a_group",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "fact"), CHANGES)
def test_another_function_is_told(name: str, old: str, new: str, fact: str) -> None:
    definition = small(OURS[name])
    assert old in definition.reference
    namespace: dict[str, Any] = {}
    exec(definition.reference.replace(old, new), namespace)
    assert fact in untrue(definition, namespace["run"], name)


@pytest.mark.parametrize("name", RELEASED or COMMON[:1])
def test_their_reference_means_it_too(name: str, theirs: Callable[[str], dict[str, Any]]) -> None:
    definition, other = OURS[name], theirs(name)
    source = other["reference"]
    if definition.op_type == "sampling":
        source = re.sub(rf"\b{other['axes']['vocab_size']['value']}\b", str(VOCABULARY), source)
    for constant, value in EXPERTS.items() if definition.op_type == "moe" else ():
        source = re.sub(rf"\b{constant} (==?) \d+", rf"{constant} \1 {value}", source)
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    shrunk = definition if source == other["reference"] else small(definition)
    assert untrue(shrunk, namespace["run"], name) == {}
