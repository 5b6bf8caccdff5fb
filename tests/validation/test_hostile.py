"""Hostile files give a clear error within seconds, never a traceback or a hang."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashinfer_trace.dataset.validation import format_json, format_text, validate_paths

from .conftest import Dataset

#: A generous limit for a busy machine; on an idle one, each case takes well under one second.
SECONDS = 20


@pytest.fixture(autouse=True)
def in_seconds() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SECONDS


def rules(dataset: Dataset, *paths: Path) -> list[str]:
    result = validate_paths(list(paths) or [dataset.root], dataset.root)
    text = format_text(result)
    text.encode("utf-8")  # lone surrogates in the output would fail here
    assert len(text.splitlines()) == len(result.problems)
    assert all(len(line) < 1000 for line in text.splitlines())
    json.loads(format_json(result))
    return [problem.rule for problem in result.problems]


def test_missing_file(dataset: Dataset) -> None:
    assert rules(dataset, dataset.root / "definitions" / "gemm" / "none.json") == ["file-unreadable"]
    assert rules(dataset, Path("/nonexistent/x.json")) == ["file-unreadable"]
    assert rules(dataset, Path("x" * 300)) == ["file-unreadable"]
    assert rules(dataset, Path("a\0b.json")) == ["file-unreadable"]


def test_missing_definitions(dataset: Dataset) -> None:
    (dataset.root / "definitions").rmdir()
    assert rules(dataset) == ["file-unreadable"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(dataset: Dataset, minimal: dict[str, Any]) -> None:
    path = dataset.add(minimal)
    path.chmod(0)
    assert rules(dataset, path) == ["file-unreadable"]


def test_directory_named_json(dataset: Dataset) -> None:
    directory = dataset.root / "definitions" / "gemm" / "x.json"
    directory.mkdir(parents=True)
    assert rules(dataset, directory) == rules(dataset) == ["file-kind"]


def test_fifo_and_device(dataset: Dataset) -> None:
    fifo = dataset.root / "definitions" / "x.json"
    os.mkfifo(fifo)
    assert rules(dataset, fifo) == rules(dataset) == ["file-kind"]
    assert rules(dataset, Path("/dev/zero")) == ["file-kind"]


def test_symlink_loops(dataset: Dataset) -> None:
    directory = dataset.root / "definitions" / "gemm"
    directory.mkdir()
    (directory / "a.json").symlink_to("b.json")
    (directory / "b.json").symlink_to("a.json")
    (directory / "again").symlink_to(directory)
    assert rules(dataset) == ["file-kind"] * 3
    assert rules(dataset, directory / "a.json") == ["file-kind"]
    assert rules(dataset, directory / "again" / "again" / "again" / "a.json") == ["file-kind"]


def test_symlink_to_outside(dataset: Dataset) -> None:
    (dataset.root / "definitions" / "passwd.json").symlink_to("/etc/passwd")
    assert rules(dataset) == ["file-kind"]


def test_ten_megabytes(dataset: Dataset) -> None:
    path = dataset.write("definitions/gemm/x.json", b'{"name": "' + b"a" * 10_000_000 + b'"}')
    (problem,) = dataset.problems(path)
    assert problem.rule == "file-size"
    assert "4 MiB" in problem.message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[" * 10_000, "json-nesting"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "json-nesting"),
        (b"[" * 4_000_000, "json-nesting"),
        (b"[" + b"0," * 1_000_000 + b"0]", "json-nesting"),
        (b'"' + b'\\"' * 2_000_000, "json-syntax"),
        (b'"' * 4_000_000, "json-syntax"),
        (b"\\" * 4_000_000, "json-syntax"),
        (b" " * 4_000_000, "json-syntax"),
        (b"\x00" * 1000, "json-syntax"),
        (b"\xff\xfe{\x00}\x00", "json-encoding"),
        (b'{"x": "' + b"\\u0041" * 600_000 + b'\\ud800"}', "json-encoding"),
        (b"[" + b'"\\ud83d",' * 19_000 + b"1]", "json-encoding"),
        (b"-" * 4_000_000, "json-syntax"),
        (b"null", "schema-type"),
        (b'"' + b"a" * 4_000_000 + b'"', "schema-type"),
        (b"{" + b",".join(b'"%d":0' % i for i in range(19_000)) + b"}", "schema-unknown-field"),
        (b'{"' + b"k" * 3_900_000 + b'": [' + b"0," * 15_000 + b"0]}", "schema-unknown-field"),
        (b'{"tags": [' + b'"status:verified",' * 15_000 + b'""]}', "schema-length"),
        (b'{"axes": {' + b",".join(b'"a%d":{}' % i for i in range(9_000)) + b"}}", "schema-length"),
        (b'{"inputs": {"x": {"shape": [' + b'"a",' * 19_000 + b'"b"]}}}', "schema-length"),
        (b'{"name": "' + b"a" * 4_000_000 + b'", "op_type": "../../.."}', "schema-pattern"),
        (b"{" + b'"a": 0,' * 15_000 + b'"a": 0}', "json-duplicate-key"),
        (b'{"axes": [' + b"NaN," * 15_000 + b"NaN]}", "json-number"),
        (b'{"axes": {"' + b"a" * 3_000_000 + b'": {"type": "var", "description": ""}}}', "schema-length"),
        (b'{"tags": ["model:' + b"a-" * 1_900_000 + b'"]}', "schema-length"),
        (b'{"description": "' + b"a " * 1_900_000 + b'"}', "schema-length"),
        (b'{"axes": {"a": {"type": "const", "value": ' + b"9" * 1_000_000 + b"}}}", "json-number"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else value,
)
def test_hostile_json(content: bytes, expected: str, dataset: Dataset) -> None:
    found = rules(dataset, dataset.write("definitions/gemm/x.json", content))
    assert expected in found
    assert len(found) <= 200


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "(" * 20_000,
        "x = " + "-" * 40_000 + "1",
        "x = " + "1+" * 20_000 + "1",
        "x = a" + ".a" * 20_000,
        "x = a" + "()" * 20_000,
        "x = a" + "[0]" * 15_000,
        "x = " + "not " * 10_000 + "a",
        "x = " + "lambda:" * 7_000 + "1",
        "x = " + "a if b else " * 4_000 + "c",
        "x = " + "[" * 150 + "a" + " for a in b]" * 150,
        "import " + "a." * 24_000 + "a",
        "x = f'" + "{a}" * 15_000 + "'",
        "a = " * 12_000 + "1",
        "A = 1\n" * 8_000,
        "import b\n" * 5_000,
        "HIDDEN_SIZE = 0x" + "f" * 40_000,
        "HIDDEN_SIZE = " + "1" * 40_000,
        "HIDDEN_SIZE = (b'x', 1j, ...)",
        "HIDDEN_SIZE = -'x'",
        "if a: pass\n" + "elif a: pass\n" * 3_000,
        "def run(hidden_states, weight):\n    return " + "1, " * 15_000,
        "def run(" + ", ".join(f"a{i}" for i in range(6_000)) + "): pass",
        "".join(" " * i + "if a:\n" for i in range(150)),
        "\x00",
        "\ufeffimport torch",
        "# -*- coding: utf-7 -*-\n+AGE-",
        "def run(x): '\\d'",
        "def run(x):\n    if x:\n        break",
        "def run(x):\n    return x.sum(dim=0, dim=1)",
        "def run(x):\n    *a, *b = x",
        "def run(x):\n" + "".join(" " * i + "for a in x:\n" for i in range(1, 25)) + " " * 25 + "pass",
    ],
    ids=lambda source: repr(source[:20]),
)
def test_hostile_reference(source: str, dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["reference"] = source
    found = rules(dataset, dataset.add(minimal))
    assert any(rule.startswith("reference-") for rule in found)
    assert len(found) <= 100


@pytest.mark.parametrize("name", ["../x", "a/../../b", "/etc/passwd", "a\nb", "a\x1b[31m", "", "\ud7ff", "con\u202e"])
def test_names_with_paths_and_control_characters(name: str, dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["tags"] = ["status:verified", name]  # verified, so the name would be part of the evidence's path
    minimal["name"] = minimal["op_type"] = name
    minimal["axes"][name] = {"type": "var", "description": "x y"}
    minimal["inputs"][name] = {"shape": [name], "dtype": name, "description": name}
    minimal["constraints"] = [name]
    found = rules(dataset, dataset.write("definitions/gemm/x.json", minimal))
    assert {"schema-pattern", "schema-value"} <= set(found)


def test_file_names_that_are_no_text(dataset: Dataset, minimal: dict[str, Any]) -> None:
    directory = os.fsencode(dataset.root / "definitions")
    for name in (b"\xff.json", b"a\nb.json", b"\x1b[31m.txt"):
        with open(os.path.join(directory, name), "wb") as file:
            file.write(b"{}")
    assert "file-unexpected" in rules(dataset)


HOSTILE_LINES = (
    (b"[" * 10_000 + b"\n", "json-nesting"),
    (b"[]\n" * 300, "json-nesting"),
    (b"{}\n", "json-syntax"),
    (b"[]", "json-syntax"),
    (b"[],[]\n", "json-syntax"),
    (b"[[[]\n[]]],[]\n", "json-syntax"),
    (b"", "evidence-invalid"),
    (b"[]\n", "evidence-invalid"),
    (b"\xff\n", "json-encoding"),
)


def test_hostile_evidence(dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["tags"] = ["status:verified"]
    path = dataset.add(minimal)
    evidence = dataset.root / "evidence" / "rmsnorm" / "rmsnorm_h8.jsonl"
    evidence.parent.mkdir(parents=True)
    for content, expected in HOSTILE_LINES:
        evidence.write_bytes(content)
        assert set(rules(dataset, path)) == {expected}
        assert set(rules(dataset)) == {expected}
    evidence.unlink()
    evidence.symlink_to(evidence)
    assert rules(dataset, path) == rules(dataset) == ["file-kind"]
    evidence.unlink()
    os.mkfifo(evidence)
    assert rules(dataset, path) == rules(dataset) == ["file-kind"]


def test_hostile_source(dataset: Dataset, minimal: dict[str, Any]) -> None:
    path = dataset.add(minimal)
    source = dataset.root / "reference" / "rmsnorm" / "rmsnorm.py"
    source.write_bytes(b"\xff\xfe")
    assert rules(dataset, path) == ["reference-source"]
    source.unlink()
    source.mkdir()
    assert rules(dataset, path) == ["reference-source"]
