"""The reports of the validator: problems, their rules, and how both are shown."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flashinfer_trace.format.json_source import JsonDocument, escape_pointer

#: Every rule: its stable id and what it demands. `Findings.add` refuses ids that are not here.
RULES: dict[str, str] = {
    # Files
    "file-unreadable": "A file or directory can be read.",
    "file-kind": "A Definition is a regular file: no directory, symbolic link, FIFO or device.",
    "file-size": "A file has at most 4 MiB.",
    "file-unexpected": "definitions/ holds .json files only, and evidence/ .jsonl files and the headers of runs.",
    "file-path": "A Definition lies at definitions/<op_type>/<name>.json.",
    "record-unfinished": "A harness record of a checkout holds no TODO.",
    # JSON
    "json-encoding": "A file is UTF-8, without byte-order mark or lone surrogates.",
    "json-syntax": "A file is JSON.",
    "json-nesting": "A file nests at most 32 levels and holds at most 20,000 values.",
    "json-number": "Numbers are finite, and integers exact in every JSON reader (up to 2**53).",
    "json-duplicate-key": "No key appears twice in one object.",
    # Schema
    "dataset-schema": "schema/ and models/ hold valid schemas, conventions and data.",
    "dataset-claim": "models/curated/claims.json names Definitions and kernels that exist.",
    "schema-type": "Every value has the type that the schema gives it.",
    "schema-required": "No required field is missing.",
    "schema-unknown-field": "There are no fields that the schema does not know.",
    "schema-value": "A value is one of those allowed, and a number within its range.",
    "schema-pattern": "A name has the form that the schema gives it.",
    "schema-length": "Texts, lists and objects are neither empty nor too long.",
    # Names and descriptions
    "name-family": "Some family of schema/naming.json matches the name.",
    "name-derived": "The name is the one that the family derives from the const axes.",
    "name-duplicate": "No other Definition has the name.",
    "name-meaning": "A name that flashinfer-bench's dataset uses means the same here (schema/compatibility.json).",
    "name-identifier": "Axes, inputs and outputs are Python identifiers, not keywords or names the reference needs.",
    "name-overlap": "No input has the name of an output or an axis.",
    "description-trivial": "A description says more than blanks, the name or TODO.",
    "description-number": "Numbers and 16-bit formats in a description are those of the Definition and its tags.",
    "description-model": "A description names a model only if it is tagged; without model: tags, only for its sizes.",
    # Axes
    "axis-undeclared": "Every axis in a shape is declared.",
    "axis-unused": "Every axis is used by a shape, a constraint, the name or the reference.",
    "axis-unbound": "Every var axis is in an input's shape, or determined by a constraint.",
    # Contracts
    "contract-family": "Definitions of a family differ in the values of their const axes, and in no axis or tensor.",
    # Kernels
    "no-kernel": "Some kernel of the family computes the Definition, by the table of kernels.",
    # Tags
    "tag-unknown": "A tag's namespace, or the flag, is in schema/naming.json.",
    "tag-value": "A tag's value is one that its namespace allows.",
    "tag-meaning": "The tags causal, paged, quantization: and routing: agree with the name and the tensors.",
    "tag-duplicate": "No tag appears twice.",
    "tag-claim": "A tag names a kernel that ran by fi_api:, sgl_api: or triton_api:, and any other by called_as:.",
    "tag-model": "A model: tag follows from models/needs/, models/recorded/ or, with a source, models/curated/.",
    "tag-unfounded": "Models, or a claim with its source, give each tp: and ep: tag; the family gives the other tags.",
    "tag-missing": "No tag is missing that follows from models/: model:, tp: and ep: tags, and those of the family.",
    "tag-count": "Exactly one status tag; other namespaces as often as schema/naming.json allows.",
    # Constraints
    "constraint-syntax": "A constraint is in the constraint language.",
    "constraint-name": "A constraint names declared axes and inputs only.",
    "constraint-type": "A constraint subscripts 1-D integer inputs and computes with axes and scalar inputs.",
    "constraint-false": "A constraint over const axes alone holds.",
    # Reference
    "reference-syntax": "The reference is Python.",
    "reference-statement": "A reference's module holds a docstring, imports, literal constants and functions.",
    "reference-import": "A reference imports torch and math only.",
    "reference-run": "A reference has exactly one top-level run().",
    "reference-parameters": "The parameters of run() are the inputs, in order, without defaults.",
    "reference-return": "run() returns one value for each output.",
    "reference-construct": "A reference uses the syntax that allow_list/allowed.py lists.",
    "reference-attribute": "A reference uses the attributes that allow_list/allowed.py lists, and no dunder names.",
    "reference-builtin": "A reference uses only harmless builtins: no open, exec, eval, getattr.",
    "reference-torch": "A reference uses the paths of torch and math that allow_list/allowed.py lists.",
    "reference-ties": "Where indices of sorted values are used, the sort is stable.",
    "reference-state": "A reference keeps no state: no global, class, decorator, yield, async, assigned attribute.",
    "reference-undetermined": "A reference makes text of values in errors only, and fills memory at once.",
    "reference-undefined": "Every name a reference reads is defined.",
    "reference-constant": "A constant named after an axis has its value; module-level names are bound once.",
    "reference-assert": "run() asserts every const axis that it can see in an input's shape.",
    "reference-source": "reference/<op_type>/<family>.py exists and can be rendered.",
    "reference-stale": "The embedded reference equals what reference/ renders.",
    # Evidence
    "evidence-missing": "status:verified has evidence/<op_type>/<name>.jsonl.",
    "evidence-invalid": "Evidence and headers of runs follow their schemas, and can have been recorded.",
    "evidence-mismatch": "Evidence of a verified Definition fits it and its family's record, kernel for kernel.",
    "evidence-failed": "Every run in the evidence of a verified Definition passed, with at least 50 real cases.",
    "evidence-stale": "At a release, each kernel that today's stack has on Hopper ran, and today's code judged it.",
    "evidence-orphan": "Every evidence file belongs to a Definition.",
    # Traffic
    "traffic-invalid": "workloads/traffic.json follows its schema, and its lengths are those that its digests are of.",
    "workloads-invalid": "Recorded workloads follow their schema, and fit their Definition and workloads/traffic.json.",
}


#: Longest message and hint; both may quote what a hostile file holds.
MAX_TEXT = 400


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to fix.

    Attributes:
        file: path, relative to the dataset root if it is inside.
        line: line in the file, counted from 1.
        pointer: JSON pointer (RFC 6901), "" for the whole file.
        rule: id in `RULES`.
        severity: "error"; every rule is one today.
        message: what is wrong.
        hint: how to fix it; may be empty.
    """

    file: str
    line: int
    pointer: str
    rule: str
    severity: str
    message: str
    hint: str


