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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.page import reference_speed_document
from flashinfer_trace import DatasetError, Definition, definitions, find_root
from flashinfer_trace.dataset.coverage import LISTED, load_needs, matrix, model_coverages
from flashinfer_trace.dataset.evidence import VERIFIED, proofs
from flashinfer_trace.dataset.flashinfer_bench import load_compatibility
from flashinfer_trace.format.files import read_text, write_text
from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load_object
from tools.accuracy import accuracy_documents
from tools.cheats import cheats_document
from tools.compatibility.page import compatibility
from tools.extract.model_needs import curated
from tools.fuzz import summary as fuzz
from tools.judged_kinds import judged_kinds_document
from tools.mutate.__main__ import harness_power
from tools.mutate.results import read_summaries
from tools.mutate.summary import RESULTS
from tools.performance import performance_documents
from tools.runtime_tracing.consistency import consistent
from tools.runtime_tracing.time_coverage import time_coverage
from tools.safeguards import safeguards_document
from tools.shared.command import end_with, names_its_cause
from tools.shared.markdown import table
from tools.site.definition_pages import catalog_data, definition_page, family_pages
from tools.site.facts import Facts, gather
from tools.site.kernel_coverage import kernel_coverage, without_definition
from tools.site.model_pages import kernel_pages, model_pages, run_pages
from tools.site.only_named import only_named
from tools.site.reference_pages import (
    cli_page,
    findings_page,
    format_page,
    index_page,
    numbers,
    tags_page,
    verdict_page,
)
from tools.templates.page import templates_document
from tools.trace.document import trace
from tools.trace.records import ALL, default_first
from tools.verification import verification_documents

MODELS = """## Models

The Definitions that each model needs at the sizes that families cover by default, by op_type: verified / existing /
needed. `models/needs/` lists them. `flashinfer-trace coverage` prints the same table. A gap is an op whose recorded
calls no Definition describes; the page of the model names it with its reason.
"""

ASSETS = Path(__file__).with_name("assets")
#: A link of a document to another file, without its anchor.
LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)#:\s]+)(?:#[^)]*)?\)")

#: Pages, and folders of pages, of figures, which the search leaves out; and the lines that say so.
REPORTS = ("accuracy", "verification", "coverage.md", "performance.md", "verification.md")
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"

#: What marks a folder as one that this command wrote and can replace.
MARK = ".built-by-tools-site"

CURATED = """## Curated Definitions

Definitions that no model in `models/` needs. People write them; extraction does not create them.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/site"), metavar="DIR", help="where to [%(default)s]")
    options = parser.parse_args(arguments)
    root, out = find_root(), options.out
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out}: exists, and this command did not write it; name another folder, or remove it")
    try:
        facts = gather(root)
        # The pages of kernels replace those of the traces.
        made = {path: text for path, text in documents(root).items() if path.parent != root / "traces" / "kernels"}
        built = {**made, **pages_of(facts)}
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
            text = f"{NOT_SEARCHED}{text}" if path.name in REPORTS or path.parent.name in REPORTS else text
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


def documents(root: Path) -> dict[Path, str]:
    """Every page and its text, by the path that it would have under the root."""
    dataset = list(definitions(root=root))
    fuzzed, without = _trace(fuzz.RESULTS), _trace(root / LISTED)
    proven = {one.name: [entry.path for entry in proofs(root, one)] for one in dataset}
    runs = consistent(root / "traces" / "runtime", root)
    kernels = trace(default_first(runs), ALL)
    return {
        **verification_documents(root),
        **accuracy_documents(root),
        **performance_documents(root, dataset),
        **reference_speed_document(root, dataset),
        **cheats_document(root),
        **judged_kinds_document(root, dataset),
        root / "docs" / "harness_power.md": harness_power(),
        root / "docs" / "hostile_files.md": fuzz.document(fuzzed),
        **safeguards_document(root, fuzzed, read_summaries(RESULTS)),
        root / "docs" / "coverage.md": kernel_coverage(root, kernels, dataset)
        + without_definition(without)
        + only_named(root, dataset)
        + time_coverage(runs, dataset, proven)
        + model_coverage(root, dataset),
        **compatibility_document(root, dataset),
        **templates_document(root),
    }


def compatibility_document(root: Path, dataset: list[Definition]) -> dict[Path, str]:
    """docs/compatibility.md and its text; nothing for a root without the table of flashinfer-bench's names."""
    known = load_compatibility(root)
    return {} if known is None else {root / "docs" / "compatibility.md": compatibility(known, dataset)}


def model_coverage(root: Path, dataset: list[Definition]) -> str:
    """The part of docs/coverage.md about models: what all of them need, and what none of them needs."""
    needs = load_needs(root)
    found = model_coverages(root, needs=needs)
    headings, *rows = matrix(found)
    lines = ["", MODELS, *table(headings, rows, "l" + "r" * (len(headings) - 1))]
    rows = [
        [f"`{one.op_type}`", f"`{one.name}`", "yes" if VERIFIED in one.tags else "no"]
        for one in curated(dataset, needs.values())
    ]
    lines += ["", CURATED, *(table(["op_type", "Definition", "Verified"], rows) if rows else ["There are none yet."])]
    return "\n".join(lines) + "\n"


def _trace(path: Path) -> dict[str, Any]:
    try:
        return load_object(path, TRACES)
    except JsonSourceError as error:
        raise DatasetError(f"{path}: {error}; generate it again or restore it from version control") from error


if __name__ == "__main__":
    end_with(main)
