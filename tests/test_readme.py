"""The example on the README's first screen is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLE = next(block for block in re.findall(r"^```console\n(.*?)^```", README, re.M | re.S) if "show" in block)
SHOW, VERIFY = (text.splitlines() for text in EXAMPLE.split("$ ")[1:])


def printed(command: str) -> list[str]:
    """Standard output of one ``flashinfer-trace`` command, by lines."""
    result = CliRunner().invoke(main, command.split()[1:])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_first_example_shows_what_the_command_prints():
    """Line by line; `...` stands for any text."""
    command, *shown = SHOW
    lines = printed(command)
    for line in shown:
        start = line.removesuffix("...").rstrip()
        found = [one for one in lines if one.startswith(start)] if line.endswith("...") else [line]
        assert found and found[0] in lines, f"`{command}` does not print the line {line!r}"


def test_the_first_example_verifies_as_the_command_does():
    """Cases and vacuous ones are equal everywhere. Errors may differ a little between processors, and seconds more."""
    command, heading, row = VERIFY
    titles, figures, *_ = printed(command)
    (*shown, error, _), (*found, worst, _) = (re.split(r" {2,}", line) for line in (row, figures))
    fix = f"README.md: replace the two lines below `{command}` by what it prints:\n{titles}\n{figures}"
    assert (heading, shown) == (titles, found), fix
    assert float(error) == pytest.approx(float(worst), abs=0.01), fix
