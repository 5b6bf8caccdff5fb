"""How the processes of tools end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.shared.command import end_with

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize(
    ("last", "status", "told"),
    [
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("open('missing.json')", 1, "error: [Errno 2] No such file or directory: 'missing.json'\n"),
        ("raise BrokenPipeError", 1, ""),
        ("return 3", 3, ""),
    ],
)
def test_what_ends_a_tool_is_one_line(tmp_path, last, status, told):
    program = tmp_path / "program.py"
    lines = ["from tools.shared.command import end_with", "def main():", f"    {last}", "end_with(main)"]
    program.write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent)}
    ended = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (status, told)


def test_an_interrupt_reaches_the_command(capsys):
    with pytest.raises(SystemExit) as end:
        end_with(lambda: signal.raise_signal(signal.SIGINT) or 0)
    assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_every_tool_ends_so():
    others = [
        path.relative_to(TOOLS).as_posix()
        for path in sorted(TOOLS.rglob("*.py"))
        if re.search(r'^if __name__ == "__main__":\n(?!    end_with\()', path.read_text(), re.M)
    ]
    assert others == []
