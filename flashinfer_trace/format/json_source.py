"""Reads JSON files that anybody may have written, and knows on which line each value stands.

Own code, because no library gives all of it: the standard library's parser has neither positions nor duplicate keys
and recurses; json-source-map (1.0.5, 2022) has positions, but recurses too and drops duplicate keys silently.
Here the standard library's C parser makes the data, after one linear pass of a tokenizer bounded the nesting. Only when
somebody asks for a line (a problem was found) a second, iterative pass over the tokens maps JSON pointers to lines.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashinfer_trace.format import files

#: Largest magnitude of an integer: what every JSON reader (JavaScript, jq) keeps exactly.
MAX_INTEGER = 2**53
#: Most problems found in the values of one file; more of the same help nobody.
MAX_PROBLEMS = 100
#: Most lines of a file with one value a line; evidence has one for each kernel and GPU.
MAX_LINES = 256
#: Longest part of a JSON pointer in a report.
MAX_POINTER_PART = 120

# Every alternative matches in linear time: an unterminated string runs to the end of the text, without backtracking.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}:,]|[^][{}:,"\s]+', re.DOTALL)
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{},]', re.DOTALL)
_STEPS = {"{": 1, "[": 1, "}": -1, "]": -1}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class ReadLimits:
    """How much of a file is read.

    Attributes:
        bytes: largest file.
        depth: deepest nesting.
        values: most values (commas and containers): bounds the time of everything that comes after.
    """

    bytes: int
    depth: int
    values: int


#: A Definition has about 20 KiB and 4 levels, evidence 6 levels.
DEFINITION = ReadLimits(files.MAX_BYTES, 32, 20_000)
#: Traces of a model's kernels have about 8 MiB and 300,000 values, those of its ops 22 levels.
TRACES = ReadLimits(64 * 1024 * 1024, 64, 3_000_000)


class JsonSourceError(ValueError):
    """The file has no usable data at all."""

    def __init__(self, problem: JsonProblem) -> None:
        place = "" if problem.rule.startswith("file-") else f"line {problem.line}: "  # a whole file has no line
        super().__init__(f"{place}{problem.message}{f' ({problem.hint})' if problem.hint else ''}")
        self.problem = problem


@dataclass(frozen=True)
class JsonProblem:
    """One thing wrong with a file below the level of any schema.

    Attributes:
        rule: file-unreadable, file-kind, file-size, json-encoding, json-syntax, json-nesting, json-number or
            json-duplicate-key.
        line: line counted from 1.
        pointer: JSON pointer, "" for the whole file.
        message, hint: what is wrong, and the fix.
    """

    rule: str
    line: int
    pointer: str
    message: str
    hint: str


@dataclass(frozen=True)
class JsonDocument:
    """Data of one JSON file.

    Attributes:
        data: as ``json.loads`` gives it; of a duplicate key the last value, and None for a refused number.
        text: the source.
        problems: what is wrong without making the data unusable: byte-order mark, duplicate keys, refused numbers.
    """

    data: Any
    text: str = field(repr=False)
    problems: tuple[JsonProblem, ...] = ()

    @functools.cached_property
    def lines(self) -> dict[str, int]:
        """JSON pointer -> line, counted from 1: of a member the line of its key, of an item the line it begins on."""
        return {token.pointer: token.line for token in _scan(self.text)}

    def line_of(self, pointer: str) -> int:
        """Line of `pointer`, or of the nearest value around it that exists."""
        while pointer and pointer not in self.lines:
            pointer = pointer.rpartition("/")[0]
        return self.lines.get(pointer, 1)


def escape_pointer(key: str) -> str:
    """One key as a part of a JSON pointer (RFC 6901), cut at 120 characters.

    Uncut, one huge key around many values would make every pointer huge.
    """
    return key[:MAX_POINTER_PART].replace("~", "~0").replace("/", "~1")


def load(path: Path, limits: ReadLimits = DEFINITION) -> JsonDocument:
    """Reads and parses one file. Never blocks on a FIFO and never reads more than the size limit.

    Raises:
        JsonSourceError: it cannot be read, is not a regular file, or has no usable JSON.
    """
    try:
        raw = files.read_bytes(path, limits.bytes)
    except files.UnreadableFile as error:
        raise _error(error.rule, error.reason, error.hint) from None
    return parse(raw, limits)


def load_object(path: Path, limits: ReadLimits = DEFINITION) -> dict[str, Any]:
    """The JSON object that a file holds, for a caller that has no use for anything less.

    Raises:
        JsonSourceError: see `load`; or it has a byte-order mark, a duplicate key or a refused number, or it is not an
            object.
    """
    document = load(path, limits)
    if document.problems:
        raise JsonSourceError(document.problems[0])
    if not isinstance(document.data, dict):
        raise _error("json-syntax", "is not a JSON object", "the file holds one object, {...}")
    return document.data


def load_lines(path: Path) -> JsonDocument:
    """Reads and parses one file of JSON lines (see `parse_lines`).

    Raises:
        JsonSourceError: see `load`; or it has more than `MAX_LINES`, or its last line is cut off.
    """
    try:
        return parse_lines(files.read_bytes(path))
    except files.UnreadableFile as error:
        raise _error(error.rule, error.reason, error.hint) from None


def parse_lines(raw: bytes) -> JsonDocument:
    """Parses a file with one JSON list on each line, as the list of these: that of line 1 has the pointer /0."""
    if len(lines := raw.split(b"\n")) > MAX_LINES + 1:
        raise _error("json-nesting", f"more than {MAX_LINES} lines", "evidence has one for each kernel and GPU")
    values, problems = [], []
    for index, line in enumerate(lines[:-1] if lines[-1].strip() == b"" else lines):
        try:
            document = parse(line)
        except JsonSourceError as error:
            raise JsonSourceError(replace(error.problem, line=index + 1)) from None
        if not isinstance(document.data, list):
            raise _error("json-syntax", "is not a JSON list", "each line holds one list, [...]", index + 1)
        values.append(document)
        problems += [replace(one, line=index + 1, pointer=f"/{index}{one.pointer}") for one in document.problems]
    if lines[-1].strip():
        raise _error("json-syntax", "the last line has no end", "each line ends with a line break", len(lines))
    text = ",\n".join(one.text for one in values)
    return JsonDocument([one.data for one in values], f"[{text}]", tuple(problems))


def parse(raw: bytes, limits: ReadLimits = DEFINITION) -> JsonDocument:
    """Parses the bytes of one file.

    Raises:
        JsonSourceError: too large, not UTF-8, nested too deeply, or not JSON.
    """
    if len(raw) > limits.bytes:
        raise _error("file-size", f"is larger than {limits.bytes // 1024**2} MiB", "such a file has a few KiB")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        raise _error("json-encoding", message, "save the file as UTF-8", line) from None
    problems: list[JsonProblem] = []
    if text.startswith(_BYTE_ORDER_MARK):
        text = text.removeprefix(_BYTE_ORDER_MARK)
        hint = "save the file as UTF-8 without a mark"
        problems.append(JsonProblem("json-encoding", 1, "", "begins with a byte-order mark", hint))
    _check_structure(text, limits)
    data, suspicious = _decode(text)
    if suspicious or _SURROGATE.search(text):
        problems += _problems_in_values(text)
    if any(problem.rule == "json-encoding" and problem.pointer for problem in problems):
        raise JsonSourceError(next(p for p in problems if p.rule == "json-encoding" and p.pointer))
    return JsonDocument(data, text, tuple(problems))


def _check_structure(text: str, limits: ReadLimits) -> None:
    """Bounds nesting and number of values before a recursive parser sees the text."""
    # Almost every text keeps the limits, which takes no loop to see; commas and brackets in strings may count as well.
    if len(text) <= limits.values or sum(map(text.count, ",[{")) <= limits.values:
        found = map(operator.methodcaller("group"), _STRUCTURE.finditer(text))
        steps = map(_STEPS.get, found, itertools.repeat(0))
        if max(itertools.accumulate(steps), default=0) <= limits.depth:
            return
    depth = values = 0
    for match in _STRUCTURE.finditer(text):
        character = match.group()
        if character in ("{", "["):
            depth += 1
            values += 1
        elif character in ("}", "]"):
            depth -= 1
        elif character == ",":
            values += 1
        if depth > limits.depth or values > limits.values:
            deep = depth > limits.depth
            what = f"nested deeper than {limits.depth} levels" if deep else f"more than {limits.values} values"
            line = text.count("\n", 0, match.start()) + 1
            raise _error("json-nesting", what, "a Definition has 4 levels and a few hundred values", line)


def _decode(text: str) -> tuple[Any, bool]:
    """The data, and whether something needs a second look (duplicate keys, refused numbers)."""
    suspicious = False

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal suspicious
        result = dict(pairs)
        suspicious = suspicious or len(result) != len(pairs)
        return result

    def number(literal: str) -> int | float | None:
        nonlocal suspicious
        value = _number(literal)
        suspicious = suspicious or value is None
        return value

    try:
        data = json.loads(text, object_pairs_hook=members, parse_int=number, parse_float=number, parse_constant=number)
    except json.JSONDecodeError as error:
        hint = _syntax_hint(text, error)
        raise _error("json-syntax", f"not JSON: {error.msg}, column {error.colno}", hint, error.lineno) from None
    return data, suspicious


def _number(literal: str) -> int | float | None:
    """The value of a number's text, None if it is refused: not finite, or not exact in every JSON reader."""
    if len(literal) > 64:
        return None
    if literal.lstrip("-").isdecimal():
        integer = int(literal)
        return integer if abs(integer) <= MAX_INTEGER else None
    try:
        value = float(literal)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _syntax_hint(text: str, error: json.JSONDecodeError) -> str:
    before, after = text[: error.pos].rstrip()[-1:], text[error.pos : error.pos + 2]
    if not text.strip():
        return "the file is empty"
    if after in ("//", "/*") or after[:1] == "#":
        return "JSON has no comments"
    if not after:
        return "the file ends in the middle"
    if (before == "," and after[:1] in ("}", "]")) or "trailing comma" in error.msg:  # the words of Python 3.13
        return "no comma before a closing bracket"
    if after[:1] == "'":
        return "strings take double quotes"
    if "control character" in error.msg:
        return r"write a line break in a string as \n"
    if "Extra data" in error.msg:
        return "one file holds one object"
    return ""


