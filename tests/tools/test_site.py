"""python -m tools.site builds pages anywhere, replaces only what it built, and none of them is committed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from flashinfer_trace import find_root
from flashinfer_trace.dataset.store import definition_paths
from tools.site import __main__ as site

ROOT = find_root()
REFERENCE = re.compile(r"\b(?:href|src)=(?:\"([^\"]*)\"|([^\s>]+))")
ANCHOR = re.compile(r"\bid=(?:\"([^\"]*)\"|([^\s>]+))")
#: The most bytes of a page, with its own data but without the search.
HEAVIEST = 300_000


@pytest.fixture(scope="module")
def texts(site_folder: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in site_folder.rglob("*.html")}


def test_every_internal_link_leads_somewhere(texts: dict[Path, str]) -> None:
    anchors = {path: {one or other for one, other in ANCHOR.findall(text)} for path, text in texts.items()}
    broken, seen = [], 0
    for path, text in texts.items():
        for target in {one or other for one, other in REFERENCE.findall(text)}:
            if re.match(r"[a-z]+:|//", target):
                continue
            seen += 1
            place, _, anchor = unquote(target).partition("#")
            page = Path(os.path.normpath(path.parent / place)) if place else path
            # The part after # in a link to the catalog is a search.
            named = not anchor or page.name == "catalog.html" or anchor in anchors.get(page, ())
            if not page.exists() or not named:
                broken.append((path.name, target))
    assert seen > 10_000 and broken == []


def test_nothing_comes_from_the_network(texts: dict[Path, str]) -> None:
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
    assert [(path.name, found) for path, text in texts.items() for found in loaded.findall(text)] == []


def test_pages_are_light(site_folder: Path, texts: dict[Path, str]) -> None:
    sizes = {path.relative_to(site_folder).as_posix(): len(text.encode()) for path, text in texts.items()}
    sizes["catalog.html"] += (site_folder / "catalog_data.js").stat().st_size
    assert len(sizes) > 1000 and {name: size for name, size in sizes.items() if size > HEAVIEST} == {}


def test_every_definition_has_a_page_and_its_file(site_folder: Path) -> None:
    for path in definition_paths(ROOT):
        assert (site_folder / "definitions" / f"{path.stem}.html").is_file()
        assert (site_folder / "definitions" / path.name).read_bytes() == path.read_bytes()


def contents() -> dict[str, str]:
    """Entry of the table of contents, with the one above it -> page."""
    nav = yaml.safe_load((ROOT / "tools/site/assets/mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    found: dict[str, str] = {}
    for entry in nav:
        ((title, below),) = entry.items()
        for one in [below] if isinstance(below, str) else below:
            inner = one if isinstance(one, dict) else {title: one}
            found |= {title if name == title else f"{title} > {name}": page for name, page in inner.items()}
    return found


QUESTIONS = json.loads((ROOT / "tests/support/questions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one["question"])
def test_the_table_of_contents_leads_to_the_answer(question: dict[str, str], texts: dict[Path, str], site_folder: Path):
    page = contents()[question["page"]].removesuffix(".md") + ".html"
    text = re.sub(r"</?(?:span|code|a|em|strong)\b[^>]*>", "", texts[site_folder / page])
    text = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", text, flags=re.S)
    plain = " ".join(unescape(text).split())
    assert question["answer"] in plain


def test_no_page_is_committed() -> None:
    pages = [f"docs/{name}.md" for name in (*site.DOCUMENTS, "flashinfer_templates", "performance")]
    listed = subprocess.run(["git", "ls-files", *pages], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    assert len(pages) > 10 and listed.stdout == ""


def test_what_people_write_holds_no_total_of_the_dataset() -> None:
    total = len(definition_paths(ROOT))
    texts = {path: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    numbers = (str(total), f"{total:,}")
    assert len(texts) > 10
    assert [path.name for path, text in texts.items() for one in numbers if re.search(rf"\b{one}\b", text)] == []


def test_only_a_folder_that_it_wrote_is_replaced(
    site_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit):
        site.main(["--out", str(tmp_path)])
    assert "this command did not write it" in capsys.readouterr().err and (tmp_path / "mine").exists()
    monkeypatch.setattr(site, "gather", lambda root: root)
    monkeypatch.setattr(site, "pages_of", lambda facts: {})
    monkeypatch.setattr(site, "render_html", lambda source, out: shutil.copytree(source, out))
    copy = tmp_path / "copy"
    for name in ("old.md", "new.md"):
        monkeypatch.setattr(site, "documents", lambda root, name=name: {root / name: "text\n"})
        assert site.main(["--out", str(copy)]) == 0
    assert (site_folder / site.MARK).is_file()
    assert (copy / "new.md").read_text() == "text\n" and not (copy / "old.md").exists()
