"""flashinfer-trace dump, and dumps in place of names."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from flashinfer_trace.cli import main
from flashinfer_trace.cli.verification import _of_dumps
from flashinfer_trace.dataset.store import find_root, load
from tools.templates.record import Record


@pytest.fixture
def directory(record: Record, tmp_path: Path) -> Path:
    """Dumps of three classes: the same, another function, a new size; with numbers of calls."""
    by_name = {data["name"]: data for data in reversed(record.dumps)}
    for name, calls in (("rmsnorm_h512", 60), ("merge_state_h16_d128", 30), ("rmsnorm_h6656", 10)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**by_name[name], "calls": calls}))
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def test_each_dump_is_told_with_its_share_of_the_calls(directory: Path) -> None:
    done = run("dump", directory)
    assert done.exit_code == 0
    assert "rmsnorm_h512: same: rmsnorm_h512\n  flashinfer.norm.rmsnorm, flashinfer-python" in done.output
    assert "merge_state_h16_d128: same name, another function\n  output v_merged" in done.output
    assert "rmsnorm_h6656: new size: rmsnorm_h6656" in done.output
    assert "3 dumps: 1 same (60% of the calls), 1 new size (10% of the calls), 1 another function (30%" in done.output


def test_json_has_the_kernels_and_the_smallest_wrong_case(directory: Path) -> None:
    told = json.loads(run("dump", directory, "--format", "json").output)
    by_name = {one["name"]: one for one in told["dumps"]}
    assert by_name["rmsnorm_h512"]["class"] == "same"
    assert by_name["rmsnorm_h512"]["silent"] == ["eps"]
    assert {one["kernel"] for one in by_name["rmsnorm_h512"]["kernels"]} == {"flashinfer.norm.rmsnorm"}
    failure = by_name["merge_state_h16_d128"]["failure"]
    assert failure["output"] == "v_merged" and failure["got"] is None and failure["wanted"] == 0
    assert told["summary"]["same"] == {"dumps": 1, "calls": 60}


def test_new_sizes_are_added_to_a_private_root(directory: Path, tmp_path: Path) -> None:
    root = tmp_path / "private"
    (root / "definitions").mkdir(parents=True)
    done = run("--root", root, "dump", directory / "rmsnorm_h6656.json", "--add")
    assert done.exit_code == 0, done.output
    written = root / "definitions" / "rmsnorm" / "rmsnorm_h6656.json"
    assert f"added {written}" in done.output
    assert json.loads(written.read_text())["reference"].count("HIDDEN_SIZE = 6656") == 1


def test_definitions_of_others_in_a_trace_set_are_found_proven(tmp_path: Path) -> None:
    own = load("rmsnorm_h512").to_dict()
    own["reference"] = own["reference"].replace("HIDDEN_SIZE", "_SIZE").replace("_SIZE = 512", "") + "\n\n_SIZE = 512\n"
    place = tmp_path / "definitions" / "rmsnorm" / "rmsnorm_h512.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(own))
    done = run("dump", tmp_path)
    assert done.exit_code == 0
    assert "rmsnorm_h512: same: rmsnorm_h512\n  flashinfer.norm.rmsnorm" in done.output


def test_files_in_place_of_names(directory: Path, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    reference = find_root() / "reference" / "rmsnorm" / "rmsnorm.py"
    kernel.write_text(reference.read_text().replace("HIDDEN_SIZE = ", "HIDDEN_SIZE = 512  # "))
    norm, merge = directory / "rmsnorm_h512.json", directory / "merge_state_h16_d128.json"
    shown = run("show", merge)
    assert shown.exit_code == 0 and "def _merge_state_reference" in shown.output
    verified = run("verify", norm, merge, "rmsnorm_h128")
    assert verified.exit_code == 1
    assert "2 passed, 1 failed" in verified.output
    costs = run("cost", directory / "rmsnorm_h6656.json", "--axes", "batch_size=1")
    assert costs.exit_code == 0 and "rmsnorm_h6656 at batch_size = 1" in costs.output
    checked = run("check", kernel, "-d", norm, "--examples", "2")
    assert checked.exit_code == 0, checked.output
    assert f"-d {norm} " in checked.output
    refused = run("check", kernel, "-d", merge)
    assert refused.exit_code == 1
    assert "no Definition here computes it" in refused.output


def test_a_file_of_this_dataset_is_verified_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rmsnorm_h128.json"
    path.write_text(json.dumps(load("rmsnorm_h128").to_dict()))
    done = run("verify", path)
    assert done.exit_code == 0 and "1 passed" in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "cannot be read", id="syntax"),
        pytest.param('{"name": "x"}', "op_type is missing", id="field"),
        pytest.param("[]", "not a JSON object", id="list"),
    ],
)
def test_a_file_that_is_no_dump_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    done = run("dump", path)
    assert done.exit_code == 1
    assert message in done.output and str(path) in done.output


def test_a_dump_never_runs_beside_a_gpu(directory: Path) -> None:
    with pytest.raises(click.UsageError, match="runs on --device cpu only"):
        _of_dumps([directory / "rmsnorm_h512.json"], "cuda")


def test_only_unknown_dumps_are_a_status_of_their_own(record: Record, tmp_path: Path) -> None:
    data = next(one for one in record.dumps if one["template"] == "pod_run")
    (tmp_path / "x.json").write_text(json.dumps(data))
    done = run("dump", tmp_path)
    assert done.exit_code == 3
    assert "unknown: no family here has this template" in done.output