@dataclass(frozen=True)
class _Token:
    """One value: its pointer, its line, its text (a bracket for containers), and whether its key was seen before."""

    pointer: str
    line: int
    text: str
    key: str | None = None
    duplicate: bool = False


def _scan(text: str) -> Iterator[_Token]:
    """Values of a valid JSON text in order of appearance; iterative, so no nesting overflows a stack."""
    line, position = 1, 0
    # One entry a container: pointer, next index (None in an object), keys seen.
    stack: list[tuple[str, int | None, set[str]]] = []
    key: str | None = None
    key_line = 1
    for match in _TOKEN.finditer(text):
        token = match.group()
        line += text.count("\n", position, match.start())
        position = match.start()
        if token in (":", ","):
            continue
        if token in ("}", "]"):
            stack.pop()
            continue
        duplicate = False
        pointer = ""
        this_line, this_key = line, key
        if stack:
            parent, index, keys = stack[-1]
            if index is None and key is None:
                key, key_line = json.loads(token, strict=False), line
                continue
            if index is None:
                assert key is not None
                pointer, this_line = f"{parent}/{escape_pointer(key)}", key_line
                duplicate = key in keys
                keys.add(key)
                key = None
            else:
                pointer = f"{parent}/{index}"
                stack[-1] = (parent, index + 1, keys)
        yield _Token(pointer, this_line, token, this_key, duplicate)
        if token in ("{", "["):
            stack.append((pointer, None if token == "{" else 0, set()))


