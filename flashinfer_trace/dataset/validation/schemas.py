"""Checks against the JSON schemas, with messages that name the fix."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.patterns import PatternError, found_in
from flashinfer_trace.format.roots import shared

#: Most schema problems reported for one file: a hostile file could have thousands.
MAX_PROBLEMS = 100
#: Longest object, as JSON, that is remembered as valid; longer ones hardly repeat.
MAX_REMEMBERED = 2000

_LENGTH_KEYWORDS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_VALUE_KEYWORDS = {"enum", "const", "minimum", "maximum", "oneOf", "anyOf"}


class Schemas:
    """The schemas of one dataset root, each compiled once and only when it is needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._compiled: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """The validator of schema/<name>.schema.json."""
        if name not in self._compiled:
            self._compiled[name] = self._compile(f"{name}.schema.json")
        return self._compiled[name]

    def _compile(self, name: str) -> Any:
        from jsonschema import Draft202012Validator, validators

        path = shared(self.root, "schema", name)
        try:
            schema = load_object(path)
            if objection := _objection(json.dumps(schema)):
                raise SchemaFileError(path, 1, f"not a JSON schema: {objection}")
            # An empty schema would accept anything.
            one = schema.get("items", {}) if schema.get("type") == "array" else schema
            if not one.get({"object": "properties", "array": "prefixItems"}.get(str(one.get("type")), "")):
                raise SchemaFileError(path, 1, "not a schema of an object with properties, or of a list with parts")
        except JsonSourceError as error:
            raise SchemaFileError(path, error.problem.line, error.problem.message) from None
        extend: Any = validators.extend  # it has no annotations
        # 8.0 is an integer to JSON Schema, but a float to Python, and prints as 8.0 in a name.
        types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, instance: type(instance) is int)
        keywords = {
            "pattern": _check_pattern,
            "$ref": _remembering_ref(Draft202012Validator.VALIDATORS["$ref"]),
        }
        return extend(Draft202012Validator, keywords, type_checker=types)(schema)


