"""docs/judge.md: its walk-through is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = re.findall(r"^```console\n\$ (flashinfer-trace check .*?)\n(.*?)^```", TEXT, re.M | re.S)
((PLOT, _),) = re.findall(r"^```console\n\$ (flashinfer-trace bench .*?)\n(.*?)^```", TEXT, re.M | re.S)


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
    walk(PLOT, file, tmp_path)
    assert (tmp_path / "roofline.svg").read_text().count("<circle") > 2


def test_a_plot_needs_a_gpu(tmp_path, monkeypatch):
    """Without one, the command says so in one line, and draws nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (line,) = walk(PLOT, FILES[0], tmp_path)
    assert "GPU" in line and not (tmp_path / "roofline.svg").exists()
