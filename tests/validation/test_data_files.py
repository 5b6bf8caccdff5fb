"""The data next to the Definitions (models/, schema/) is checked by its schemas, and no command crashes on it."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main
from flashinfer_trace.dataset.store import definition_paths
from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.dataset.validation.data_rules import DATA

from .conftest import REPOSITORY

NAME = "gemm_n6144_k4096"
MODEL = "qwen3-8b"
RECORDED = "models/recorded/rmsnorm_h512.json"
COMMANDS = (["validate", "--format", "json"], ["sync", "--check"], ["show", NAME], ["cost", NAME, "--axes", "M=4"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with the real models/ and schema/, and one Definition."""
    root = tmp_path_factory.mktemp("data") / "dataset"
    for directory in ("schema", "models", "reference"):
        shutil.copytree(REPOSITORY / directory, root / directory)
    (root / "traces").mkdir()
    shutil.copy(REPOSITORY / "traces" / "kernels_without_definition.json", root / "traces")
    for file in (f"definitions/gemm/{NAME}.json", f"evidence/gemm/{NAME}.jsonl"):
        (root / file).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / file, root / file)
    shutil.copytree(REPOSITORY / "evidence" / "runs", root / "evidence" / "runs")
    assert [path.stem for path in definition_paths(root)] == [NAME]
    claim = {"definitions": [NAME], "tags": ["tp:1"], "source": "made up: which model calls it is not said"}
    (root / "models/curated/claims.json").write_text(json.dumps({"claims": [claim]}), encoding="utf-8")
    path = root / "definitions" / "gemm" / f"{NAME}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, "tags": [*data["tags"], "tp:1"]}), encoding="utf-8")
    assert validate_paths([], root).problems == []
    return root


#: File, where in it, and what is written there: each of another type than the schema's, or against its rules.
MALFORMED: list[tuple[str, list[str | int], Any]] = [
    ("models/curated/claims.json", ["claims", 0, "definitions"], [5]),
    ("models/curated/claims.json", ["claims", 0, "models"], [[]]),
    ("models/curated/claims.json", ["claims", 0, "source"], ""),
    ("schema/naming.json", ["families", "rmsnorm", "tags"], [5]),
    ("schema/naming.json", ["families", "rmsnorm", "some_tags"], [{"tags": ["fused"], "only": [5]}]),
    ("schema/naming.json", ["families", "rmsnorm", "some_tags"], [{"tags": ["fused"]}]),
    (RECORDED, ["recorded", 0, "models"], 5),
    (RECORDED, ["recorded", 0, "models"], ["no-such-model"]),
    (RECORDED, ["recorded", 0, "runs"], [5]),
    (RECORDED, ["recorded"], [{"models": 5, "runs": []}]),
    (RECORDED, ["definition"], "gemm_n1_k1"),
    (f"models/needs/{MODEL}.json", ["sizes", 0, "tag"], 5),
    (f"models/needs/{MODEL}.json", ["ops", 0, "definitions", "rmsnorm"], [5]),
    (f"models/{MODEL}.json", ["title"], ["(", "["]),
    (f"models/{MODEL}.json", ["nonsense"], 1),
    (f"models/{MODEL}.json", ["name"], "qwen3-9b"),
    (f"models/{MODEL}.json", ["title"], "Qwen3-9B"),
    (f"models/needs/{MODEL}.json", ["model"], "qwen3-9b"),
    (f"models/{MODEL}.json", ["config"], {}),
    ("schema/compatibility.json", ["differences", 0, "names"], [5]),
    ("schema/compatibility.json", ["behavior"], 5),
    ("schema/flashinfer_bench.json", ["definitions"], 5),
    ("schema/flashinfer_bench.json", ["definitions", "gemm_n6144_k4096", "axes"], 5),
    ("schema/flashinfer_bench.json", ["definitions", "gemm_n6144_k4096", "inputs", "A"], 5),
    ("schema/gpus.json", ["gpus"], 5),
    ("schema/gpus.json", ["gpus", "H200", "peak", "float16"], []),
    ("traces/kernels_without_definition.json", ["kernels", "sgl_kernel.weak_ref_tensor"], ""),
    ("traces/kernels_without_definition.json", ["not_yet"], ["jit:clamp_position"]),
    ("traces/kernels_without_definition.json", ["not_yet", "jit:clamp_position"], ""),
    ("traces/kernels_without_definition.json", ["not_yet", "jit:clamp_position"], "x" * 5000),
    ("traces/kernels_without_definition.json", ["not_called", "mxfp4_quantize"], 5),
]


@pytest.mark.parametrize(("file", "place", "value"), MALFORMED, ids=lambda value: str(value)[:60])
def test_a_malformed_data_file_is_named_and_crashes_no_command(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, file: str, place: list[str | int], value: Any
) -> None:
    path = dataset / file
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    *parents, last = place
    functools.reduce(lambda part, key: part[key], parents, data)[last] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(dataset))
    try:
        results = [CliRunner().invoke(main, command) for command in COMMANDS]
    finally:
        path.write_text(text, encoding="utf-8")
    problems = json.loads(results[0].stdout)["problems"]
    assert ("dataset-schema", file) in {(one["rule"], one["file"]) for one in problems}
    for result in results:
        assert isinstance(result.exception, (SystemExit, type(None))), result.exception


