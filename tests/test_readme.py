"""The example on the README's first screen is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from flashinfer_trace.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLE = next(block for block in re.findall(r"^```console\n(.*?)^```", README, re.M | re.S) if "show" in block)


def printed(command: str) -> list[str]:
    """Standard output of one ``flashinfer-trace`` command, by lines."""
    result = CliRunner().invoke(main, command.split()[1:])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_first_example_is_what_the_commands_print():
    """Line by line; `...` stands for any text. Figures of a run may differ between platforms, its words may not."""
    commands = EXAMPLE.split("$ ")[1:]
    assert [command.split()[1] for command in commands] == ["show", "verify"]
    for text in commands:
        command, *shown = text.splitlines()
        lines = printed(command)
        if "verify" in command:
            shown, lines = ([re.sub(r"[\d.]+ *$|(?<= )[\d.]+ ", "#", line) for line in some] for some in (shown, lines))
        for line in shown:
            start = line.removesuffix("...").rstrip()
            found = [one for one in lines if one.startswith(start)] if line.endswith("...") else [line]
            assert found and found[0] in lines, f"`{command}` does not print the line {line!r}"
