"""Imports point down: the contracts in pyproject.toml hold, and each of them can fail."""

from __future__ import annotations

import graphlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp", reason="pip install 'flashinfer-trace[test]'")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flashinfer_trace", "tools")
#: Wide enough that no name of a contract is wrapped.
WIDE = {**os.environ, "COLUMNS": "200"}
FIRST = "from __future__ import annotations\n"
PACKAGE, TOOLS = "command line -> judging", "only the site imports"
#: Contract, a module, and an import that breaks the contract.
TURNED = [
    (PACKAGE, "flashinfer_trace/harness/inputs.py", "from flashinfer_trace import families"),
    (PACKAGE, "flashinfer_trace/dataset/coverage.py", "from flashinfer_trace.judging import bench"),
    (PACKAGE, "flashinfer_trace/kernels/names.py", "from flashinfer_trace.dataset import store"),
    (PACKAGE, "flashinfer_trace/sandbox/worker.py", "from flashinfer_trace.verdict import compare"),
    (PACKAGE, "flashinfer_trace/judging/judge.py", "from flashinfer_trace import cli"),
    (PACKAGE, "flashinfer_trace/dataset/flashinfer_bench.py", "from flashinfer_trace.harness import case"),
    (PACKAGE, "flashinfer_trace/format/precision.py", "from flashinfer_trace.kernels import names"),
    ("the package never imports", "flashinfer_trace/format/definition.py", "from tools import site"),
    (TOOLS, "tools/runtime_tracing/frames.py", "from tools.trace import needs"),
    (TOOLS, "tools/trace/needs.py", "from tools.extract import sizes"),
    (TOOLS, "tools/extract/sizes.py", "from tools.scaffold import templates"),
    (TOOLS, "tools/fuzz/values.py", "from tools import mutate"),
    (TOOLS, "tools/record_times.py", "from tools import site"),
    ("the other tools are independent", "tools/scaffold/templates.py", "from tools.trace import graph"),
    ("no import cycles", "flashinfer_trace/harness/inputs.py", "from flashinfer_trace.harness import case"),
]


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=directory, env=WIDE, capture_output=True, text=True, timeout=60)


@pytest.mark.quick
def test_arrows_point_down():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the packages and their contracts."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.html", "*.js", "*.css")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def broken(directory: Path) -> list[str]:
    """The broken contracts, at least one."""
    result = lint(directory)
    assert result.returncode == 1, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if line.endswith("BROKEN")]


@pytest.mark.parametrize(("contract", "file", "turned"), TURNED)
def test_an_arrow_that_is_turned_is_noticed(contract, file, turned, copied):
    text = (copied / file).read_text()
    assert FIRST in text
    (copied / file).write_text(text.replace(FIRST, f"{FIRST}{turned}\n", 1))
    found = broken(copied)
    assert any(line.startswith(contract) for line in found), found


@pytest.mark.parametrize(("contract", "package"), [(PACKAGE, "flashinfer_trace"), (TOOLS, "tools")])
def test_a_module_in_no_layer_is_noticed(contract, package, copied):
    (copied / package / "added.py").write_text(FIRST)
    (found,) = broken(copied)
    assert found.startswith(contract)


def test_a_layer_without_a_module_is_noticed(copied):
    layers = re.findall(r"^layers = \[\n.*?^\]$", (copied / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert len(layers) == 2
    assert not [names for names in layers if "(" in names]  # in brackets, a module may be missing
    (copied / "flashinfer_trace" / "__main__.py").rename(copied / "flashinfer_trace" / "cli" / "start.py")
    result = lint(copied)
    assert result.returncode == 1
    assert "__main__ does not exist" in result.stdout + result.stderr


@pytest.mark.quick
def test_no_modules_import_in_a_circle():
    """Includes the modules of packages (`__init__`), which the contracts on siblings leave out."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 50
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the cycle
