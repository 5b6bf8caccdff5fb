"""fetch_sources, with small wheels and a downloader that copies them; nothing is fetched from the network."""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from pathlib import Path

import pytest

from tools import fetch_sources
from tools.fetch_sources import Pin, fetch, main, read_pins, take
from tools.shared.source_packages import package_hash
from tools.source_archives import LARGEST_FILE, FetchError, file_hash, required_versions, unpack_wheel

FILES = {
    "sglang": {
        "sglang/__init__.py": "",
        "sglang/version.py": '__version__ = "1.0"\n',
        "sglang/srt/models/llama.py": "class Llama: ...\n",
        "sglang/srt/layers/norm.py": "def norm(): ...\n",
        "sglang/srt/kernel.so": "binary",
    },
    "sgl-kernel": {"sgl_kernel/__init__.py": "", "sgl_kernel/ops.abi3.so": "binary", "deep_gemm/__init__.py": ""},
    "flashinfer-python": {"flashinfer/__init__.py": "", "flashinfer/data/a.cu": "", "build_utils.py": ""},
}
METADATA = """Metadata-Version: 2.4
Name: sglang
Requires-Dist: torch==2.9.1
Requires-Dist: flashinfer_python[cu13]==2.0
Requires-Dist: sglang-kernel==3.0; platform_machine == "x86_64"
Requires-Dist: sgl-kernel==9.9; extra == "old"
"""


