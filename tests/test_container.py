"""The container that SECURITY.md recommends: what it may do, and that it holds what it judges with."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

import flashinfer_trace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = flashinfer_trace.find_root()
RUN = ROOT / "container" / "run"


@pytest.fixture
def engine(tmp_path):
    """A docker that prints its arguments, one a line."""
    fake = tmp_path / "docker"
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def run(engine, directory, *arguments, **more):
    environment = {**engine, **more}
    return subprocess.run([RUN, *arguments], env=environment, cwd=directory, capture_output=True, text=True)


def test_it_has_no_network_no_rights_and_limits(engine, tmp_path):
    (tmp_path / "verdicts").mkdir()
    result = run(engine, tmp_path, "check-many", "a b.jsonl", "--out", "verdicts/v.jsonl", GPUS="all", MEMORY="3g")
    lines = result.stdout.splitlines()
    pairs = list(itertools.pairwise(lines))
    assert (
        result.returncode == 0
        and "--read-only" in lines
        and lines[-5:][1:] == [*("check-many", "a b.jsonl", "--out", "verdicts/v.jsonl")]
    )
    for pair in [
        *(("--network", "none"), ("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges"), ("--memory", "3g")),
        *(("--memory-swap", "3g"), ("--pids-limit", "1024"), ("--cpus", "2"), ("--gpus", "all")),
        *(("--volume", f"{tmp_path}:/submissions:ro"), ("--volume", f"{tmp_path}/verdicts:/submissions/verdicts:rw")),
    ]:
        assert pair in pairs, pair


def test_what_is_missing_is_named(engine, tmp_path):
    result = run(engine, tmp_path, "check-many")
    assert result.returncode == 2 and "make the directory ./verdicts first" in result.stderr
    result = run(engine, tmp_path, ENGINE="no-such-engine")
    assert result.returncode == 2 and "name another one in ENGINE" in result.stderr


def test_the_image_holds_all_that_a_wheel_is_built_from():
    """And nothing in it is written by the user that judges."""
    text = (ROOT / "container" / "Containerfile").read_text()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for directory in (*wheel["packages"], *wheel["force-include"]):
        assert f"COPY {directory} /src/{directory}\n" in text
    assert text.index("USER judge") > text.rindex("RUN ")
