"""Imports point down: the contracts in pyproject.toml hold, and each of them can fail."""

from __future__ import annotations

import graphlib
import os
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
#: Contract -> a module, and an import that breaks the contract.
TURNED = {
    "command line -> families": ("flashinfer_trace/harness/inputs.py", "from flashinfer_trace import families"),
    "the package never imports": ("flashinfer_trace/definition.py", "from tools import generate_docs"),
    "generate_docs may import": ("tools/kernel_tracing/source/sources.py", "from tools.op_tracing import definitions"),
    "the other tools are independent": ("tools/scaffold/templates.py", "from tools.op_tracing import graph"),
    "only generate_docs imports": ("tools/extract_definitions/words.py", "from tools.scaffold import templates"),
    "kernel tracing: report": ("tools/kernel_tracing/rules/platforms.py", "from tools.kernel_tracing import report"),
    "no import cycles": ("flashinfer_trace/harness/inputs.py", "from flashinfer_trace.harness import case"),
}


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=directory, env=WIDE, capture_output=True, text=True, timeout=60)


def test_arrows_point_down():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("contract", TURNED)
def test_an_arrow_that_is_turned_is_noticed(contract, tmp_path):
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.html", "*.js", "*.css")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file, turned = TURNED[contract]
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(text.replace(FIRST, f"{FIRST}{turned}\n", 1))
    result = lint(tmp_path)
    broken = [line for line in result.stdout.splitlines() if line.endswith("BROKEN")]
    assert result.returncode == 1, result.stdout + result.stderr
    assert any(line.startswith(contract) for line in broken), result.stdout


def test_no_modules_import_in_a_circle():
    """Includes the modules of packages (`__init__`), which the contracts on siblings leave out."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 50
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the cycle
