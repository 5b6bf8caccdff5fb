"""docs/judge.md: its walk-through is what the commands print, and its table is that of the cheats."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from cheating_kernels import ALL, CHEATS
from click.testing import CliRunner

from flashinfer_trace.cli import main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
RESULTS = Path(__file__).with_name("flashinfer_bench.json")
COMMANDS = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", TEXT, re.M | re.S)


def walk(command: str, file: str, directory: Path) -> list[str]:
    """Writes the file that a command judges; what the command prints, by lines."""
    (directory / command.split()[2]).write_text(file)
    return CliRunner().invoke(main, command.split()[1:]).output.splitlines()


def test_the_walk_through_on_a_cpu(tmp_path, monkeypatch):
    """Line by line; `...` stands for any text."""
    monkeypatch.chdir(tmp_path)
    on_a_cpu = [(command, shown, file) for (command, shown), file in zip(COMMANDS, FILES, strict=True) if shown]
    assert len(on_a_cpu) == 2
    for command, shown, file in on_a_cpu:
        printed = walk(command, file, tmp_path)
        for line in (line for line in shown.splitlines() if line != "..."):
            start = line.removesuffix("...").rstrip()
            assert any(one.startswith(start) for one in printed), f"{line!r} is not in {printed}"


@pytest.mark.gpu_harness
def test_the_walk_through_on_a_gpu(tmp_path, monkeypatch, cuda_device):
    monkeypatch.chdir(tmp_path)
    (command, _), file = COMMANDS[0], FILES[0]
    assert walk(command, file, tmp_path)[0] == "my_norm.py for rmsnorm_h512 on cuda: reference-grade"


def rows() -> str:
    """The rows of the table: a cheat, what it says of itself, how it is found, and what flashinfer-bench says of it."""
    lines, theirs = [], json.loads(RESULTS.read_text())
    for cheat in ALL:
        tree = ast.parse((CHEATS / f"{cheat.file}.py").read_text())
        (function,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == cheat.function)
        kinds = " or ".join(f"`{kind}`" for kind in cheat.kinds)
        status = f"`{theirs[cheat.function]}`" if cheat.function in theirs else "not run"
        lines.append(f"| `{cheat.function}` | {ast.get_docstring(function)} | {kinds} | {status} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_that_of_the_cheats():
    written = TEXT.split("| Kernel | What it does | Found as | flashinfer-bench |\n|---|---|---|---|\n")[1]
    assert written == rows(), f"the table in docs/judge.md should be:\n{rows()}"
