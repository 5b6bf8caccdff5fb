"""docs/export.md: its commands print what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main

pytest.importorskip("safetensors.torch", reason="pip install 'flashinfer-trace[export]'")
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [one for block in BLOCKS for one in block.split("$ ")[1:] if one.startswith("flashinfer-trace ")]


@pytest.mark.parametrize("text", COMMANDS, ids=[one.splitlines()[0] for one in COMMANDS])
def test_commands_print_what_is_shown(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(Path(__file__).resolve().parents[2]))
    monkeypatch.chdir(tmp_path)
    command, _, shown = text.partition("\n")
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout == shown
