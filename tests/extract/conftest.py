"""A dataset without Definitions, and small models to extract into it."""

from __future__ import annotations

import json
import shutil

import pytest
from small_models import TINY, add_model

import flashinfer_trace
from flashinfer_trace.kernels.table import KernelFacts
from tools.extract_definitions.__main__ import main


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A dataset root with conventions, references, empty definitions/ and evidence/, and the models tiny and twin."""
    source = flashinfer_trace.find_root()
    target = tmp_path / "dataset"
    shutil.copytree(source / "schema", target / "schema", ignore=shutil.ignore_patterns("tests"))
    shutil.copytree(source / "reference", target / "reference")
    for directory in ("definitions", "evidence", "models"):
        (target / directory).mkdir()
    for name, title in (("tiny", "Tiny"), ("twin-1.5", "Twin-1.5")):
        add_model(target, name, title, TINY)
    # The heads of the models are smaller than what kernels are compiled for.
    real = KernelFacts.unsupported

    def unsupported(kernel, definition):
        reason = real(kernel, definition)
        return None if reason is None or reason.startswith(("needs head_", "needs qk_")) else reason

    monkeypatch.setattr(KernelFacts, "unsupported", unsupported)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(target))
    monkeypatch.chdir(tmp_path)  # no .sources here: the committed digests are read
    return target


@pytest.fixture
def extract(root, capsys):
    """Runs the command and returns exit status, standard output and standard error."""

    def run(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def extract_config(extract, tmp_path):
    """Extracts from a published configuration, which may hold what a file of models/ may not."""

    def run(name, config, *arguments):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return extract("--model-name", name, "--config", path, *arguments)

    return run


@pytest.fixture
def snapshot(root):
    """The files under definitions/ and their content."""
    return lambda: {
        path.relative_to(root / "definitions").as_posix(): path.read_text()
        for path in sorted((root / "definitions").rglob("*"))
        if path.is_file()
    }
