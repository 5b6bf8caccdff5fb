"""The checks of the validator: paths, the whole dataset, conventions, evidence, lines, both output formats."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashinfer_trace.dataset.validation import Result, format_json, format_text, validate_paths

from .conftest import FIXTURES, Dataset, read_fixture


def line_with(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text in line)


def test_every_problem_at_once(dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["tags"] = ["tp:x", "status:verified", "tp:x"]
    minimal["axes"]["unused"] = {"type": "var", "description": " "}
    minimal["inputs"]["weight"]["dtype"] = "bf16"
    minimal["inputs"]["weight"]["shape"] = ["hidden"]
    minimal["constraints"] = ["batch_size = 1", "rows == 1"]
    minimal["extra"] = 1
    minimal["reference"] = "import os\n\nHIDDEN_SIZE = 8\n\n\ndef run(weight):\n    return open(undefined), 1\n"
    path = dataset.write("definitions/gemm/x.json", minimal)
    found = {problem.rule for problem in dataset.problems(path)}
    assert found == {
        "axis-undeclared",
        "axis-unused",
        "constraint-name",
        "constraint-syntax",
        "description-trivial",
        "evidence-missing",
        "file-path",
        "reference-assert",
        "reference-builtin",
        "reference-import",
        "reference-parameters",
        "reference-return",
        "reference-source",
        "reference-undefined",
        "schema-unknown-field",
        "schema-value",
        "tag-duplicate",
        "tag-value",
    }


def test_lines(dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["inputs"]["weight"]["dtype"] = "bf16"
    minimal["axes"]["batch_size"]["description"] = ""
    minimal["reference"] += "\nundefined_name\n"
    path = dataset.add(minimal)
    lines = {problem.rule: problem.line for problem in dataset.problems(path)}
    assert lines["schema-value"] == line_with(path, "bf16")
    assert lines["schema-length"] == line_with(path, '"description": ""')
    assert lines["reference-statement"] == lines["reference-undefined"] == line_with(path, '"reference"')


def test_reference_line_in_message(dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["reference"] += "\nundefined_name\n"
    messages = [problem.message for problem in dataset.problems(dataset.add(minimal))]
    number = minimal["reference"].splitlines().index("undefined_name") + 1
    assert all(message.startswith(f"reference line {number}: ") for message in messages)


def test_text_form(dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["inputs"]["weight"]["shape"] = ["hiden_size"]
    path = dataset.add(minimal)
    text = format_text(validate_paths([path], dataset.root))
    assert text == (
        f"definitions/rmsnorm/rmsnorm_h8.json:{line_with(path, 'hiden_size')}: axis-undeclared: "
        'weight has the undeclared axis "hiden_size" (did you mean hidden_size?)'
    )
    assert format_text(Result(0)) == ""


def test_json_form(dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["inputs"]["weight"]["shape"] = ["hiden_size"]
    path = dataset.add(minimal)
    report = json.loads(format_json(validate_paths([path], dataset.root)))
    assert report == {
        "checked": 1,
        "problems": [
            {
                "file": "definitions/rmsnorm/rmsnorm_h8.json",
                "line": line_with(path, "hiden_size"),
                "pointer": "/inputs/weight/shape/0",
                "rule": "axis-undeclared",
                "severity": "error",
                "message": 'weight has the undeclared axis "hiden_size"',
                "hint": "did you mean hidden_size?",
            }
        ],
    }
    assert list(report["problems"][0]) == ["file", "line", "pointer", "rule", "severity", "message", "hint"]


def test_problems_are_ordered_and_unique(dataset: Dataset, minimal: dict[str, Any]) -> None:
    for size in (8, 16):
        minimal["name"] = f"rmsnorm_h{size + 1}"
        minimal["tags"] = ["a", "b"]
        dataset.add(minimal)
    problems = dataset.problems()
    assert problems == sorted(set(problems))
    assert len({problem.file for problem in problems}) == 2


@pytest.mark.parametrize("form", ["absolute", "relative", "directory", "root", "twice"])
def test_paths(form: str, dataset: Dataset, minimal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    minimal["tags"] = []
    path = dataset.add(minimal)
    monkeypatch.chdir(path.parent)
    relative = Path("rmsnorm_h8.json")
    paths = {
        "absolute": [path],
        "relative": [relative],
        "directory": [path.parent],
        "root": [dataset.root],
        "twice": [path, relative, path.parent],
    }[form]
    result = validate_paths(paths, Path("../..") if form == "relative" else dataset.root)
    assert result.checked == 1
    assert [(p.file, p.rule) for p in result.problems] == [("definitions/rmsnorm/rmsnorm_h8.json", "tag-count")]


def test_root_behind_a_symbolic_link(dataset: Dataset, minimal: dict[str, Any], tmp_path: Path) -> None:
    dataset.add(minimal)
    link = tmp_path / "link"
    link.symlink_to(dataset.root)
    assert validate_paths([link], link) == Result(1, [])
    assert validate_paths([link / "definitions" / "rmsnorm" / "rmsnorm_h8.json"], dataset.root) == Result(1, [])


def test_no_path_means_everything(dataset: Dataset, minimal: dict[str, Any]) -> None:
    dataset.add(minimal)
    assert validate_paths([], dataset.root) == Result(1, [])


def test_file_outside_the_dataset(dataset: Dataset, minimal: dict[str, Any], tmp_path: Path) -> None:
    dataset.add(minimal)
    draft = tmp_path / "rmsnorm" / "rmsnorm_h8.json"
    draft.parent.mkdir()
    draft.write_text(json.dumps(minimal))
    assert dataset.problems(draft) == []
    other = tmp_path / "draft.json"
    other.write_text(json.dumps(minimal))
    (problem,) = dataset.problems(other)
    assert problem.rule == "file-path"
    assert "definitions/rmsnorm/rmsnorm_h8.json" in problem.message


def test_other_file_among_definitions(dataset: Dataset, minimal: dict[str, Any]) -> None:
    dataset.add(minimal)
    dataset.write("definitions/rmsnorm/notes.txt", "")
    dataset.write("definitions/.DS_Store", "")
    assert [problem.rule for problem in dataset.problems()] == ["file-unexpected"] * 2


def test_definition_in_a_deeper_directory(dataset: Dataset, minimal: dict[str, Any]) -> None:
    dataset.write_source(minimal)
    dataset.write("definitions/rmsnorm/rmsnorm/rmsnorm_h8.json", minimal)
    assert [problem.rule for problem in dataset.problems()] == ["file-path"]


def test_duplicate_names_point_at_each_other(dataset: Dataset, minimal: dict[str, Any]) -> None:
    dataset.add(minimal)
    dataset.write("definitions/rmsnorm/copy.json", minimal)
    found = [(p.file, p.rule) for p in dataset.problems() if p.rule == "name-duplicate"]
    assert ("definitions/rmsnorm/rmsnorm_h8.json", "name-duplicate") in found


def test_broken_naming(dataset: Dataset, minimal: dict[str, Any]) -> None:
    path = dataset.add(minimal)
    naming = json.loads((dataset.root / "schema" / "naming.json").read_text(encoding="utf-8"))
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda n: n["families"]["gemm"].update(pattern="gemm_x{n}"),
        lambda n: n["families"]["gemm"].update(pattern="gemm_n{n}k{k}"),
        lambda n: n["families"]["gemm"].pop("op_type"),
        lambda n: n.pop("tags"),
        lambda n: n["tags"]["namespaces"]["tp"].update(pattern="("),
    ]
    for change in changes:
        broken = copy.deepcopy(naming)
        change(broken)
        dataset.write("schema/naming.json", broken)
        for problems in (dataset.problems(), dataset.problems(path)):
            assert {problem.rule for problem in problems} == {"dataset-schema"}
            assert {problem.file for problem in problems} == {"schema/naming.json"}
    (dataset.root / "schema" / "naming.json").unlink()
    assert "dataset-schema" in [problem.rule for problem in dataset.problems(path)]


def test_broken_schema(dataset: Dataset, minimal: dict[str, Any]) -> None:
    path = dataset.add(minimal)
    for content in ("{", '{"type": "objekt"}'):
        dataset.write("schema/definition.schema.json", content)
        (problem,) = dataset.problems(path)
        assert (problem.rule, problem.file) == ("dataset-schema", "schema/definition.schema.json")


def test_orphaned_evidence(dataset: Dataset, minimal: dict[str, Any]) -> None:
    dataset.add(minimal)
    fixture = read_fixture(FIXTURES / "valid" / "verified.json")
    for name, content in fixture["files"].items():
        dataset.write(name, content)
    assert validate_paths([dataset.root], dataset.root) == Result(1, [])
    orphan = dataset.write("evidence/rmsnorm/rmsnorm_h9.jsonl", fixture["files"]["evidence/rmsnorm/rmsnorm_h8.jsonl"])
    for problems in (dataset.problems(), dataset.problems(orphan)):
        assert [(p.rule, p.file) for p in problems] == [("evidence-orphan", "evidence/rmsnorm/rmsnorm_h9.jsonl")]


def test_changing_the_reference_revokes_verified(dataset: Dataset) -> None:
    fixture = read_fixture(FIXTURES / "valid" / "verified.json")
    for name, content in fixture["files"].items():
        dataset.write(name, content)
    definition = fixture["definition"]
    assert dataset.problems(dataset.add(definition)) == []
    definition["reference"] += "# changed\n"
    (problem,) = dataset.problems(dataset.add(definition))
    assert (problem.rule, problem.pointer) == ("evidence-mismatch", "/tags/0")


def test_constants_in_the_source_do_not_matter(dataset: Dataset, minimal: dict[str, Any]) -> None:
    source = minimal["reference"].replace("HIDDEN_SIZE = 8", "HIDDEN_SIZE = 7168")
    assert dataset.problems(dataset.add(minimal, source)) == []


def test_stale_reference_names_the_first_line(dataset: Dataset, minimal: dict[str, Any]) -> None:
    path = dataset.add(minimal, minimal["reference"].replace("    x = ", "    y = 0\n    x = "))
    (problem,) = dataset.problems(path)
    assert problem.rule == "reference-stale"
    assert problem.message.startswith("reference line 8: ")


def test_reserved_input_names(rules_after: Callable[[Callable[[dict[str, Any]], object]], list[str]]) -> None:
    def change(definition: dict[str, Any]) -> None:
        definition["inputs"]["math"] = definition["inputs"].pop("weight")
        definition["reference"] = definition["reference"].replace("weight", "math")

    assert rules_after(change) == ["name-identifier"]


def test_whole_floats_are_no_integers(dataset: Dataset, minimal: dict[str, Any]) -> None:
    """JSON Schema accepts 8.0 as an integer, but the name would become rmsnorm_h8.0."""
    minimal["axes"]["hidden_size"]["value"] = 8.0
    problems = dataset.problems(dataset.add(minimal))
    assert [(p.rule, p.pointer) for p in problems] == [("schema-type", "/axes/hidden_size/value")]


@pytest.mark.parametrize("section", ["axes", "inputs", "outputs", "constraints", "tags", "reference", "description"])
@pytest.mark.parametrize("value", [None, [], {}, "x", 1, [None], {"a": None}, {"a": []}, [[]]])
def test_malformed_sections(section: str, value: Any, dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal[section] = value
    problems = dataset.problems(dataset.add(minimal))
    assert bool(problems) == ((section, value) not in [("constraints", []), ("description", "x")])


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("for HIDDEN_SIZE in range(3):\n    pass", "reference-constant"),
        ("(HIDDEN_SIZE := 3)", "reference-constant"),
        ("try:\n    pass\nexcept ValueError as HIDDEN_SIZE:\n    pass", "reference-constant"),
        ("match x:\n    case HIDDEN_SIZE:\n        pass", "reference-constant"),
        ("def HIDDEN_SIZE():\n    pass", "reference-constant"),
        ("torch = 1", "reference-constant"),
        ("run.calls = 1", "reference-state"),
        ("weight.requires_grad = True", "reference-state"),
        ("def g(cache=[]):\n    return cache", "reference-state"),
        ("g = lambda cache={}: cache", "reference-state"),
        ("f = [torch.load for _ in range(3)]", "reference-torch"),
        ("y = f'{weight.__class__}'", "reference-attribute"),
        ("y = [undefined for _ in range(3)]", "reference-undefined"),
        ("y = weight.relu()[undefined:]", "reference-undefined"),
        ("y: open = 1", "reference-builtin"),
        ("if x is None:\n    return", "reference-return"),
    ],
)
def test_tricky_references(code: str, rule: str, dataset: Dataset, minimal: dict[str, Any]) -> None:
    at = "    return (x"
    indented = "".join(f"    {line}\n" for line in code.split("\n"))
    minimal["reference"] = minimal["reference"].replace(at, indented + at)
    assert rule in [problem.rule for problem in dataset.problems(dataset.add(minimal))]


@pytest.mark.parametrize(
    "line", ["run = None", "def torch():\n    pass", "def HIDDEN_SIZE():\n    pass", "import math as HIDDEN_SIZE"]
)
def test_module_names_are_bound_once(line: str, dataset: Dataset, minimal: dict[str, Any]) -> None:
    minimal["reference"] += f"\n\n{line}\n"
    assert "reference-constant" in [problem.rule for problem in dataset.problems(dataset.add(minimal))]


def test_three_hundred_definitions_in_seconds(dataset: Dataset, minimal: dict[str, Any]) -> None:
    for size in range(8001, 8301):
        definition = copy.deepcopy(minimal)
        definition["name"] = f"rmsnorm_h{size}"
        definition["axes"]["hidden_size"]["value"] = size
        definition["reference"] = minimal["reference"].replace("HIDDEN_SIZE = 8", f"HIDDEN_SIZE = {size}")
        dataset.add(definition, minimal["reference"])
    started = time.process_time()
    assert validate_paths([dataset.root], dataset.root) == Result(300, [])
    assert time.process_time() - started < 6  # of processor time; it takes about 0.6 s


def sized(minimal: dict[str, Any], size: int, **changes: Any) -> dict[str, Any]:
    """The smallest Definition with another hidden_size."""
    definition = copy.deepcopy(minimal)
    definition["name"] = f"rmsnorm_h{size}"
    definition["axes"]["hidden_size"]["value"] = size
    definition["reference"] = minimal["reference"].replace("HIDDEN_SIZE = 8", f"HIDDEN_SIZE = {size}")
    return {**definition, **changes}


def test_a_clean_reference_does_not_vouch_for_the_constants_and_signatures_of_its_family(
    dataset: Dataset, minimal: dict[str, Any]
) -> None:
    """Checks that do not depend on the Definition run once per family; the others run for each Definition."""
    stale = sized(minimal, 9, reference=minimal["reference"])
    renamed = sized(minimal, 16)
    renamed["inputs"] = {"x" if name == "weight" else name: spec for name, spec in renamed["inputs"].items()}
    unasserted = sized(minimal, 17)
    unasserted["inputs"]["hidden_states"]["shape"] = ["batch_size", "rows"]
    unasserted["axes"]["rows"] = {"type": "const", "value": 3, "description": "Rows of the batch."}
    for definition in (sized(minimal, 10), stale, renamed, unasserted, sized(minimal, 18)):
        dataset.add(definition, minimal["reference"])
    found = {(Path(problem.file).stem, problem.rule) for problem in dataset.problems()}
    assert found == {
        ("rmsnorm_h9", "reference-constant"),
        ("rmsnorm_h9", "reference-stale"),
        ("rmsnorm_h16", "contract-family"),
        ("rmsnorm_h16", "reference-parameters"),
        ("rmsnorm_h17", "contract-family"),
        ("rmsnorm_h17", "reference-assert"),
    }


def test_every_definition_of_a_family_shows_the_problems_of_its_reference(
    dataset: Dataset, minimal: dict[str, Any]
) -> None:
    minimal["reference"] = minimal["reference"].replace("x = hidden_states", "x = open(hidden_states)")
    for size in (8, 9, 10):
        dataset.add(sized(minimal, size), minimal["reference"])
    found = [(Path(problem.file).stem, problem.rule) for problem in dataset.problems()]
    assert found == [(f"rmsnorm_h{size}", "reference-builtin") for size in (10, 8, 9)]


@pytest.mark.parametrize("number", ["010", "8.0", "-8", "1_0", "9" * 30])
def test_what_is_no_plain_integer_is_parsed_again(number: str, dataset: Dataset, minimal: dict[str, Any]) -> None:
    dataset.add(minimal)
    written = minimal["reference"].replace("HIDDEN_SIZE = 8", f"HIDDEN_SIZE = {number}")
    dataset.add(sized(minimal, 9, reference=written), minimal["reference"])
    rules = {problem.rule for problem in dataset.problems()}
    assert rules == ({"reference-syntax"} if number == "010" else {"reference-constant", "reference-stale"})


def test_a_record_with_something_left_to_be_written(dataset: Dataset, minimal: dict[str, Any]) -> None:
    path = dataset.add(minimal)
    dataset.write("flashinfer_trace/families/norms/mine.py", b"KERNELS = ()\n\n# TODO: the kernels\n")
    dataset.write("flashinfer_trace/families/whole.py", b"KERNELS = ()\n")
    (problem,) = dataset.problems()
    assert (problem.rule, problem.file, problem.line) == (
        "record-unfinished",
        "flashinfer_trace/families/norms/mine.py",
        3,
    )
    assert dataset.problems(path) == []  # the Definition itself is complete
