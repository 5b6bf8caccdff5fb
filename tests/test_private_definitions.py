"""docs/private_definitions.md: the package that it builds, installed, and the commands that it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "private_definitions.md").read_text(encoding="utf-8")
#: A paragraph and the block of code below it; and the file that it names.
BLOCK = re.compile(r"(?<=\n\n)((?:[^\n]+\n)+)\n```\w+\n(.*?)```\n", re.DOTALL)
FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:json|py|toml))`")
FILES = {FILE.findall(text)[-1]: block for text, block in BLOCK.findall(TEXT) if FILE.search(text)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The directory with the files of the page, and the environment in which its package is installed."""
    directory, site = tmp_path_factory.mktemp("private"), tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (directory / "private_kernels" / "__init__.py").touch()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(directory)], check=True, timeout=120)
    shutil.rmtree(directory / "private_kernels")  # what is installed is imported
    paths = os.pathsep.join([str(site), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "FLASHINFER_TRACE_PATH": str(directory / "data")}
    return directory, environment


#: Runs commands one after the other in one process: each would import torch again.
RUN = """
import json, sys
from click.testing import CliRunner
from flashinfer_trace.cli import main
found = [CliRunner().invoke(main, command.split()) for command in sys.argv[1:]]
print(json.dumps([(one.exit_code, one.output) for one in found]))
"""


@pytest.fixture
def run(installed):
    """Runs commands with the package, in the directory of the page's files: the status and output of each."""

    def commands(*texts: str) -> list[tuple[int, str]]:
        directory, environment = installed
        program = [sys.executable, "-c", RUN, *texts]
        done = subprocess.run(program, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [(status, output) for status, output in json.loads(done.stdout)]

    return commands


def test_the_page_has_every_file_of_the_package():
    assert list(FILES) == [
        "data/schema/naming.json",
        "data/reference/row_scale/row_scale.py",
        "data/definitions/row_scale/row_scale_h4096.json",
        "private_kernels/families.py",
        "private_kernels/kernels.py",
        "pyproject.toml",
    ]


def test_the_commands_of_the_page_take_the_definition(run, installed):
    directory, _ = installed
    right = "def run(hidden_states, scale):\n    return hidden_states * scale[:, None]\n"
    (directory / "right.py").write_text(right)
    (directory / "wrong.py").write_text(right.replace(" * ", " * 1.02 * "))
    synced, validated, verified, judged, refused, cost, found = run(
        "sync row_scale_h4096",
        "validate data",
        "verify row_scale_h4096 --against all --format json",
        "check right.py -d row_scale_h4096 --seed 3",
        "check wrong.py -d row_scale_h4096 --seed 3",
        "cost row_scale_h4096 --axes num_rows=4 --format json",
        "find row_scale h=4096",
    )
    definition = json.loads((directory / "data" / "definitions" / "row_scale" / "row_scale_h4096.json").read_text())
    assert synced[0] == 0 and "HIDDEN_SIZE = 4096" in definition["reference"], synced
    assert validated[0] == 0 and "1 Definition checked, no problems" in validated[1], validated
    reports = {one["target"]: one for one in json.loads(verified[1])}
    assert verified[0] == 0 and reports["oracle"]["status"] == "passed", verified
    assert reports["private_kernels.kernels.row_scale"]["message"] == "kernels need --device cuda"
    assert judged[0] == 0 and "reference-grade" in judged[1], judged
    assert refused[0] == 1 and "wrong, in call " in refused[1], refused
    assert json.loads(cost[1])["operations"] == {"float32": 4 * 4096}, cost
    assert found[0] == 0 and found[1].startswith("row_scale_h4096  unverified"), found


def test_a_known_family_has_the_further_kernel(run):
    ((status, output),) = run("verify rmsnorm_h512 --kernel private_kernels.kernels.rmsnorm --format json")
    assert status == 3 and "kernels need --device cuda" in output and "private_kernels.kernels.rmsnorm" in output


def test_a_module_that_cannot_be_used_is_named_with_its_entry_point(run, installed):
    _, environment = installed
    (families,) = Path(environment["PYTHONPATH"].split(os.pathsep)[0]).glob("private_kernels/families.py")
    usual = families.read_text()
    families.write_text("FAMILIES = 3\n")
    try:
        ((status, output),) = run("verify row_scale_h4096")
    finally:
        families.write_text(usual)
    assert status == 1 and "the entry point private = private_kernels.families" in output, output