def _problems_in_values(text: str) -> list[JsonProblem]:
    problems: list[JsonProblem] = []
    for token in _scan(text):
        if len(problems) >= MAX_PROBLEMS:
            break
        if token.duplicate:
            message = f"the key {_short(token.key or '')} appears twice in one object"
            problems.append(JsonProblem("json-duplicate-key", token.line, token.pointer, message, "keep one of them"))
        if any(part is not None and _has_lone_surrogate(part) for part in (token.key, _string(token.text))):
            message = r"a \ud8xx escape without its other half is not a character"
            problems.append(JsonProblem("json-encoding", token.line, token.pointer, message, "write the character"))
        if token.text[0] in "-0123456789NI" and _number(token.text) is None:
            message = f"the number {_short(token.text)} is not finite or beyond 2**53"
            hint = "JSON has no NaN or Infinity, and readers keep integers exactly only up to 2**53"
            problems.append(JsonProblem("json-number", token.line, token.pointer, message, hint))
    return problems


def _string(token: str) -> str | None:
    return json.loads(token, strict=False) if token.startswith('"') and "\\u" in token else None


def _has_lone_surrogate(value: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in value)


def _short(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:37]}..."


def _error(rule: str, message: str, hint: str, line: int = 1) -> JsonSourceError:
    return JsonSourceError(JsonProblem(rule, line, "", message, hint))