@dataclass(frozen=True)
class Result:
    """The result of `validate_paths`.

    Attributes:
        checked: number of Definitions that were checked, and of evidence files where those were asked for.
        problems: in order of file and line.
    """

    checked: int
    problems: list[Problem] = field(default_factory=list)


class Findings:
    """Collects the problems of one file and finds their lines."""

    def __init__(self, path: Path, root: Path, document: JsonDocument | None = None) -> None:
        self.file = display_path(path, root)
        self.document = document
        self._problems: dict[Problem, None] = {}  # ordered, and each one once

    @property
    def problems(self) -> list[Problem]:
        """The problems so far."""
        return list(self._problems)

    def add(self, rule: str, message: str, hint: str = "", pointer: str = "", line: int | None = None) -> None:
        """Records one problem. Without `line`, the line is that of `pointer` in the document."""
        if rule not in RULES:
            raise KeyError(f"{rule} is not in RULES")
        if line is None:
            line = self.document.line_of(pointer) if self.document else 1
        shown = [printable(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}...") for text in (message, hint)]
        self._problems[Problem(self.file, line, printable(pointer), rule, "error", *shown)] = None


def display_path(path: Path, root: Path) -> str:
    """`path` as shown in reports: relative to the root if inside, with forward slashes, always printable."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(root)
    return printable(path.as_posix())


def pointer_of(*parts: str | int) -> str:
    """JSON pointer of a path of keys and indices."""
    return "".join(f"/{escape_pointer(str(part))}" for part in parts)


def quote(value: object, longest: int = 60) -> str:
    """A value from a file, quoted as JSON and cut to so many characters; the type of what JSON cannot write."""
    try:
        text = json.dumps(value[: longest + 20] if isinstance(value, str) else value, ensure_ascii=False)
    except (TypeError, ValueError):  # bytes and complex numbers, or an integer too long for decimal digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def quote_tag(tag: str) -> str:
    """A tag, quoted as JSON and whole, so it can be copied; `Candidate.tags` leaves out longer ones."""
    return quote(tag, 220)


def printable(text: str) -> str:
    """`text` without characters that would break a line or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def format_text(result: Result) -> str:
    """One line a problem: ``file:line: rule: message (hint)``; "" if there is none."""
    return "\n".join(
        f"{p.file}:{p.line}: {p.rule}: {p.message}{f' ({p.hint})' if p.hint else ''}" for p in result.problems
    )


def format_json(result: Result) -> str:
    """``{"checked": n, "problems": [{"file", "line", "pointer", "rule", "severity", "message", "hint"}]}``."""
    problems: Iterable[dict[str, object]] = [asdict(problem) for problem in result.problems]
    return json.dumps({"checked": result.checked, "problems": problems}, indent=2)
