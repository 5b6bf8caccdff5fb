"""A harness record or a file of models/ that cannot be used is one line that names the file, and nothing is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import flashinfer_trace

ROOT = flashinfer_trace.find_root()
RECORD = "flashinfer_trace/families/my_op.py"
DERIVE, MUTATE = ("tools.derive",), ("tools.mutate", "my_kernel")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the code, with a family that `tools.scaffold` added."""
    pytest.importorskip("torch")
    target = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    for part in ("benchmarks", "flashinfer_trace", "models", "reference", "schema", "tools"):
        shutil.copytree(ROOT / part, target / part, ignore=ignored)
    for part in ("definitions", "evidence"):
        (target / part).mkdir()
    assert run(target, "tools.scaffold", "my_kernel", "--op-type", "my_op").returncode == 0
    naming = target / "schema" / "naming.json"
    entry = '"families": {"my_kernel": {"op_type": "my_op", "pattern": "my_kernel_n{n}"},'
    naming.write_text(naming.read_text().replace('"families": {', entry, 1))
    return target


def run(root, module, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(root), "FLASHINFER_TRACE_ROOT": str(root)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


UNFINISHED = "TODO: what the kernels of my_kernel compute."


@pytest.mark.parametrize(
    ("command", "change", "message"),
    [
        (DERIVE, lambda text: text, UNFINISHED),
        (MUTATE, lambda text: text, UNFINISHED),
        (DERIVE, lambda text: text.replace("twin={", "twins={"), "TypeError: "),
        (DERIVE, lambda text: text.replace("FAMILIES = (", "FAMILIES = (("), "SyntaxError: "),
        (DERIVE, lambda text: text.replace("TODO", "Done"), "the record of my_kernel has no kernel"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_before_anything_is_written(checkout, command, change, message):
    record = checkout / RECORD
    text = record.read_text()
    try:
        record.write_text(change(text))
        ended = run(checkout, *command)
    finally:
        record.write_text(text)
    assert ended.returncode in (1, 2) and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert str(record) in line and message in line
    assert not (checkout / "docs").exists()


@pytest.mark.parametrize("name", ["models/curated/claims.json", "models/tiny.json"])
def test_a_broken_file_of_models_is_named_before_anything_is_written(tmp_path, monkeypatch, capsys, name):
    derive = pytest.importorskip("tools.derive", reason="needs torch")
    shutil.copytree(ROOT / "models", tmp_path / "models")
    (tmp_path / name).write_text("{")
    monkeypatch.setattr(derive, "find_root", lambda: tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert derive.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: ") and "not JSON" in line
    assert sorted(tmp_path.rglob("*")) == before
