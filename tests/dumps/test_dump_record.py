"""The record of FlashInfer's templates comes out of an installed FlashInfer again."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_trace.dataset.store import find_root
from tools.templates.__main__ import main
from tools.templates.installed import InstalledError, imported
from tools.templates.record import RECORD, RecordError, read_record

#: Names the directory that holds the package flashinfer of release 0.7.2.
SITE = "FLASHINFER_TRACE_TEST_FLASHINFER"
PROGRAM = """
import sys
from pathlib import Path
from tools.templates.installed import recorded
from tools.templates.record import packed

Path(sys.argv[2]).write_bytes(packed(recorded(Path(sys.argv[1]))))
"""


def test_the_record_comes_out_again(tmp_path: Path) -> None:
    site = os.environ.get(SITE)
    if not site:
        pytest.skip(f"{SITE} does not name a directory with FlashInfer 0.7.2")
    out = tmp_path / "record.xz"
    environment = {**os.environ, "PYTHONPATH": str(find_root()), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM, site, str(out)], env=environment, check=True)
    again, committed = (json.loads(lzma.decompress(path.read_bytes())) for path in (out, find_root() / RECORD))
    assert again == committed


def test_a_directory_without_flashinfer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InstalledError, match="there is no flashinfer with flashinfer/trace"):
        imported(tmp_path)


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "record.xz"
    path.write_bytes(b"no record")
    with pytest.raises(RecordError, match=r"record\.xz: no record"):
        read_record(path)


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--flashinfer", str(tmp_path)]) == 2
    assert "there is no flashinfer with flashinfer/trace" in capsys.readouterr().err
