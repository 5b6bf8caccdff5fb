"""Private Definitions: roots that are laid over the dataset by FLASHINFER_TRACE_PATH or --root."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace.format.naming import NamingError, load_naming
from flashinfer_trace.format.roots import find_roots, is_private

ROOT = flashinfer_trace.find_root()


def add_size(root: Path, size: int, family: str = "rmsnorm") -> str:
    """Puts a size of RMSNorm into an empty root; returns its name."""
    data = flashinfer_trace.load("rmsnorm_h7168", ROOT).to_dict()
    text = json.dumps({**data, "name": f"{family}_h{size}"}).replace("7168", str(size))
    definition = json.loads(text)
    definition["tags"] = ["status:unverified", *(tag for tag in definition["tags"] if tag.startswith("stage:"))]
    definition["description"] = f"RMSNorm over {size} features in bf16, eps 1e-6, rounded once, at the end."
    path = root / "definitions" / "rmsnorm" / f"{family}_h{size}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(definition, indent=2) + "\n")
    return path.stem


@pytest.fixture
def private(tmp_path, monkeypatch):
    """A root with one Definition of a known family."""
    add_size(tmp_path / "mine", 6656)
    monkeypatch.setenv("FLASHINFER_TRACE_PATH", str(tmp_path / "mine"))
    return tmp_path / "mine"


def test_definitions_of_all_roots_are_found(private, invoke):
    names = [one.name for one in flashinfer_trace.definitions(op_type="rmsnorm")]
    assert names == sorted(names) and {"rmsnorm_h6656", "rmsnorm_h7168"} <= {*names}
    assert flashinfer_trace.load("rmsnorm_h6656").root == private
    assert flashinfer_trace.load("rmsnorm_h7168").root == ROOT == flashinfer_trace.find_root()
    assert find_roots() == [ROOT, private] and is_private(private) and not is_private(ROOT)
    assert "rmsnorm_h6656" in invoke("list", "--op-type", "rmsnorm").stdout
    assert invoke("find", "rmsnorm", "h=6656").stdout.startswith("rmsnorm_h6656  unverified eps=1e-6")
    assert "no Definition named 'rmsnorm_h665'" in invoke("show", "rmsnorm_h665").stderr


def test_every_command_takes_them(private, invoke, tmp_path):
    """The family, its reference and the schemas are the dataset's."""
    result = invoke("validate", str(private))
    assert result.exit_code == 0 and "1 Definition checked, no problems" in result.stdout, result.output
    assert invoke("verify", "rmsnorm_h6656", "--examples", "5").exit_code == 0
    kernel = tmp_path / "mine.py"
    kernel.write_text(flashinfer_trace.load("rmsnorm_h6656").reference)
    judged = invoke("check", str(kernel), "-d", "rmsnorm_h6656", "--examples", "2")
    assert judged.exit_code == 0 and "reference-grade" in judged.stdout
    assert invoke("cost", "rmsnorm_h6656", "--axes", "batch_size=4").exit_code == 0


def test_a_size_is_added_to_the_private_root(private, invoke):
    """From the dataset's Definitions; `sync` brings each root up to date by itself."""
    before = set(ROOT.glob("definitions/rmsnorm/*.json"))
    assert invoke("add", "rmsnorm", "hidden_size=7168").exit_code == 1, "the dataset has it"
    result = invoke("add", "rmsnorm", "hidden_size=6912")
    assert result.exit_code == 0, result.output
    assert (private / "definitions" / "rmsnorm" / "rmsnorm_h6912.json").exists()
    assert set(ROOT.glob("definitions/rmsnorm/*.json")) == before
    assert invoke("sync", "--check", "rmsnorm_h6912").exit_code == 0
    other = private / "definitions" / "rmsnorm" / "rmsnorm_h6656.json"
    assert invoke("sync", "rmsnorm_h6656").exit_code == 0
    other.write_text(json.dumps(json.loads(other.read_text())))
    result = invoke("sync", "--check", "rmsnorm_h6656")
    assert result.exit_code == 1 and f"{other}: layout is out of date" in result.output


