"""The files that are extracted from a wheel, and those that are refused."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import pytest

from tools.source_archives import LARGEST_FILE, FetchError, unpack


def wheel(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/__init__.py", "")
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize(
    "name", ["../evil.py", "/evil.py", "C:/evil.py", "sglang/../../evil.py", "sglang\\..\\evil.py"]
)
def test_a_path_that_leads_out_is_refused(tmp_path, name):
    with pytest.raises(FetchError, match="leads outside the wheel"):
        unpack(wheel(tmp_path / "w.whl", {name: "import os\n"}), ["sglang"], tmp_path / "out/inner")
    assert not list(tmp_path.rglob("evil.py"))


def test_links_giants_duplicates_damaged_and_foreign_wheels_are_refused(tmp_path):
    link = zipfile.ZipInfo("sglang/link.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for index, (member, message) in enumerate(((link, "is a link"), ("sglang/big.py", "claims 33554433 bytes"))):
        path = tmp_path / f"{index}.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, "/etc/passwd" if member is link else " " * (LARGEST_FILE + 1))
        with pytest.raises(FetchError, match=message):
            unpack(path, ["sglang"], tmp_path / f"out{index}")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "twice.whl", "w") as archive:
        archive.writestr("sglang/a.py", "one")
        archive.writestr("sglang/a.py", "two")
    with pytest.raises(FetchError, match=r"contains .* twice"):
        unpack(tmp_path / "twice.whl", ["sglang"], tmp_path / "twice")
    path = wheel(tmp_path / "w.whl", {})
    with pytest.raises(FetchError, match=r"no sgl_kernel/\*\.py"):
        unpack(path, ["sgl_kernel"], tmp_path / "foreign")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(FetchError, match=r"half-fetched or damaged .*run again"):
        unpack(path, ["sglang"], tmp_path / "damaged")
