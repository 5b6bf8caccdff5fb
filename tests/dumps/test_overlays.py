"""Definitions of others as roots: folders of FlashInfer's dumps, and TraceSets of flashinfer-bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashinfer_trace.cli import main
from flashinfer_trace.dataset import validation
from flashinfer_trace.dataset.store import find_root, load
from flashinfer_trace.format.roots import PATH_VARIABLE, find_overlays, find_roots
from tools.templates.record import Record

Run = Callable[..., Result]


@pytest.fixture
def overlay(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of dumps: one as here, one with another contract, a new size, and one that is unknown here."""
    by_name = {data["name"]: data for data in reversed(record.dumps)}
    folder = tmp_path / "dumps"
    folder.mkdir()
    names = ("rmsnorm_h512", "gqa_paged_decode_h32_kv8_d128_ps64", "rmsnorm_h6656", "pod_run_h8_kv2_d64")
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(by_name[name]))
    monkeypatch.setenv(PATH_VARIABLE, str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(main, [str(one) for one in arguments])


def test_an_overlay_is_listed_with_what_it_resembles(overlay: Path, run: Run) -> None:
    assert find_overlays() == [overlay] and find_roots() == [find_root()]
    rows = {row["file"]: row for row in json.loads(run("list", "--format", "json").stdout) if "file" in row}
    assert {Path(file).stem: row["resembles"] for file, row in rows.items()} == {
        "rmsnorm_h512": "rmsnorm_h512",
        "rmsnorm_h6656": "rmsnorm_h6656",
        "gqa_paged_decode_h32_kv8_d128_ps64": "gqa_paged_decode_h32_kv8_d128_ps64",
        "pod_run_h8_kv2_d64": None,
    }
    assert rows["dumps/gqa_paged_decode_h32_kv8_d128_ps64.json"]["differs"] == ["it does not take kv_last_page_len"]
    text = run("list", "--op-type", "rmsnorm").stdout
    assert "dumps/rmsnorm_h6656.json" in text and "new size of rmsnorm" in text
    assert run("list", "--op-type", "pod").stdout.split() == [
        *("pod", "dumps/pod_run_h8_kv2_d64.json", "unknown", "here")
    ]


def test_what_a_dump_claims_of_itself_does_not_count(overlay: Path, run: Run) -> None:
    assert "status:verified" in (overlay / "rmsnorm_h6656.json").read_text()
    assert "dumps/" not in run("list", "--tag", "status:verified", "--op-type", "rmsnorm").stdout


def test_find_has_the_kernels_that_prove_what_a_dump_resembles(overlay: Path, run: Run) -> None:
    found = json.loads(run("find", "rmsnorm", "h=512", "--format", "json").stdout)
    ours, theirs = (one for one in found if one["name"] == "rmsnorm_h512")
    assert theirs["file"] == "dumps/rmsnorm_h512.json" and theirs["resembles"] == ours["name"]
    assert theirs["kernels"] == ours["kernels"] != []
    only = run("find", "pod")
    assert only.exit_code == 0 and only.stdout.startswith("dumps/pod_run_h8_kv2_d64.json  unknown here")
    nothing = run("find", "rmsnorm", "h=6657")
    assert nothing.exit_code == 2


def test_show_says_by_whom_and_for_which_version(overlay: Path, run: Run) -> None:
    text = run("show", "dumps/rmsnorm_h512.json").stdout
    assert "here    resembles rmsnorm_h512\n" in text
    assert "kernel  flashinfer.norm.rmsnorm: ran, flashinfer-python " in text
    other = run("show", "gqa_paged_decode_h32_kv8_d128_ps64").stdout
    assert "kv_last_page_len" in other and "  here" not in other, "of this name there is one here"
    assert "  here    unknown here\n" in run("show", "pod_run_h8_kv2_d64").stdout


def test_a_name_that_only_an_overlay_has_is_its_file(overlay: Path, run: Run, tmp_path: Path) -> None:
    verified = run("verify", "rmsnorm_h6656", "rmsnorm_h128")
    assert verified.exit_code == 0 and "2 passed" in verified.output, verified.output
    glob = json.loads(run("verify", "rmsnorm_h[56]*2", "--format", "json").stdout)
    assert [one["definition"] for one in glob].count("rmsnorm_h512") == 2, "the dataset's and the dump"
    kernel = tmp_path / "kernel.py"
    kernel.write_text(load("rmsnorm_h7168").reference.replace("7168", "6656"))
    checked = run("check", kernel, "-d", "rmsnorm_h6656", "--examples", "2")
    assert checked.exit_code == 0, checked.output
    assert "for rmsnorm_h6656 on cpu: reference-grade" in checked.output


def test_validate_names_the_command_that_reads_overlays(overlay: Path, run: Run, tmp_path: Path) -> None:
    elsewhere = tmp_path / "x.json"
    elsewhere.write_bytes((overlay / "rmsnorm_h512.json").read_bytes())
    one = "is a Definition of"
    for path, what in ((overlay, "holds Definitions of"), (overlay / "rmsnorm_h512.json", one), (elsewhere, one)):
        done = run("validate", path)
        assert done.exit_code == 2
        assert f"{path} {what}" in done.stderr and f"`flashinfer-trace dump {path}`" in done.stderr


def test_dump_says_what_the_overlays_are(overlay: Path, run: Run) -> None:
    done = run("dump")
    assert "4 dumps: 1 same, 1 new size, 1 another function, 1 unknown" in done.output


def test_a_trace_set_is_an_overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    place = tmp_path / "definitions" / "rmsnorm" / "rmsnorm_h512.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(load("rmsnorm_h512").to_dict()))
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    twice = run("list")
    assert twice.exit_code == 2 and "has that name too" in twice.stderr, "so far it could be one of yours"
    (tmp_path / "solutions").mkdir()
    assert find_overlays() == [tmp_path]
    assert f"{place}  resembles rmsnorm_h512" in run("list", "--op-type", "rmsnorm").stdout
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "definitions"))
    assert find_overlays() == [tmp_path / "definitions"]


def test_what_is_wrong_with_an_overlay_is_named(overlay: Path, run: Run, tmp_path: Path) -> None:
    (overlay / "more").mkdir()
    (overlay / "more" / "x.json").write_bytes((overlay / "rmsnorm_h6656.json").read_bytes())
    listed = run("list")
    assert listed.exit_code == 1 and "has the name rmsnorm_h6656 too; remove one of them" in listed.stderr
    (overlay / "more" / "x.json").rename(overlay / "more" / "rmsnorm_h6656.json")
    shown = run("show", "rmsnorm_h6656")
    assert shown.exit_code == 1 and "is in several roots; name one of the files dumps/more/rmsnorm_h6656.json" in (
        shown.stderr
    )
    (overlay / "more" / "rmsnorm_h6656.json").write_text("{}")
    for command in ("list", "validate"):
        broken = run(command)
        assert broken.exit_code == 1 and f"{overlay / 'more' / 'rmsnorm_h6656.json'}: not a Definition" in broken.stderr


def test_validate_says_that_overlays_are_not_checked(overlay: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "validate_paths", lambda paths, root, **_: validation.Result(7, []))
    done = run("validate")
    assert done.exit_code == 0 and "7 Definitions checked, no problems" in done.stdout
    assert "4 Definitions of other programs not checked; `flashinfer-trace dump`" in done.stdout
