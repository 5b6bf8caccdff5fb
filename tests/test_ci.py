"""How .ci/run uses the README's commands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("ends_with", "told"), [(0, ""), (1, ""), (124, "error: pytest took over 15 minutes\n")])
def test_ci_says_that_tests_took_too_long(tmp_path: Path, ends_with: int, told: str) -> None:
    """`.ci/run` replaces the README's `pytest` by one with a limit, whose exit status 124 means that it was reached."""
    limited = next(line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("pytest() "))
    stub = tmp_path / "timeout"
    stub.write_text(f'#!/bin/sh\n[ "$*" = "900 pytest -n 2" ] || exit 9\nexit {ends_with}\n')
    stub.chmod(0o755)
    command = f'set -euo pipefail\n{limited}\nPATH="{tmp_path}:$PATH"\neval "true && pytest -n 2"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (ends_with, told)