@pytest.mark.parametrize("old", ['"H200"', "4.8e12"])
def test_what_is_long_in_a_data_file_is_cut(dataset: Path, monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    path = dataset / "schema" / "gpus.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, f'"{"x" * 100_000}"', 1), encoding="utf-8")
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(dataset))
    try:
        result = CliRunner().invoke(main, ["cost", NAME, "--axes", "M=4"])
    finally:
        path.write_text(text, encoding="utf-8")
    assert result.exit_code == 1
    assert max(map(len, result.output.splitlines())) < 3000


def test_every_data_file_has_a_schema_and_is_checked_by_it() -> None:
    checked = {path for pattern in DATA for path in REPOSITORY.glob(pattern)}
    elsewhere = {"naming.json"}
    found = {*REPOSITORY.glob("models/**/*.json"), *REPOSITORY.glob("schema/*.json")}
    left = {path for path in found - checked if not path.name.endswith(".schema.json")}
    assert {path.name for path in left} == elsewhere
    assert all((REPOSITORY / "schema" / f"{name}.schema.json").is_file() for name in DATA.values())


def write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def test_two_models_have_no_title_in_common_and_each_has_its_own(copy: Path) -> None:
    path = copy / "models" / "qwen3-4b.json"
    write(path, {**json.loads(path.read_text(encoding="utf-8")), "title": "Qwen3-1.7B"})
    own, shared = validate_paths([], copy).problems
    for problem in (own, shared):
        assert (problem.rule, problem.file, problem.pointer) == ("dataset-schema", "models/qwen3-4b.json", "/title")
        assert path.read_text(encoding="utf-8").splitlines()[problem.line - 1].startswith('  "title": ')
    assert {own.message, shared.message} == {
        'the title "Qwen3-1.7B" is not the name qwen3-4b, written by people',
        'qwen3-1.7b.json has the title "Qwen3-1.7B" too',
    }


@pytest.mark.parametrize(
    ("change", "pointer", "message", "hint"),
    [
        ({"definitions": [NAME, "gemm_n6144_k4097"]}, "/definitions/1", "no Definition has the name", f"mean {NAME}?"),
        ({"definitions": [NAME, "gemm_nothing_*"]}, "/definitions/1", "no Definition has the name", "correct it"),
        ({"kernel": "bmm_fp9"}, "/kernel", 'models/needs/ has the kernel "bmm_fp9"', "did you mean bmm_fp8?"),
    ],
)
def test_a_claim_is_about_what_exists(
    copy: Path, change: dict[str, Any], pointer: str, message: str, hint: str
) -> None:
    path = copy / "models" / "curated" / "claims.json"
    (claim,) = json.loads(path.read_text(encoding="utf-8"))["claims"]
    needs = min((copy / "models" / "needs").glob("*.json"))
    called = {"kernels": [{"kernel": "triton:compute_position_kernel", "ops": ["norm"]}]}
    write(needs, {**json.loads(needs.read_text(encoding="utf-8")), **called})
    for kernel in ("bmm_fp8", "compute_position_kernel"):  # one that a package exports, and one that a model calls
        write(path, {"claims": [{**claim, "kernel": kernel}]})
        assert validate_paths([], copy).problems == []
    write(path, {"claims": [{**claim, **change}]})
    (problem,) = validate_paths([], copy).problems
    assert (problem.rule, problem.file) == ("dataset-claim", "models/curated/claims.json")
    assert problem.pointer == f"/claims/0{pointer}" and problem.line > 3
    assert message in problem.message and hint in problem.hint


def test_a_claim_about_an_unknown_model_is_named_by_every_command(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy / "models" / "curated" / "claims.json"
    (claim,) = json.loads(path.read_text(encoding="utf-8"))["claims"]
    write(path, {"claims": [{**claim, "models": ["qwen3-8b", "gemma-2-9b"]}]})
    line = path.read_text(encoding="utf-8").splitlines().index('        "gemma-2-9b"') + 1
    (problem,) = validate_paths([], copy).problems
    assert (problem.rule, problem.file, problem.line) == ("dataset-schema", "models/curated/claims.json", line)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(copy))
    for command in (["sync", NAME], ["validate", str(copy / "definitions" / "gemm" / f"{NAME}.json")]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        assert f"models/curated/claims.json:{line}: " in result.output
        assert "there is no models/gemma-2-9b.json" in result.output and "did you mean gemma-2-2b?" in result.output
        assert "tag-m" not in result.output


@pytest.mark.parametrize("file", [f"models/{MODEL}.json", "models/curated/claims.json"])
def test_a_syntax_error_is_one_problem_with_its_line(copy: Path, file: str) -> None:
    path = copy / file
    path.write_text(path.read_text(encoding="utf-8").rstrip()[:-1] + ",\n", encoding="utf-8")
    (problem,) = validate_paths([], copy).problems
    assert (problem.rule, problem.file) == ("json-syntax", file)
    (alone,) = validate_paths([copy / "definitions"], copy).problems
    assert alone.file == file and "correct it, or restore it" in alone.hint and "sync" not in alone.hint
