"""python -m tools.site builds pages anywhere, replaces only what it built, and none of them is committed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from built_pages import pages

from flashinfer_trace import find_root
from flashinfer_trace.dataset.store import definition_paths
from tools.site import __main__ as site

ROOT = find_root()
LINK = re.compile(r"\]\(([^)#:]+\.(?:md|svg))(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "site"
    site.write_pages(ROOT, {ROOT / name: text for name, text in pages().items()}, out)
    return out


def test_every_link_between_pages_leads_to_one(built: Path) -> None:
    """Pages are built next to copies of what people write."""
    links = [(path, link) for path in built.rglob("*.md") for link in LINK.findall(path.read_text(encoding="utf-8"))]
    assert len(links) > 100
    assert [(path.name, link) for path, link in links if not (path.parent / link).exists()] == []


def test_no_page_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", *pages()], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    assert len(pages()) > 50 and listed.stdout == ""


def test_what_people_write_holds_no_total_of_the_dataset() -> None:
    total = len(definition_paths(ROOT))
    texts = {path: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    numbers = (str(total), f"{total:,}")
    assert len(texts) > 10
    assert [path.name for path, text in texts.items() for one in numbers if re.search(rf"\b{one}\b", text)] == []


def test_only_a_folder_that_it_wrote_is_replaced(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "documents", lambda root: {root / "docs" / "new.md": "text\n"})
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit):
        site.main(["--out", str(tmp_path)])
    assert "this command did not write it" in capsys.readouterr().err and (tmp_path / "mine").exists()
    old = built / "docs" / "verification.md"
    copy = tmp_path / "copy"
    assert old.exists() and site.main(["--out", str(copy)]) == 0
    (copy / "docs" / "old.md").write_text("")
    assert site.main(["--out", str(copy)]) == 0
    assert (copy / "docs" / "new.md").read_text() == "text\n" and not (copy / "docs" / "old.md").exists()
