"""Runs schema/tests: every valid fixture has no problems, every invalid one breaks exactly its rule, at its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flashinfer_trace.dataset.validation import RULES, Problem
from flashinfer_trace.format.json_source import JsonSourceError, load, load_lines, parse

from .conftest import FIXTURES, REPOSITORY, Dataset, read_fixture

pytestmark = pytest.mark.quick

VALID = sorted((FIXTURES / "valid").glob("*.json"))
INVALID = sorted((FIXTURES / "invalid").glob("*.json"))

#: Rules about files and schemas, which no single Definition can break -> the test that breaks them.
RULES_WITH_OWN_TEST = {
    "file-unreadable": "test_hostile.py::test_missing_file",
    "file-kind": "test_hostile.py::test_directory_named_json",
    "file-size": "test_hostile.py::test_ten_megabytes",
    "file-unexpected": "test_dataset_check.py::test_other_file_among_definitions",
    "record-unfinished": "test_dataset_check.py::test_a_record_with_something_left_to_be_written",
    "dataset-schema": "test_dataset_check.py::test_broken_naming",
    "dataset-claim": "test_data_files.py::test_a_claim_is_about_what_exists",
    "no-kernel": "test_claim_rules.py::test_a_definition_that_every_kernel_refuses_is_a_problem",
    "evidence-stale": "../test_forgeries.py::test_older_code_is_stale_and_refused_at_a_release",
    "traffic-invalid": "test_traffic_rules.py::test_an_edited_file_is_refused",
    "workloads-invalid": "test_traffic_rules.py::test_workloads_of_something_else_are_refused",
    "evidence-orphan": "test_dataset_check.py::test_orphaned_evidence",
}


def run_fixture(fixture: dict[str, Any], dataset: Dataset) -> tuple[Path, list[Problem]]:
    """Lays a fixture out as schema/tests/README.md says, and validates the one Definition."""
    files = fixture.get("files", {})
    raw = content_of(fixture)
    definition = parsed_or_none(raw)
    path = dataset.write(fixture.get("path") or default_path(definition), raw)
    if definition is not None and not any(name.startswith("reference/") for name in files):
        dataset.write_source(definition)
    for name, content in files.items():
        dataset.write(name, content)
    return path, dataset.problems(path)


def content_of(fixture: dict[str, Any]) -> bytes:
    if "bytes_hex" in fixture:
        return bytes.fromhex(fixture["bytes_hex"])
    if "text" in fixture:
        return str(fixture["text"]).encode()
    return json.dumps(fixture["definition"], indent=2).encode()


def parsed_or_none(raw: bytes) -> dict[str, Any] | None:
    try:
        data = parse(raw).data
    except JsonSourceError:
        return None
    return data if isinstance(data, dict) else None


def default_path(definition: dict[str, Any] | None) -> str:
    names = [str((definition or {}).get(key, "")) for key in ("op_type", "name")]
    plain = all(name.isascii() and name.isidentifier() and len(name) < 100 for name in names)
    return f"definitions/{names[0]}/{names[1]}.json" if plain else "definitions/rmsnorm/rmsnorm_h8.json"


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_is_clean(path: Path, dataset: Dataset) -> None:
    assert run_fixture(read_fixture(path), dataset)[1] == []


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_trips_exactly_its_rule(path: Path, dataset: Dataset) -> None:
    fixture = read_fixture(path)
    _, problems = run_fixture(fixture, dataset)
    assert {problem.rule for problem in problems} == {fixture["rule"]}, problems
    assert fixture["pointer"] in [problem.pointer for problem in problems]
    for problem in problems:
        assert problem.message and "\n" not in problem.message + problem.hint
        read = load_lines if problem.file.endswith(".jsonl") else load
        lines = read(dataset.root / problem.file).lines if not problem.rule.startswith("json-") else {}
        assert problem.line == lines.get(problem.pointer, problem.line)


def is_for_a_schema(path: Path) -> bool:
    """Whether a JSON schema alone, with Python's regular expressions, can judge a fixture."""
    fixture = read_fixture(path)
    # In Python, $ matches before a final line break; in our validator and in ECMAScript, it does not.
    python_differs = path.stem == "schema_pattern_line_break_in_name"
    # JSON readers differ in how they treat the numbers that we reject.
    is_json = parsed_or_none(content_of(fixture)) is not None and fixture.get("rule") != "json-number"
    return is_json and not python_differs


@pytest.mark.parametrize(
    "path", [path for path in (*VALID, *INVALID) if is_for_a_schema(path)], ids=lambda path: path.stem
)
def test_schema_alone_agrees(path: Path) -> None:
    """Any JSON Schema validator rejects exactly the fixtures of the rules schema-*."""
    fixture = read_fixture(path)
    definition = parsed_or_none(content_of(fixture))
    schema = json.loads((REPOSITORY / "schema" / "definition.schema.json").read_text(encoding="utf-8"))
    accepted = jsonschema.Draft202012Validator(schema).is_valid(definition)
    assert accepted == (not fixture.get("rule", "").startswith("schema-"))


def test_every_rule_has_a_fixture() -> None:
    with_fixture = {read_fixture(path)["rule"] for path in INVALID}
    assert with_fixture <= set(RULES)
    assert not with_fixture & set(RULES_WITH_OWN_TEST)
    assert set(RULES) == with_fixture | set(RULES_WITH_OWN_TEST)
    for test in RULES_WITH_OWN_TEST.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_there_are_enough_fixtures() -> None:
    assert len(INVALID) >= 45
    assert len(VALID) >= 12


def test_descriptions_differ() -> None:
    descriptions = [read_fixture(path)["description"] for path in [*VALID, *INVALID]]
    assert len(descriptions) == len(set(descriptions))
    assert all(description.endswith(".") for description in descriptions)
