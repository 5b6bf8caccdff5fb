"""The command line: exit statuses, formats, and errors that say what to do."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


@pytest.fixture
def copy_of_dataset(tmp_path, monkeypatch):
    """A dataset with one Definition that tests may damage."""
    root = flashinfer_trace.find_root()
    for name in ("schema", "reference"):
        shutil.copytree(root / name, tmp_path / name)
    (tmp_path / "evidence").mkdir()
    target = tmp_path / "definitions" / "rmsnorm" / "rmsnorm_h512.json"
    target.parent.mkdir(parents=True)
    shutil.copy(root / "definitions" / "rmsnorm" / "rmsnorm_h512.json", target)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return target


def test_the_dataset_is_valid(invoke):
    result = invoke("validate")
    assert result.exit_code == 0, result.output
    assert f"{len(list(flashinfer_trace.definitions()))} Definitions checked, no problems" in result.output


def test_references_are_embedded_and_statuses_match_the_evidence(invoke):
    result = invoke("embed", "--check")
    assert result.exit_code == 0, result.output


def test_validate_reports_place_and_rule(invoke, copy_of_dataset):
    data = json.loads(copy_of_dataset.read_text())
    data["axes"]["batch_size"]["description"] = ""
    copy_of_dataset.write_text(json.dumps(data, indent=2))
    text = invoke("validate", str(copy_of_dataset))
    assert text.exit_code == 1
    assert "rmsnorm_h512.json:" in text.output
    parsed = json.loads(invoke("validate", str(copy_of_dataset), "--format", "json").output)
    assert parsed["checked"] == 1
    pointers = {problem["pointer"] for problem in parsed["problems"]}
    assert "/axes/batch_size/description" in pointers
    assert set(parsed["problems"][0]) == {"file", "line", "pointer", "rule", "severity", "message", "hint"}


def test_embed_mends_an_old_reference_and_takes_the_status_away(invoke, copy_of_dataset):
    data = json.loads(copy_of_dataset.read_text())
    correct = data["reference"]
    data["reference"] = correct.replace("EPS = 1e-6", "EPS = 1e-5")
    data["tags"] = ["status:verified", *[tag for tag in data["tags"] if not tag.startswith("status:")]]
    copy_of_dataset.write_text(json.dumps(data, indent=2))
    assert invoke("embed", "--check").exit_code == 1
    assert json.loads(copy_of_dataset.read_text()) == data
    result = invoke("embed")
    assert result.exit_code == 0, result.output
    assert "reference and status:unverified updated" in result.output
    mended = json.loads(copy_of_dataset.read_text())
    assert mended["reference"] == correct
    assert "status:unverified" in mended["tags"]
    assert "0 Definitions updated" in invoke("embed").output


def test_list_and_show(invoke):
    rows = json.loads(invoke("list", "--op-type", "gemm", "--format", "json").output)
    assert {row["op_type"] for row in rows} == {"gemm"}
    assert "rmsnorm_h512" in invoke("list", "--tag", "model:deepseek-v3").output
    shown = invoke("show", "rmsnorm_h512").output
    assert "def run(" in shown
    assert "hidden_size" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", "no/such/file.json"], "no such file or directory: no/such/file.json"),
        (["show", "rmsnorm_h513"], "did you mean"),
        (["verify", "nothing*"], "no Definition matches 'nothing*'"),
        (["verify", "rmsnorm_h512", "--device", "abacus"], "--device abacus"),
        (["verify", "rmsnorm_h512", "--device", "meta"], "verify runs on cpu, cuda or cuda:N"),
        (["verify", "rmsnorm_h512", "--record"], "--record needs --device cuda"),
        (["verify", "rmsnorm_h512", "--axes", "batch_size"], "--axes takes k=v"),
        (["verify", "rmsnorm_h512", "--axes", "rows=3"], "['rows'] are not variable axes"),
        (["verify", "rmsnorm_h512", "--plan", "{"], "--plan is not JSON"),
        (["verify", "rmsnorm_h512", "--axes", "batch_size=1", "--plan", "{}"], "give one of them"),
        (["verify", "rmsnorm_h512", "--kernel", "nobody"], "it has flashinfer.norm.rmsnorm"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_message(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_verify_one_case_by_axes(invoke):
    result = invoke("verify", "rmsnorm_h512", "--axes", "batch_size=3", "--seed", "5", "--format", "json")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.output)
    assert (report["status"], report["cases"], report["seed"]) == ("passed", 1, 5)


def test_kernels_without_a_gpu_are_skipped_with_the_reason(invoke):
    result = invoke("verify", "rmsnorm_h512", "--against", "all", "--examples", "5")
    assert result.exit_code == 0, result.output
    assert "kernels need --device cuda" in result.output
    assert "1 passed, 0 failed, 2 skipped" in result.output


def test_a_failure_is_exit_1_with_a_line_that_repeats_it(invoke, copy_of_dataset):
    data = json.loads(copy_of_dataset.read_text())
    data["reference"] = data["reference"].replace(".mul_(weight.float())", ".mul_(weight.float() * 1.01)")
    copy_of_dataset.write_text(json.dumps(data))
    result = invoke("verify", "rmsnorm_h512", "--examples", "5")
    assert result.exit_code == 1
    assert "repeat: flashinfer-trace verify rmsnorm_h512 --against oracle" in result.output
    assert "0 passed, 1 failed" in result.output
