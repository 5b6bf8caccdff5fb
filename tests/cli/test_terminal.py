"""The output of commands on a terminal: lines that fit, colors, progress, and help that is not cut."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest

from flashinfer_trace.cli import main
from flashinfer_trace.cli.options import text_table

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*arguments: str, columns: int = 80) -> tuple[str, int]:
    """The output of a command on a terminal of this width, and its exit status."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, columns)) if hasattr(termios, "tcsetwinsize") else _resize(theirs, columns)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-m", "flashinfer_trace", *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm-256color"}
    )
    os.close(theirs)
    parts = []
    try:
        while data := os.read(ours, 65536):
            parts.append(data)
    except OSError:  # how Linux tells that the other end is closed
        pass
    finally:
        os.close(ours)
    return b"".join(parts).decode(), process.wait(timeout=60)


def _resize(descriptor: int, columns: int) -> None:
    import fcntl

    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "gqa_paged_decode_h8_kv1_d128_ps1"),
        ("find", "deepseek-v3", "tp=8", "rmsnorm", "prefill"),
        ("list", "--op-type", "rmsnorm"),
        ("cost", "rmsnorm_h7168", "--axes", "batch_size=64"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_output_fits_80_columns(arguments: tuple[str, ...]) -> None:
    text, status = on_terminal(*arguments)
    lines = [ESCAPES.sub("", line) for line in text.splitlines()]
    assert status == 0 and len(lines) > 3
    assert [line for line in lines if len(line) > 80] == []


def test_show_is_colored_on_a_terminal_only(invoke) -> None:
    text, _ = on_terminal("show", "rmsnorm_h7168", columns=120)
    assert len(ESCAPES.findall(text)) > 50
    piped = invoke("show", "rmsnorm_h7168").output
    assert ESCAPES.findall(piped) == []
    words = " ".join(ESCAPES.sub("", text).split())
    assert all(" ".join(line.split()) in words for line in piped.split("import torch")[1].splitlines())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(("validate",), r"\d+/\d+"), (("check", "my_norm.py", "-d", "rmsnorm_h7168"), "judging .*my_norm.py")],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_progress(arguments: tuple[str, ...], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "my_norm.py"
    kernel.write_text("def run(hidden_states, weight):\n    return hidden_states\n")
    text, status = on_terminal(*(str(kernel) if one == kernel.name else one for one in arguments), columns=160)
    assert re.search(shown, ESCAPES.sub("", text)), text
    assert status == (0 if arguments[0] == "validate" else 1)


def test_cells_are_wrapped_and_no_word_is_lost() -> None:
    rows = [["name", "what"], ["a" * 50, "some words that are long " * 5]]
    wrapped = text_table(rows, columns=60)
    assert max(map(len, wrapped.splitlines())) <= 60
    assert sorted(re.sub(r"\s", "", wrapped)) == sorted(re.sub(r"\s", "", text_table(rows, columns=0)))


def test_the_summaries_of_commands_are_whole(invoke) -> None:
    text = " ".join(invoke("--help").output.partition("Commands:")[2].split())
    assert "..." not in text
    for command in main.commands.values():
        assert " ".join(command.get_short_help_str(limit=1000).split()) in text


def test_commands_in_help_are_on_one_line(invoke) -> None:
    for name, command in main.commands.items():
        named = re.findall(r"^ +flashinfer-trace \w+", invoke(name, "--help").output, re.M)
        written = re.findall(r"^ +flashinfer-trace \w+", click.unstyle(command.help or ""), re.M)
        assert len(named) == len(written), name
    assert 'eval "$(_FLASHINFER_TRACE_COMPLETE=bash_source flashinfer-trace)"' in invoke("--help").output
