"""Builds the site: the pages about the dataset, from what is committed. None of them is committed.

python -m tools.site [--out DIR]        # the default, build/site, is ignored by git; pip install -e ".[site]" first

MkDocs with the theme Material turns Markdown into pages that need no server and no network. Open `index.html`. The
pages are derived from the dataset, the family records, the evidence, the recorded runs, times and verdicts, the
findings, the results of `tools.mutate` and `tools.fuzz`, and the documents that people write. A folder that an earlier
run wrote is replaced. Exit status: 0 done, 2 a file cannot be read or used, and nothing was written.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from benchmarks.page import read, speed_page
from flashinfer_trace import find_root
from flashinfer_trace.format.files import read_text, write_text
from tools.fuzz import summary as fuzz
from tools.mutate.__main__ import harness_power
from tools.mutate.results import read_summaries
from tools.mutate.summary import RESULTS
from tools.shared.command import end_with, names_its_cause
from tools.site.cheats import cheats
from tools.site.compatibility_page import compatibility
from tools.site.coverage_page import coverage
from tools.site.definition_pages import catalog_data, definition_page, family_pages
from tools.site.evidence_pages import accuracy, verification
from tools.site.facts import Facts, committed, gather
from tools.site.judged_kinds import judged_kinds
from tools.site.model_pages import kernel_pages, model_pages, run_pages
from tools.site.reference_pages import (
    cli_page,
    findings_page,
    format_page,
    index_page,
    numbers,
    tags_page,
    verdict_page,
)
from tools.site.safeguards import safeguards
from tools.site.times_page import performance_documents
from tools.templates.page import templates_document

ASSETS = Path(__file__).with_name("assets")
#: A link of a document to another file, without its anchor.
LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)#:\s]+)(?:#[^)]*)?\)")

#: Pages of figures, which the search leaves out; and the lines that say so.
REPORTS = ("coverage.md", "performance.md", "verification.md")
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"

#: The mark of a folder that this command wrote and can replace.
MARK = ".built-by-tools-site"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.site", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/site"), metavar="DIR", help="where to [%(default)s]")
    options = parser.parse_args(arguments)
    root, out = find_root(), options.out
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out}: exists, and this command did not write it; name another folder, or remove it")
    try:
        facts = gather(root)
        built = {**documents(facts), **pages_of(facts)}
    except Exception as error:
        if not names_its_cause(error):
            raise
        print(error, file=sys.stderr)
        return 2
    build(root, built, out)
    print(f"{out}: {sum(1 for _ in out.rglob('*.html'))} pages; open {out / 'index.html'}")
    return 0


def build(root: Path, pages: Mapping[Path, str], out: Path) -> None:
    """Builds all pages under `out`: those given, by their paths under the root, and the documents of people."""
    with tempfile.TemporaryDirectory() as directory:
        source, site = Path(directory) / "source", Path(directory) / "site"
        write_sources(root, pages, source)
        render_html(source, site)
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(site, out)
    (out / MARK).write_text("")
    (out / "404.html").unlink(missing_ok=True)  # its addresses only work on a server


def render_html(source: Path, site: Path) -> None:
    """Runs MkDocs, whose warnings, such as one about a link that leads nowhere, are errors."""
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    config = load_config(str(ASSETS / "mkdocs.yml"), docs_dir=str(source), site_dir=str(site), strict=True)
    mkdocs_build(config)


def write_sources(root: Path, pages: Mapping[Path, str], source: Path) -> None:
    """Writes the Markdown of all pages, the documents of people, and what they link to."""
    written = {path: read_text(path) for path in (*root.glob("*.md"), *root.glob("docs/*.md"))}
    texts = {path.relative_to(root): text for path, text in {**written, **pages}.items()}
    texts = {path: text for path, text in texts.items() if path.name not in ("README.md", "CHANGELOG.md")}
    for path, text in texts.items():
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = LINK.sub(functools.partial(_linked, root, source, texts.keys(), path), text)
            text = f"{NOT_SEARCHED}{text}" if path.name in REPORTS else text
        write_text(target, text)
    for one in (*ASSETS.glob("*.js"), *ASSETS.glob("*.css")):
        shutil.copyfile(one, source / one.name)


def _linked(root: Path, source: Path, pages: Collection[Path], page: Path, found: re.Match[str]) -> str:
    """A link of a document: to the home page for the README's, to a copy of a file, or only its text for a folder."""
    shown, target = found[1], found[2]
    path = Path(os.path.normpath(page.parent / target))
    if path in pages:
        return found[0]
    if path == Path("README.md"):
        return f"[{shown}]({'../' * len(page.parent.parts)}index.md)"
    if not (root / path).is_file():
        return shown
    (source / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(root / path, source / path)
    return found[0]


def pages_of(facts: Facts) -> dict[Path, str]:
    """The pages that the documents of `documents` do not have, by the path that each would have under the root."""
    root = facts.root
    home = read_text(ASSETS / "index.md")
    for name, value in numbers(facts).items():
        home = home.replace(f"{{{name}}}", value)
    pages = {
        root / "index.md": home,
        root / "catalog.md": read_text(ASSETS / "catalog.md"),
        root / "catalog_data.js": catalog_data(facts),
        root / "findings.md": findings_page(facts),
        root / "reference" / "tags.md": tags_page(facts),
        root / "reference" / "commands.md": cli_page(),
        root / "reference" / "verdict.md": verdict_page(facts),
        root / "docs" / "format.md": format_page(facts),
    }
    for one in facts.dataset:
        pages[root / "definitions" / f"{one.name}.md"] = definition_page(facts, one)
        assert one.path is not None  # they were read from files
        pages[root / "definitions" / f"{one.name}.json"] = read_text(one.path)
    for directory, made in {
        "families": family_pages(facts),
        "models": model_pages(facts),
        "runs": run_pages(facts),
        "kernels": kernel_pages(facts),
    }.items():
        found = dict(made)
        pages |= {root / directory / f"{name}.md": text for name, text in found.items()}
        pages[root / directory / "index.md"] = index_page(facts, directory, found)
    return pages


#: Pages below docs/ -> what makes them.
DOCUMENTS: Mapping[str, Callable[[Facts], str]] = {
    "accuracy": accuracy,
    "cheats": lambda facts: cheats(facts.root),
    "compatibility": compatibility,
    "coverage": coverage,
    "harness_power": lambda facts: harness_power(),
    "hostile_files": lambda facts: fuzz.document(committed(fuzz.RESULTS)),
    "judged_kinds": lambda facts: judged_kinds(facts.dataset),
    "reference_speed": lambda facts: speed_page(read(facts.root), facts.dataset),
    "safeguards": lambda facts: safeguards(committed(fuzz.RESULTS), read_summaries(RESULTS)),
    "verification": verification,
}


def documents(facts: Facts) -> dict[Path, str]:
    """The pages below docs/ and their texts, by the paths that they would have under the root."""
    pages = {facts.root / "docs" / f"{name}.md": make(facts) for name, make in DOCUMENTS.items()}
    return {**pages, **performance_documents(facts.root, facts.dataset), **templates_document(facts.root)}


if __name__ == "__main__":
    end_with(main)
