"""JSON pointers and lines, duplicate keys, rejected numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_trace.format.json_source import MAX_INTEGER, JsonSourceError, escape_pointer, parse

pytestmark = pytest.mark.quick

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda children: st.lists(children) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), children),
    max_leaves=20,
)


def pointers(value: Any, prefix: str = "") -> list[str]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(p for key, item in members for p in pointers(item, f"{prefix}/{escape_pointer(str(key))}"))]


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 0, 2]))
def test_same_data_as_the_standard_library(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    document = parse(text.encode())
    assert document.data == value
    assert document.problems == ()
    assert list(document.lines) == list(dict.fromkeys(pointers(value)))


@given(JSON_VALUES)
def test_lines_count_up(value: Any) -> None:
    document = parse(json.dumps(value, indent=1).encode())
    lines = list(document.lines.values())
    assert lines == sorted(lines)
    assert lines[-1] <= document.text.count("\n") + 1


@given(st.binary(max_size=200))
def test_any_bytes_give_data_or_one_error(raw: bytes) -> None:
    try:
        document = parse(raw)
    except JsonSourceError as error:
        assert error.problem.line >= 1
        assert error.problem.message
    else:
        assert document.lines[""] >= 1


def test_line_of() -> None:
    document = parse(b'\n{"a": [1,\n 2],\n\n "b/~": {"c":\n  "x\\"y,[{"}, "d": []}')
    expected = {"": 2, "/a": 2, "/a/0": 2, "/a/1": 3, "/b~1~0": 5, "/b~1~0/c": 5, "/d": 6}
    assert document.lines == expected
    assert document.line_of("/a/1/2/3") == 3
    assert document.line_of("/nothing") == 2


def test_duplicate_keys_have_the_line_of_the_second() -> None:
    document = parse(b'{"a": {"b": 1,\n"b": 2},\n"c": 1,\n"a": 3}')
    assert document.data == {"a": 3, "c": 1}
    assert [(p.rule, p.pointer, p.line) for p in document.problems] == [
        ("json-duplicate-key", "/a/b", 2),
        ("json-duplicate-key", "/a", 4),
    ]


def test_duplicate_keys_written_differently() -> None:
    (problem,) = parse(rb'{"a": 1, "\u0061": 2}').problems
    assert problem.rule == "json-duplicate-key"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9007199254740993", "1" * 5000])
def test_refused_numbers(number: str) -> None:
    document = parse(f'{{"a":\n[0, {number}]}}'.encode())
    assert document.data == {"a": [0, None]}
    assert [(p.rule, p.pointer, p.line) for p in document.problems] == [("json-number", "/a/1", 2)]


@pytest.mark.parametrize("number", ["0", "-0.0", "1e-999", "9007199254740992", "1E5", "0.1"])
def test_accepted_numbers(number: str) -> None:
    assert parse(number.encode()).problems == ()


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ('{"a": 1,\n "b"', 2, "the file ends in the middle"),
        ('{"a": 1,\n // none\n "b": 2}', 2, "JSON has no comments"),
        ('{\n"a": 1,}', 2, "comma"),
        ("{'a': 1}", 1, "double quotes"),
        ('{"a":\n// x\n1}', 2, "comments"),
        ('{"a": "x\ny"}', 1, "line break"),
        ("{}\n{}", 2, "one object"),
        ("", 1, "empty"),
    ],
)
def test_syntax_hints(text: str, line: int, hint: str) -> None:
    with pytest.raises(JsonSourceError) as caught:
        parse(text.encode())
    assert caught.value.problem.rule == "json-syntax"
    assert caught.value.problem.line == line
    assert hint in caught.value.problem.hint


def test_position_of_bad_utf8() -> None:
    with pytest.raises(JsonSourceError, match="offset 3 is not UTF-8") as caught:
        parse(b'{\n"\xff": 1}')
    assert caught.value.problem.line == 2


def test_surrogate_pair_is_a_character() -> None:
    assert parse(rb'"\ud83d\ude00"').data == "\U0001f600"


def test_byte_order_mark_hides_nothing() -> None:
    document = parse('\ufeff{"a": NaN}'.encode())
    assert [problem.rule for problem in document.problems] == ["json-encoding", "json-number"]
