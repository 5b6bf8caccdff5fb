"""The README is a door: short, and its first example is true."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
(KERNEL, EXAMPLE) = re.findall(r"^```(?:python|console)\n(.*?)^```", README, re.M | re.S)[:2]
COMMAND, *SHOWN = EXAMPLE.removeprefix("$ ").splitlines()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_norm.py"
    path.write_text(KERNEL)
    return path


def test_it_is_a_door() -> None:
    assert len(README.splitlines()) <= 120


def test_allclose_accepts_the_bug(kernel: Path) -> None:
    run = runpy.run_path(str(kernel))["run"]
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 7168), (7168,)))
    expected = flashinfer_trace.load("rmsnorm_h7168").run(x, weight)
    assert torch.allclose(run(x, weight), expected, rtol=1e-2, atol=1e-2)


def test_check_rejects_the_bug_as_shown(kernel: Path) -> None:
    """Line by line; `...` stands for any text."""
    result = CliRunner().invoke(main, COMMAND.split()[1:])
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and len(lines) == len(SHOWN) == 4
    for line, found in zip(SHOWN, lines, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, line.split("..."))), found), (line, found)
