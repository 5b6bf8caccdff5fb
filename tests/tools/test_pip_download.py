"""What fetch_sources makes of pip: the real `pip download`, and the messages that it explains."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools import fetch_sources
from tools.fetch_sources import Pin
from tools.source_archives import FetchError, unpack_wheel

#: A wheel that pip takes.
WHEEL = {
    "sglang/__init__.py": "",
    "sglang-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "sglang-1.0.dist-info/RECORD": "",
    "sglang-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\n",
}


class TestPip:
    """The real `pip download`, from a directory of wheels or from an address where nothing listens."""

    @pytest.fixture(autouse=True)
    def offline(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
        (tmp_path / "links").mkdir()
        with zipfile.ZipFile(tmp_path / "links/sglang-1.0-py3-none-any.whl", "w") as archive:
            for name, text in WHEEL.items():
                archive.writestr(name, text)

    def test_one_wheel_arrives(self, tmp_path):
        (tmp_path / "s").mkdir()
        fetch_sources.download(Pin("sglang", "sglang", "1.0"), tmp_path / "s/sglang-1.0.whl")
        assert [path.name for path in (tmp_path / "s").iterdir()] == ["sglang-1.0.whl"]
        unpack_wheel(tmp_path / "s/sglang-1.0.whl", "sglang", tmp_path / "out")

    def test_unknown_version(self, tmp_path):
        message = r"has no wheel of sglang 9\.9 for .*the newest versions that it offers: 1\.0"
        with pytest.raises(FetchError, match=message):
            fetch_sources.download(Pin("sglang", "sglang", "9.9"), tmp_path / "sglang-9.9.whl")
        assert not list(tmp_path.glob(".partial*"))

    @pytest.mark.parametrize("retries", ["0", "1"])
    def test_no_network(self, tmp_path, monkeypatch, retries):
        monkeypatch.setenv("PIP_RETRIES", retries)
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        with pytest.raises(FetchError, match=r"sglang-1\.0\.whl: no network: .*--from DIR"):
            fetch_sources.download(Pin("sglang", "sglang", "1.0"), tmp_path / "sglang-1.0.whl")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ERROR: [Errno 28] No space left on device", "no space left while fetching"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("a\nb\nERROR: odd\n", "pip could not fetch sglang 1.0: a / b / ERROR: odd"),
        ("ProtocolError: IncompleteRead(5 bytes read, 9 more expected)", "no network"),
        ("", "pip printed nothing"),
    ],
)
def test_what_pip_says_is_explained(output, expected):
    assert expected in fetch_sources.explain(Pin("sglang", "sglang", "1.0"), Path("x.whl"), output)
