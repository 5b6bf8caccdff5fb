"""The commands, Definitions and files that documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashinfer_trace import definitions
from flashinfer_trace.cli import main
from flashinfer_trace.format.naming import load_naming

ROOT = Path(__file__).resolve().parent.parent
#: All but the changelog, which also names what was removed later.
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    if path.name != "CHANGELOG.md"
}
NAMES = frozenset(one.name for one in definitions(root=ROOT))
#: Definitions that CONTRIBUTING.md adds.
EXAMPLES = frozenset({"rmsnorm_h6656"})
#: Places in the repository that documents name in backticks.
DIRECTORIES = "definitions|docs|evidence|flashinfer_trace|models|reference|schema|tests|tools|traces|workloads"
PLACE = re.compile(rf"`((?:{DIRECTORIES})/[\w./-]*)`")
COMMAND = re.compile(r"^\s*(?:\$ )?flashinfer-trace ([a-z]+)(.*)", re.M)
MODULE = re.compile(r"python -m (tools\.\w+)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_exists(document: str) -> None:
    text = DOCUMENTS[document].read_text(encoding="utf-8")
    assert [place for place in PLACE.findall(text) if not (ROOT / place).exists()] == []
    assert [name for name, _ in COMMAND.findall(text) if name not in main.commands] == []
    modules = [ROOT.joinpath(*name.split(".")) for name in MODULE.findall(text)]
    assert [
        path for path in modules if not (path / "__main__.py").exists() and not path.with_suffix(".py").exists()
    ] == []
    arguments = [word for _, rest in COMMAND.findall(text) for word in rest.partition("#")[0].split()]
    assert [word for word in arguments if is_definition(word) and word not in NAMES | EXAMPLES] == []


def is_definition(word: str) -> bool:
    """Whether a word could only be the name of a Definition: the name of a family's beginning, and a size."""
    beginnings = tuple(family.pattern.partition("{")[0] for family in load_naming(ROOT).families.values())
    return word.startswith(beginnings) and bool(re.fullmatch(r"\w*\d\w*", word))


def test_the_scan_finds_what_documents_name() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS.values()]
    assert sum(len(PLACE.findall(text)) for text in texts) > 50
    assert sum(len(COMMAND.findall(text)) for text in texts) > 15
    assert is_definition("rmsnorm_h7777") and not is_definition("my_norm.py")
