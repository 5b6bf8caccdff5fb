"""Hostile files wherever a command reads one: a clear refusal within seconds, no traceback, no hang, no gigabytes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_up_evidence import small_dataset

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset.sync import sync_definitions
from flashinfer_trace.format import json_source, patterns
from flashinfer_trace.format.files import UnreadableFile, read_bytes, read_text, sweep, write_text

ROOT = flashinfer_trace.find_root()
NAME = "rmsnorm_h512"
#: A recorded run, which extraction compares with the dataset.
RECORD = ROOT / "traces" / "runtime" / "qwen3_8b-bf16-flashinfer.json"
#: Each takes well below a second on an idle machine.
SECONDS = 5
#: More memory than any file may cost.
MEMORY = 500 * 1024 * 1024

TARGETS = (
    f"definitions/rmsnorm/{NAME}.json",
    f"evidence/rmsnorm/{NAME}.jsonl",
    "reference/rmsnorm/rmsnorm.py",
    "schema/naming.json",
    "schema/definition.schema.json",
    "schema/evidence.schema.json",
    "schema/evidence_run.schema.json",
    "models/needs/deepseek-v3.json",
    "models/deepseek-v3.json",
)
COMMANDS = (
    ("validate",),
    ("sync", "--check"),
    ("list",),
    ("show", NAME),
    ("coverage",),
    ("coverage", "--model", "deepseek-v3"),
    ("verify", NAME, "--examples", "1"),
)


def replaced_by(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def linked_to(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return change


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOSTILE: dict[str, Callable[[Path], None]] = {
    "nothing": replaced_by(b""),
    "no text": replaced_by(bytes(range(256)) * 20),
    "no JSON": replaced_by(b"{"),
    "null": replaced_by(b"null"),
    "a list": replaced_by(b"[]"),
    "an empty object": replaced_by(b"{}"),
    "objects of numbers": replaced_by(
        b'{"families": 1, "abbreviations": 2, "tags": 3, "entries": 4, "ops": 5, "name": 6, "axes": 7, "type": 8}'
    ),
    "lists for objects": replaced_by(b'{"families": [1], "tags": [2], "entries": [3], "ops": [4], "unsupported": [5]}'),
    "deep nesting": replaced_by(b"[" * 100_000),
    "deep objects": replaced_by(b'{"a":' * 100_000),
    "many brackets in Python": replaced_by(b"(" * 100_000),
    "18 MB": replaced_by(b'{"a": "' + b"x" * 18_000_000 + b'"}'),
    "18 MB of code": replaced_by(b"x = 1\n" * 3_000_000),
    "a number too long": replaced_by(b'{"a": ' + b"9" * 100_000 + b"}"),
    "duplicate keys": replaced_by(b'{"families": {}, "families": {}}'),
    "a null byte": replaced_by(b"\x00" * 100),
    "a device": linked_to("/dev/zero"),
    "itself": linked_to("itself.json"),
    "a FIFO": fifo,
    "a directory": directory,
    "no file": lambda path: path.unlink(),
}


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models" / "needs").mkdir(parents=True)
    tagged = flashinfer_trace.load(NAME, ROOT).tag_values("model")  # validate looks up each model of a tag
    for name in (f"{directory}/{model}.json" for directory in ("models/needs", "models") for model in tagged):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return small_dataset(tmp_path, ROOT, NAME)


@pytest.fixture(autouse=True)
def in_seconds() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


def run(*arguments: str) -> str:
    started = time.process_time()
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exc_info)
    assert time.process_time() - started < SECONDS, arguments
    assert all(len(line) < 5000 for line in result.output.splitlines())
    return result.output


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("target", TARGETS)
def test_no_command_gives_a_traceback(dataset: Path, target: str, kind: str) -> None:
    path = dataset / target
    HOSTILE[kind](path)
    validated = run("validate")
    if not target.startswith("models/"):
        assert "no problems" not in validated
    for command in COMMANDS[1:]:
        if command[0] != "verify" or kind in ("a FIFO", "deep nesting", "18 MB", "no JSON"):
            run(*command)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize(
    "target", ["schema/naming.json", f"definitions/rmsnorm/{NAME}.json", f"evidence/rmsnorm/{NAME}.jsonl"]
)
def test_extraction_gives_no_traceback(dataset: Path, target: str, kind: str) -> None:
    from tools.extract.__main__ import main as extract

    HOSTILE[kind](dataset / target)
    started = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        status = extract(["--record", str(RECORD)])
    assert status in (0, 1, 2, 3)
    assert "Traceback" not in told.getvalue()
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize("kind", HOSTILE)
def test_traces_give_no_traceback(tmp_path: Path, kind: str) -> None:
    from tools.runtime_tracing.recording import RecordingError, read

    path = tmp_path / "record.json"
    path.write_text("{}")
    HOSTILE[kind](path)
    with pytest.raises(RecordingError, match=r"record\.json: "):
        read(path)


def test_a_trace_may_be_larger_than_a_definition(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    path.write_text(json.dumps({"kernels": ["x" * (5 << 20)]}))
    assert json_source.load_object(path, json_source.TRACES)["kernels"]
    with pytest.raises(json_source.JsonSourceError, match="larger than 4 MiB"):
        json_source.load_object(path)


@pytest.mark.parametrize("pattern", ["(a|aa)+b", "(", "a{9999999999}", "[", "(?P<x", "\\"])
def test_patterns_that_explode_or_are_none(dataset: Path, pattern: str) -> None:
    naming = dataset / "schema" / "naming.json"
    document = json.loads(naming.read_text())
    document["tags"]["namespaces"]["model"]["pattern"] = pattern
    naming.write_text(json.dumps(document))
    definition = dataset / "definitions" / "rmsnorm" / f"{NAME}.json"
    data = json.loads(definition.read_text())
    data["tags"] += [f"model:{'a' * 180}{number}" for number in range(40)]
    definition.write_text(json.dumps(data))
    found = run("validate")
    assert "tag-value" in found or "dataset-schema" in found


def test_a_schema_with_a_pattern_that_is_none(dataset: Path) -> None:
    path = dataset / "schema" / "definition.schema.json"
    path.write_text(path.read_text().replace('"pattern": "^[a-z][a-z0-9_]*$"', '"pattern": "["'))
    assert "'[' is not a 'regex'" in run("validate")


def test_a_slow_pattern_is_stopped_once() -> None:
    started = time.monotonic()
    for _ in range(100):
        assert not patterns.fits("(a|aa)+c", "a" * 300)
    assert time.monotonic() - started < 10 * patterns.SECONDS
    assert patterns.fits("(a|aa)+", "aaa")
    with pytest.raises(patterns.PatternError, match="is not a regular expression"):
        patterns.check_pattern("(")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("a device", "file-kind"), ("a FIFO", "file-kind"), ("a directory", "file-kind"), ("no file", "file-unreadable")],
)
def test_the_reader_says_what_is_wrong(tmp_path: Path, kind: str, rule: str) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    assert read_bytes(path) == b"x"
    HOSTILE[kind](path)
    with pytest.raises(UnreadableFile, match=r"file: ") as caught:
        read_bytes(path)
    assert caught.value.rule == rule


def test_the_reader_has_limits(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\r\nb\rc\xc3\xa9")
    assert read_text(path, limit=8) == "a\nb\nc\u00e9"
    with pytest.raises(UnreadableFile, match="larger than 7 bytes"):
        read_text(path, limit=7)
    path.write_bytes(b"a\nb\xff")
    with pytest.raises(UnreadableFile, match="0xff at offset 3 is not UTF-8") as caught:
        read_text(path)
    assert caught.value.line == 2


def test_a_killed_write_is_swept_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\nfrom flashinfer_trace.format import files\n"
        "os.replace = lambda *paths: os._exit(9)\nfiles.write_text(pathlib.Path(sys.argv[1]), 'half')\n"
    )
    target = tmp_path / "x.json"
    killed = subprocess.run([sys.executable, "-c", code, str(target)], cwd=ROOT, timeout=60)
    assert killed.returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".x.json.")
    assert sweep(tmp_path) == []  # it could be a write that has not taken its lock yet
    os.utime(left, (0, 0))
    write_text(target, "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_write_under_way_and_other_files_are_left_alone(tmp_path: Path) -> None:
    import fcntl

    locked, other = tmp_path / ".x.json.abcd1234.part", tmp_path / ".x.json.swp"
    for path in (locked, other):
        path.write_text("")
        os.utime(path, (0, 0))
    with locked.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [locked]
    assert other.exists()
    assert sweep(tmp_path / "absent") == []


def test_embedding_sweeps_where_nothing_changes(dataset: Path) -> None:
    left = dataset / "definitions" / "rmsnorm" / f".{NAME}.json.abcd1234.part"
    left.write_text("")
    os.utime(left, (0, 0))
    assert sync_definitions(dataset, write=False) == []
    assert left.exists()
    assert sync_definitions(dataset, write=True) == []
    assert not left.exists()
    assert proof.proven(dataset, flashinfer_trace.load(NAME, dataset))
