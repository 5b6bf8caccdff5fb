"""Which dataset a command reads, and what it prints about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace.dataset import store

ROOT = store.PACKAGE.parent


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Another checkout, with one Definition and without the package's code."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("schema", "reference"):
        shutil.copytree(ROOT / name, root / name)
    (root / "docs").mkdir()
    for file in ("definitions/rmsnorm/rmsnorm_h512.json", "evidence/rmsnorm/rmsnorm_h512.jsonl"):
        (root / file).parent.mkdir(parents=True)
        shutil.copy(ROOT / file, root / file)
    shutil.copytree(ROOT / "evidence" / "runs", root / "evidence" / "runs")
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    return root


def test_a_checkout_around_the_current_directory_is_read(checkout, monkeypatch, invoke):
    monkeypatch.chdir(checkout / "docs")
    assert flashinfer_trace.find_root() == checkout
    assert [row["name"] for row in json.loads(invoke("list", "--format", "json").stdout)] == ["rmsnorm_h512"]
    for arguments in (["sync", "--check"], ["validate", "definitions"], ["verify", "--examples", "5"]):
        monkeypatch.chdir(checkout)
        assert invoke(*arguments).stdout.splitlines()[-1].endswith(f"; dataset: {checkout}")


def test_elsewhere_the_own_checkout_is_read(tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    assert flashinfer_trace.find_root() == ROOT
    result = invoke("validate", str(ROOT / "definitions" / "rmsnorm" / "rmsnorm_h512.json"))
    assert result.stdout.endswith(f"; dataset: {ROOT}\n") and result.stderr == ""


def test_the_variable_wins(checkout, monkeypatch, tmp_path):
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(ROOT))
    assert flashinfer_trace.find_root() == ROOT
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    with pytest.raises(flashinfer_trace.DatasetError, match="set FLASHINFER_TRACE_ROOT or reinstall"):
        flashinfer_trace.find_root()


def test_a_variable_that_names_a_loop_of_links(tmp_path, monkeypatch):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(loop))
    with pytest.raises(flashinfer_trace.DatasetError, match="set FLASHINFER_TRACE_ROOT or reinstall"):
        flashinfer_trace.find_root()


@pytest.mark.parametrize("kind", ["pipe", "directory", "loop"])
def test_a_definition_that_is_no_file_is_named(checkout, monkeypatch, invoke, kind):
    path = checkout / "definitions" / "rmsnorm" / "strange.json"
    make = {"pipe": lambda: os.mkfifo(path), "directory": path.mkdir, "loop": lambda: path.symlink_to(path)}
    monkeypatch.chdir(checkout)
    make[kind]()
    try:
        results = [invoke(*command) for command in (["show", "strange"], ["list"], ["verify", "strange"])]
    finally:
        (path.rmdir if kind == "directory" else path.unlink)()
    for result in results:
        assert result.exit_code == 1 and f"{path}: cannot be read" in result.stderr, result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "--version", "list --help", "show rmsnorm_h512", "list"])
def test_a_full_disk_is_one_line(arguments):
    command = [sys.executable, "-c", "from flashinfer_trace.cli import main; main()", *arguments.split()]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == "Error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("text", [None, '[project]\nname = "another"\n', "\xff"])
def test_another_project_with_such_directories_is_not_read(tmp_path, monkeypatch, text):
    for name in ("definitions", "schema"):
        (tmp_path / name).mkdir()
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text, encoding="latin-1")
    monkeypatch.chdir(tmp_path)
    assert flashinfer_trace.find_root() == ROOT


def test_a_current_directory_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert flashinfer_trace.find_root() == ROOT


def test_code_from_elsewhere_is_pointed_out(checkout, tmp_path, monkeypatch, invoke):
    other = tmp_path / "other"
    shutil.copytree(checkout, other)
    (other / "flashinfer_trace").mkdir()
    (other / "flashinfer_trace" / "__init__.py").touch()
    monkeypatch.chdir(other)
    result = invoke("list", "--format", "json")
    assert result.exit_code == 0 and len(json.loads(result.stdout)) == 1
    assert f"warning: the dataset is {other}, but the code" in result.stderr
    assert f"is {store.PACKAGE}; to use the code there too: pip install -e {other}" in result.stderr


def test_an_installed_copy_is_read_in_a_checkout_too_and_says_so(checkout, tmp_path):
    site = tmp_path / "site"
    package = site / "flashinfer_trace"
    shutil.copytree(store.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("definitions", "schema", "reference"):
        shutil.copytree(checkout / name, package / "data" / name)
    command = [sys.executable, "-c", "from flashinfer_trace.cli import main; main(['show', 'rmsnorm_h512'])"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    here = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    assert here.returncode == 0, here.stderr
    expected = (
        f"the dataset is the installed copy, {package / 'data'}, not the checkout {checkout}; to use the checkout"
    )
    assert expected in here.stderr
    away = subprocess.run(command, cwd=Path(tmp_path), env=environment, capture_output=True, text=True, timeout=60)
    assert (away.stdout, away.stderr) == (here.stdout, "")


@pytest.mark.parametrize(
    ("root", "files", "fix"),
    [
        ("", ["a.txt"], "correct the path, or name a folder with the .json files of FLASHINFER_TRACE_DUMP_DIR"),
        ("definitions", ["definitions/rmsnorm/a.json", "reference/rmsnorm/a.py"], "name the root {}"),
    ],
)
def test_a_root_without_definitions_says_what_to_name(tmp_path, monkeypatch, root, files, fix):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    monkeypatch.setenv("FLASHINFER_TRACE_PATH", str(tmp_path / root))
    with pytest.raises(store.DatasetError, match="has no definitions/; ") as raised:
        store.find_roots()
    assert fix.format(tmp_path.resolve()) in str(raised.value)