class SchemaFileError(ValueError):
    """A file under schema/ cannot be used."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


@functools.lru_cache(maxsize=16)
def _objection(schema: str) -> str:
    """Why a text is not a JSON schema; empty if it is one. Each is checked once, because it is slow."""
    from jsonschema import Draft202012Validator, SchemaError

    document = json.loads(schema)
    try:
        Draft202012Validator.check_schema(document)
    except SchemaError as error:
        return error.message[:200]
    known = {f"#/$defs/{name}" for name in document.get("$defs", {})}
    for reference in _references(document):
        if reference not in known:  # another file, or an address, is never fetched
            return f"$ref to {reference[:80]!r}, which is not among the $defs"
    return ""


def _references(schema: Any) -> Iterator[str]:
    """The value of every $ref and $dynamicRef, as text."""
    queue = [schema]
    while queue:
        one = queue.pop()
        if isinstance(one, dict):
            yield from (str(value) for key, value in one.items() if key in ("$ref", "$dynamicRef"))
        queue += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def _check_pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    # JSON Schema means ECMAScript, where $ is the end; in Python it also matches before a last line break.
    try:
        if isinstance(instance, str) and not found_in(pattern, instance):
            yield ValidationError(f"does not match {pattern}")
    except PatternError as error:
        yield ValidationError(f"the schema's pattern: {error}")


def _remembering_ref(check_ref: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """`check_ref` that checks equal objects once: tensors and environments repeat in hundreds of files.

    Only what has no problem is remembered, so every file with one is reported in full.
    """
    valid: set[tuple[str, str]] = set()

    def check(validator: Any, ref: str, instance: Any, schema: Any) -> Iterator[Any]:
        key = (ref, json.dumps(instance))
        if key in valid:
            return
        errors = list(check_ref(validator, ref, instance, schema))
        if not errors and len(key[1]) <= MAX_REMEMBERED:
            valid.add(key)
        yield from errors

    return check


def check_schema(validator: Any, data: Any, findings: Findings, rule: str | None = None) -> set[str]:
    """Reports every violation of a schema.

    Args:
        validator: one of `Schemas`.
        data: the parsed JSON.
        findings: where problems go.
        rule: the rule of every problem; without it, the rule that fits the keyword (schema-type, ...).

    Returns:
        The pointers of the violations.
    """
    pointers = set()
    known = {problem.pointer for problem in findings.problems if problem.rule == "json-number"}
    for error in itertools.islice(validator.iter_errors(data), MAX_PROBLEMS):
        for found, pointer, message, hint in _translate(error):
            # A value of the wrong type is not an allowed value either; the type says it all.
            if found == "schema-value" and pointer in pointers:
                continue
            pointers.add(pointer)
            # A refused number has become null: its wrong type is not a second problem.
            if pointer not in known:
                findings.add(rule or found, message, hint, pointer)
    return pointers


def first_problem(name: str, data: Any, root: Path) -> str:
    """The first violation of schema/<name>.schema.json as text, with its pointer; empty if there is none.

    Raises:
        SchemaFileError: the schema cannot be used.
    """
    findings = Findings(root, root)
    check_schema(_schema(root, name), data, findings)
    return next((f"{one.pointer}: {one.message}{f' ({one.hint})' * bool(one.hint)}" for one in findings.problems), "")


@functools.lru_cache(maxsize=16)
def _schema(root: Path, name: str) -> Any:
    return Schemas(root).of(name)


def _translate(error: Any) -> Iterator[tuple[str, str, str, str]]:
    """(rule, pointer, message, hint) of one jsonschema error; several for several unknown or missing fields."""
    keyword, value, instance = error.validator, error.validator_value, error.instance
    path = list(error.absolute_path)
    pointer = pointer_of(*path)
    where = _place(path)
    description = error.schema.get("description", "") if isinstance(error.schema, dict) else ""
    if "propertyNames" in error.absolute_schema_path:
        name = pointer_of(*path, instance)
        if keyword == "pattern":
            yield "schema-pattern", name, f"the name {quote(instance)} must match {value}", _example(error)
        else:
            yield "schema-length", name, f"the name {quote(instance)} is too long", f"at most {value} characters"
    elif keyword == "required":
        # jsonschema gives one error for each missing field, and names it only in the message.
        missing = re.match(r"'([^']*)'", error.message)
        field = missing.group(1) if missing else "a field"
        yield "schema-required", pointer, f"{where} lacks the field {field!r}", _field_help(error, field)
    elif keyword == "dependentRequired":
        yield "schema-required", pointer, f"{where} lacks a field: {error.message[:200]}", description
    elif keyword == "not":
        yield "schema-unknown-field", f"{pointer}/value", f"{where} is a var axis and has a value", _AXIS_HINT
    elif keyword == "additionalProperties":
        fields = error.schema.get("properties", {})
        for unknown in [key for key in instance if key not in fields][:MAX_PROBLEMS]:
            hint = f"the fields are {', '.join(fields)}"
            yield "schema-unknown-field", pointer_of(*path, unknown), f"{where} has no field {quote(unknown)}", hint
    elif keyword == "type":
        expected = value if isinstance(value, str) else " or ".join(value)
        message = f"{where} is {_kind(instance)}, must be {expected}"
        yield "schema-type", pointer, message, _example(error) or description
    elif keyword == "pattern":
        yield "schema-pattern", pointer, f"{where} is {quote(instance)}, must match {value}", _example(error)
    elif keyword == "enum":
        yield "schema-value", pointer, f"{where} is {quote(instance)}", f"one of {', '.join(map(str, value))}"
    elif keyword in _VALUE_KEYWORDS:
        message = f"{where} is {_brief(instance)}, violates {keyword} {_brief(value)}"
        yield "schema-value", pointer, message, description
    elif keyword in _LENGTH_KEYWORDS:
        message = f"{where} has {len(instance)} {_unit(keyword)}, {_bound(keyword)} {value}"
        yield "schema-length", pointer, message, description
    else:
        yield "schema-value", pointer, f"{where} violates {keyword}", description


def _place(path: list[str | int]) -> str:
    """The last part of a path in words: a field, or an item as ``tags[2]``."""
    if not path:
        return "the file"
    last = path[-1]
    return f"{str(path[-2])[:60]}[{last}]" if isinstance(last, int) and len(path) > 1 else str(last)[:60]


_AXIS_HINT = 'remove the value, or write "type": "const"'


def _example(error: Any) -> str:
    examples = error.schema.get("examples") if isinstance(error.schema, dict) else None
    return f"for example {quote(examples[0])}" if examples else ""


def _field_help(error: Any, field: str) -> str:
    properties = error.schema.get("properties", {})
    if "if" in error.schema_path or field not in properties:
        return "a const axis has an integer value" if field == "value" else ""
    return str(properties[field].get("description", ""))


def _kind(instance: Any) -> str:
    names = {bool: "boolean", dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return "null" if instance is None else names.get(type(instance), type(instance).__name__)


def _brief(value: Any) -> str:
    return json.dumps(value)[:60] if isinstance(value, (str, int, float, bool)) else _kind(value)


def _unit(keyword: str) -> str:
    return {"L": "characters", "I": "items", "P": "members"}[keyword[3]]


def _bound(keyword: str) -> str:
    return "must have at least" if keyword.startswith("min") else "may have at most"