def make_wheel(path: Path, files: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{path.name.split('-')[0]}-1.0.dist-info/METADATA", METADATA)
    return path


class Index:
    """Stands for the package index: wheels by distribution, and a record of what was downloaded."""

    def __init__(self, directory: Path) -> None:
        self.wheels = {name: make_wheel(directory / f"{name}.whl", files) for name, files in FILES.items()}
        self.wheels["sglang-kernel"] = self.wheels["sgl-kernel"]
        self.downloads: list[str] = []

    def download(self, pin: Pin, target: Path, console: object = None) -> None:
        self.downloads.append(str(pin))
        shutil.copyfile(self.wheels[pin.distribution], target)


@pytest.fixture
def index(tmp_path, monkeypatch):
    index = Index(tmp_path / "index")
    monkeypatch.setattr(fetch_sources, "download", index.download)
    return index


@pytest.fixture
def pins(tmp_path, index):
    lines = ['default = "1.0"']
    for name, version in (("sglang", "1.0"), ("sgl-kernel", "3.0"), ("flashinfer-python", "2.0")):
        lines += [f'[releases."1.0".{name}]', f'distribution = "{name}"', f'version = "{version}"']
        lines += [f'sha256 = "{file_hash(index.wheels[name])}"', f"size = {index.wheels[name].stat().st_size}"]
    path = tmp_path / "sources.toml"
    path.write_text("\n".join(lines))
    return path


def tree(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


ALL = ["sglang", "sgl-kernel", "flashinfer-python"]
UNPACKED = [
    "deep_gemm/__init__.py",
    "flashinfer/__init__.py",
    "manifest.json",
    "sgl_kernel/__init__.py",
    "sglang/__init__.py",
    "sglang/srt/layers/norm.py",
    "sglang/srt/models/llama.py",
    "sglang/version.py",
]


@pytest.mark.parametrize("damage", ["changed", "lost"])
def test_a_package_that_comes_with_another_library_is_repaired(damage, tmp_path, index, pins):
    dest = tmp_path / ".sources"
    fetch(dest, pins=pins)
    if damage == "lost":
        shutil.rmtree(dest / "deep_gemm")
    else:
        (dest / "deep_gemm" / "__init__.py").write_text("changed = True\n")
    assert fetch(dest, pins=pins) == ["sgl-kernel"]
    assert (dest / "deep_gemm" / "__init__.py").read_text() == ""
    assert fetch(dest, pins=pins) == []


def test_only_python_files_of_the_packages_are_kept(tmp_path, index, pins):
    dest = tmp_path / "new" / ".sources"
    assert fetch(dest, pins=pins) == ALL
    assert tree(dest) == UNPACKED
    assert sorted(path.name for path in dest.iterdir()) == [
        "deep_gemm",
        "flashinfer",
        "manifest.json",
        "sgl_kernel",
        "sglang",
    ]
    manifest = json.loads((dest / "manifest.json").read_text())["sources"]
    assert list(manifest) == ALL
    assert manifest["sgl-kernel"]["version"] == "3.0"
    assert manifest["sgl-kernel"]["wheel_sha256"] == file_hash(index.wheels["sgl-kernel"])
    for name, entry in manifest.items():
        assert entry["sha256"] == package_hash(dest / name.removesuffix("-python").replace("-", "_")), name


def test_what_is_there_is_not_fetched_again(tmp_path, index, pins):
    fetch(tmp_path / "s", pins=pins)
    index.downloads.clear()
    assert fetch(tmp_path / "s", pins=pins) == []
    assert index.downloads == []


@pytest.mark.parametrize("damage", ["edit", "remove", "manifest", "entry", "version"])
def test_what_differs_from_the_manifest_is_fetched_again(tmp_path, index, pins, damage):
    dest = tmp_path / "s"
    fetch(dest, pins=pins)
    index.downloads.clear()
    manifest = json.loads((dest / "manifest.json").read_text())
    if damage == "edit":
        (dest / "sglang/srt/layers/norm.py").write_text("def norm(): pass\n")
    elif damage == "remove":
        shutil.rmtree(dest / "sglang")
    elif damage == "manifest":
        (dest / "manifest.json").write_text('{"sources": ')
    else:
        if damage == "entry":
            manifest["sources"]["sglang"] = 5
        else:
            manifest["sources"]["sglang"]["version"] = "0.9"
        (dest / "manifest.json").write_text(json.dumps(manifest))
    assert fetch(dest, pins=pins) == (ALL if damage == "manifest" else ["sglang"])
    assert tree(dest) == UNPACKED


def test_the_size_of_a_directory_is_told_while_pip_removes_another_in_it(tmp_path, monkeypatch):
    gone = tmp_path / "pip-unpack"
    gone.mkdir()
    (tmp_path / "wheel").write_bytes(b"12345")
    scan = os.scandir

    def removing(path):
        if Path(path) == gone:
            monkeypatch.undo()
            gone.rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert fetch_sources._size(tmp_path) == 5 and not gone.exists()


def test_an_interrupted_fetch_goes_on(tmp_path, index, pins, monkeypatch):
    dest = tmp_path / "s"

    def interrupted(pin, target, console=None):
        index.download(pin, target)
        if pin.name == "sgl-kernel":
            target.write_bytes(target.read_bytes()[:100])
            raise KeyboardInterrupt

    monkeypatch.setattr(fetch_sources, "download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(dest, pins=pins)
    assert not (dest / "sgl_kernel").exists(), "nothing half-written"
    monkeypatch.setattr(fetch_sources, "download", index.download)
    index.downloads.clear()
    assert fetch(dest, pins=pins) == ["sgl-kernel", "flashinfer-python"]
    assert index.downloads == ["sgl-kernel 3.0", "flashinfer-python 2.0"]
    assert tree(dest) == UNPACKED


def test_a_whole_wheel_left_by_an_interruption_is_used(tmp_path, index, pins):
    dest = tmp_path / "s"
    (dest / ".wheels").mkdir(parents=True)
    shutil.copyfile(index.wheels["sgl-kernel"], dest / ".wheels/sgl-kernel-3.0.whl")
    (dest / ".partial-sgl_kernel").mkdir()
    (dest / ".partial-sgl_kernel/junk.py").touch()
    fetch(dest, pins=pins)
    assert index.downloads == ["sglang 1.0", "flashinfer-python 2.0"]
    assert tree(dest) == UNPACKED


def test_a_wrong_hash_is_refused_and_the_old_sources_stay(tmp_path, index, pins):
    dest = tmp_path / "s"
    fetch(dest, pins=pins)
    pins.write_text(pins.read_text().replace(file_hash(index.wheels["sglang"]), "0" * 64))
    with pytest.raises(
        FetchError, match=r"sglang-1\.0\.whl: the wheel of sglang 1\.0 has sha256 .* says 000.*Run again"
    ):
        fetch(dest, pins=pins)
    assert tree(dest) == UNPACKED


def test_an_unknown_release_brings_the_libraries_it_requires(tmp_path, index, pins):
    dest = tmp_path / "s"
    assert fetch(dest, "7.0", pins=pins) == ["sglang", "flashinfer-python", "sgl-kernel"]
    assert index.downloads == ["sglang 7.0", "flashinfer-python 2.0", "sglang-kernel 3.0"]
    manifest = json.loads((dest / "manifest.json").read_text())["sources"]
    assert manifest["sglang"]["wheel_sha256"] == file_hash(index.wheels["sglang"])
    assert fetch(dest, "7.0", pins=pins) == []
    assert fetch(dest, pins=pins) == ["sglang", "sgl-kernel"], "back to the default release"


def test_one_library_without_the_others(tmp_path, index, pins):
    dest = tmp_path / "s"
    assert fetch(dest, pins=pins, only=["flashinfer-python"]) == ["flashinfer-python"]
    assert index.downloads == ["flashinfer-python 2.0"]
    assert tree(dest) == ["flashinfer/__init__.py", "manifest.json"]
    assert fetch(dest, pins=pins) == ["sglang", "sgl-kernel"]
    assert fetch(dest, pins=pins, only=["flashinfer-python"]) == [], "the others stay"
    assert tree(dest) == UNPACKED
    assert list(json.loads((dest / "manifest.json").read_text())["sources"]) == ALL
    with pytest.raises(FetchError, match=r"release 7\.0 is not listed.*omit --only"):
        fetch(dest, "7.0", pins=pins, only=["flashinfer-python"])


def test_an_unknown_release_that_pins_no_libraries(tmp_path):
    wheel = tmp_path / "sglang.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang-1.0.dist-info/METADATA", "Requires-Dist: sgl-kernel>=0.3\n")
    with pytest.raises(FetchError, match=r"no version of sgl-kernel and flashinfer-python; add this release"):
        required_versions(wheel)


def test_a_damaged_wheel_of_an_unknown_release(tmp_path, index, pins):
    whole = index.wheels["sglang"].read_bytes()
    index.wheels["sglang"].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FetchError, match=r"sglang-7\.0\.whl: half-fetched or damaged .*run again"):
        fetch(tmp_path / "s", "7.0", pins=pins)
    assert not (tmp_path / "s/sglang").exists()
    index.wheels["sglang"].write_bytes(whole)
    assert fetch(tmp_path / "s", "7.0", pins=pins)


@pytest.mark.parametrize(
    "name", ["../evil.py", "sglang/../../evil.py", "/evil.py", "sglang\\..\\evil.py", "C:/evil.py"]
)
def test_a_path_that_leads_out_is_refused(tmp_path, name):
    wheel = make_wheel(tmp_path / "w.whl", {"sglang/a.py": "", name: "evil"})
    with pytest.raises(FetchError, match="leads outside the wheel"):
        unpack_wheel(wheel, "sglang", tmp_path / "deep/target")
    assert not list(tmp_path.rglob("evil.py"))


def test_links_giants_duplicates_and_foreign_wheels_are_refused(tmp_path):
    link = zipfile.ZipInfo("sglang/link.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "link.whl", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(FetchError, match="is a link"):
        unpack_wheel(tmp_path / "link.whl", "sglang", tmp_path / "1")
    with zipfile.ZipFile(tmp_path / "giant.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("sglang/giant.py", "#" * (LARGEST_FILE + 1))
    with pytest.raises(FetchError, match="claims 33554433 bytes"):
        unpack_wheel(tmp_path / "giant.whl", "sglang", tmp_path / "2")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "twice.whl", "w") as archive:
        archive.writestr("sglang/a.py", "1")
        archive.writestr("sglang/a.py", "2")
    with pytest.raises(FetchError, match=r"contains .* twice"):
        unpack_wheel(tmp_path / "twice.whl", "sglang", tmp_path / "3")
    with pytest.raises(FetchError, match=r"no sgl_kernel/\*\.py"):
        unpack_wheel(make_wheel(tmp_path / "other.whl", FILES["sglang"]), "sgl_kernel", tmp_path / "4")


def test_no_space(tmp_path, index, pins, monkeypatch):
    monkeypatch.setattr(fetch_sources.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(FetchError, match=r"sglang-1\.0\.whl: no space .* MB are needed .* choose another --dest"):
        fetch(tmp_path / "s", pins=pins)
    assert index.downloads == []


def test_no_space_while_unpacking(tmp_path, index, pins, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path / "s/.partial-sglang/a.py"))

    monkeypatch.setattr("tools.source_archives.shutil.copyfileobj", full)
    with pytest.raises(FetchError, match=r"a\.py: no space left; free some space"):
        fetch(tmp_path / "s", pins=pins)
    assert not list((tmp_path / "s").glob("sglang")) and not list((tmp_path / "s").glob(".partial*"))


def test_a_destination_that_cannot_be_written(tmp_path, index, pins):
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"file.*must be a writable directory, choose another --dest"):
        fetch(tmp_path / "file", pins=pins)
    with pytest.raises(FetchError, match="must be a writable directory"):
        fetch(tmp_path / "file/below", pins=pins)


@pytest.mark.parametrize("text", ["", "default = 1", "[", 'default = "2"\n[releases]'])
def test_unusable_pins(tmp_path, text):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(FetchError, match=r"p\.toml: .*"):
        read_pins(tmp_path / "p.toml")
    with pytest.raises(FetchError, match="restore it from the repository"):
        read_pins(tmp_path / "none.toml")


def test_the_pins_of_the_repository():
    default, releases = read_pins(fetch_sources.PINS)
    assert [str(pin) for pin in releases[default]] == [
        "sglang 0.5.11",
        "sglang-kernel 0.4.2",
        "flashinfer-python 0.6.8.post1",
    ]
    assert {"0.5.8", "0.5.15"} <= set(releases)
    for release in releases.values():
        assert [pin.name for pin in release] == ALL
        assert all(pin.sha256 and len(pin.sha256) == 64 for pin in release)


CHECKOUTS = {
    "checkout": ("sglang/python/", "sglang/sgl-kernel/python/", "flashinfer/"),
    "inside sglang": ("python/", "sgl-kernel/python/", ""),
    "wheels": ("", "", ""),
}


@pytest.mark.parametrize("layout", CHECKOUTS)
def test_checkouts_are_copied(tmp_path, layout):
    origin = tmp_path / "origin"
    for prefix, files in zip(CHECKOUTS[layout], FILES.values(), strict=True):
        for name, text in files.items():
            path = origin / prefix / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (origin / CHECKOUTS[layout][0] / "sglang/link.py").symlink_to("/etc/passwd")
    dest = tmp_path / "s"
    assert take(dest, origin) == ALL
    checked_out = [name for name in UNPACKED if not name.startswith("deep_gemm")]
    assert tree(dest) == checked_out
    assert json.loads((dest / "manifest.json").read_text())["sources"]["sglang"]["version"] == "1.0"
    assert take(dest, origin) == ALL and tree(dest) == checked_out, "a second time over the first"


def test_checkouts_that_are_not_there(tmp_path, capsys):
    assert main(["--dest", str(tmp_path / "s"), "--from", str(tmp_path / "none")]) == 1
    assert "none: no such directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["--dest", str(tmp_path / "s"), "--from", str(tmp_path / "empty")]) == 1
    assert "no sglang here (tried" in capsys.readouterr().err
    assert main(["--dest", str(tmp_path), "--from", str(tmp_path)]) == 1
    assert "the same directory" in capsys.readouterr().err


def test_command_line(tmp_path, index, pins, monkeypatch, capsys):
    monkeypatch.setattr(
        fetch_sources, "fetch", lambda dest, version, console, only: fetch(dest, version, pins, console, only)
    )
    assert main(["--dest", str(tmp_path / "s")]) == 0
    assert capsys.readouterr().out.count("fetched") == 3
    assert main(["--dest", str(tmp_path / "s")]) == 0
    assert capsys.readouterr().out.count("already present") == 3
    monkeypatch.setattr(fetch_sources, "fetch", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main([]) == 130
    for wrong in (["--sglang", "1.0", "--from", "x"], ["--only", "sglang", "--from", "x"], ["--only", "torch"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