def test_the_option_adds_roots_to_those_of_the_variable(private, invoke, tmp_path):
    name = add_size(tmp_path / "other", 6784)
    rows = json.loads(invoke("--root", str(tmp_path / "other"), "list", "--format", "json").stdout)
    assert {"rmsnorm_h6656", name} <= {row["name"] for row in rows}
    assert os.environ["FLASHINFER_TRACE_PATH"] == str(private), "it is that of one command"
    assert name not in invoke("list").stdout


def test_a_problem_of_a_private_file_is_reported(private, invoke):
    path = private / "definitions" / "rmsnorm" / "rmsnorm_h6656.json"
    path.write_text(path.read_text().replace("EPS = 1e-6", "EPS = 1e-4"))
    result = invoke("validate", str(path))
    assert result.exit_code == 1 and "definitions/rmsnorm/rmsnorm_h6656.json" in result.stdout


@pytest.mark.parametrize("given", ["rmsnorm_h6656", "mine/definitions/rmsnorm/rmsnorm_h6656.json"])
def test_sync_writes_into_the_root_of_a_definition(private, invoke, monkeypatch, given):
    path = private / "definitions" / "rmsnorm" / "rmsnorm_h6656.json"
    right = json.loads(path.read_text())["reference"]
    path.write_text(path.read_text().replace("EPS = 1e-6", "EPS = 1e-4"))
    monkeypatch.chdir(private.parent)
    (changed,) = json.loads(invoke("sync", given, "--format", "json").stdout)["changed"]
    assert changed["file"] == "definitions/rmsnorm/rmsnorm_h6656.json" and "reference" in changed["change"]
    assert json.loads(path.read_text())["reference"] == right
    assert invoke("sync", "--check", given).exit_code == 0


def test_a_name_in_two_roots_is_an_error_that_names_both(private, invoke, tmp_path):
    add_size(private, 7168)
    for arguments in (["list"], ["show", "rmsnorm_h7168"], ["verify", "rmsnorm_h7168"]):
        result = invoke(*arguments)
        assert result.exit_code == 2 and "has that name too; rename one of them" in result.stderr
        for root in (private, ROOT):
            assert f"{root / 'definitions' / 'rmsnorm' / 'rmsnorm_h7168.json'}" in result.stderr


def test_a_root_without_definitions_is_an_error(tmp_path, invoke, monkeypatch):
    monkeypatch.setenv("FLASHINFER_TRACE_PATH", str(tmp_path))
    result = invoke("list")
    assert result.exit_code == 2 and f"{tmp_path}, a root of FLASHINFER_TRACE_PATH or --root, has no" in result.stderr


def naming(root: Path, **document: object) -> None:
    (root / "schema").mkdir(exist_ok=True)
    (root / "schema" / "naming.json").write_text(json.dumps(document))


def test_a_root_adds_families_and_abbreviations(private):
    own = {"op_type": "rmsnorm", "pattern": "own_rmsnorm_w{hidden_size}"}
    naming(private, families={"own_rmsnorm": own}, abbreviations={"w": ["hidden_size"]})
    for root in (private, None):
        found = load_naming(root)
        assert found.families["own_rmsnorm"].pattern == own["pattern"] and "rmsnorm" in found.families
    assert "own_rmsnorm" not in load_naming(ROOT).families


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"families": {"rmsnorm": {"op_type": "rmsnorm", "pattern": "r_h{hidden_size}"}}},
            "the families ['rmsnorm'] are in another root too; rename them",
        ),
        ({"tags": {}}, "a private root adds families and abbreviations only; remove ['tags']"),
        (
            {"families": {"mine": {"op_type": "rmsnorm", "pattern": "rmsnorm_h{hidden_size}"}}},
            "families rmsnorm and mine have the same pattern",
        ),
        ({"families": {"mine": {}}}, "malformed (KeyError('op_type'))"),
    ],
)
def test_what_a_root_may_not_add_is_named_with_its_file(private, invoke, document, message):
    naming(private, **document)
    with pytest.raises(NamingError) as raised:
        load_naming(private)
    assert str(raised.value).startswith(f"{private / 'schema' / 'naming.json'}: {message}")
    result = invoke("validate", str(private / "definitions" / "rmsnorm" / "rmsnorm_h6656.json"))
    assert result.exit_code == 1 and message in " ".join(result.stdout.split())
