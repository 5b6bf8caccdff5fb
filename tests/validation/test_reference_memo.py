"""References of one family at different sizes are checked once, but no problem of any of them is missed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from flashinfer_trace.dataset.validation import reference_rules
from flashinfer_trace.dataset.validation.reference_rules import check_reference

from .conftest import Dataset


def at_size(minimal: dict[str, Any], size: int) -> dict[str, Any]:
    """The smallest Definition with another hidden size."""
    definition = copy.deepcopy(minimal)
    old = definition["axes"]["hidden_size"]["value"]
    definition["axes"]["hidden_size"]["value"] = size
    definition["name"] = definition["name"].replace(str(old), str(size))
    definition["reference"] = definition["reference"].replace(f"HIDDEN_SIZE = {old}\n", f"HIDDEN_SIZE = {size}\n")
    return definition


def problems_by_size(
    dataset: Dataset, minimal: dict[str, Any], changes: dict[int, Callable[[dict[str, Any]], object]]
) -> dict[int, list[str]]:
    """Rules that each of several sizes breaks; they must be the same when checked alone and together."""
    definitions = {size: at_size(minimal, size) for size in changes}
    dataset.write_source(definitions[min(changes)])
    paths = {}
    for size, definition in definitions.items():
        changes[size](definition)
        paths[size] = dataset.write(f"definitions/{definition['op_type']}/{definition['name']}.json", definition)
    alone = {size: [problem.rule for problem in dataset.problems(path)] for size, path in paths.items()}
    together = dataset.problems(*paths.values())
    for size, path in paths.items():
        assert [p.rule for p in together if p.file.endswith(path.name)] == alone[size]
    return alone


def unchanged(definition: dict[str, Any]) -> None:
    pass


def replace(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(definition: dict[str, Any]) -> None:
        assert old in definition["reference"]
        definition["reference"] = definition["reference"].replace(old, new)

    return change


def test_a_wrong_constant_after_a_clean_reference(dataset: Dataset, minimal: dict[str, Any]) -> None:
    changes = {16: unchanged, 32: replace("HIDDEN_SIZE = 32\n", "HIDDEN_SIZE = 33\n"), 64: unchanged}
    found = problems_by_size(dataset, minimal, changes)
    assert found[16] == found[64] == []
    assert sorted(found[32]) == ["reference-constant", "reference-stale"]


def test_the_same_problem_at_every_size(dataset: Dataset, minimal: dict[str, Any]) -> None:
    bad = replace("import torch\n", "import os\nimport torch\n")
    found = problems_by_size(dataset, minimal, {16: bad, 32: bad})
    assert "reference-import" in found[16]
    assert found[16] == found[32]


def test_other_inputs_are_another_reference(dataset: Dataset, minimal: dict[str, Any]) -> None:
    def rename(definition: dict[str, Any]) -> None:
        definition["inputs"]["other"] = definition["inputs"].pop(next(iter(definition["inputs"])))

    found = problems_by_size(dataset, minimal, {16: unchanged, 32: rename, 64: unchanged})
    assert found[16] == found[64] == []
    assert "reference-parameters" in found[32]


@pytest.mark.parametrize("value", ["0x20", "007", "1" * 5000, "-1", "True"])
def test_constants_that_are_no_plain_integers_are_not_alike(
    dataset: Dataset, minimal: dict[str, Any], value: str
) -> None:
    odd = replace("HIDDEN_SIZE = 32\n", f"HIDDEN_SIZE = {value}\n")
    found = problems_by_size(dataset, minimal, {16: unchanged, 32: odd})
    assert found[16] == []
    assert found[32]


def test_a_lone_carriage_return_counts_as_a_line(dataset: Dataset, minimal: dict[str, Any]) -> None:
    def break_lines(definition: dict[str, Any]) -> None:
        definition["reference"] = "# first\r# second\r" + definition["reference"]

    found = problems_by_size(dataset, minimal, {16: break_lines, 32: break_lines, 64: break_lines})
    assert "reference-constant" not in [rule for rules in found.values() for rule in rules]


def test_alike_references_are_walked_once(
    dataset: Dataset, minimal: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    walked = []

    def counted(*arguments: Any) -> None:
        walked.append(arguments[0].source)
        check_reference(*arguments)

    monkeypatch.setattr(reference_rules, "check_reference", counted)
    definitions = [at_size(minimal, size) for size in (16, 32, 64)]
    paths = [dataset.add(definition, minimal["reference"]) for definition in definitions]
    assert dataset.problems(*paths) == []
    assert len(walked) == 1
