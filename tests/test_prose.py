"""Prose reads like American English: short sentences and none of the tics that this project once had.

Documents, the findings, the docstrings of the folders in `DOCUMENTED`, and the help of every command are checked by
proselint and by the rules in `TICS`. No rule is switched off for a file. What stands in code spans and blocks is not
prose.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from flashinfer_trace.cli import main
from tools.shared.findings import read_findings

ROOT = Path(__file__).resolve().parent.parent
#: How long a sentence may be, in words.
LONGEST = 40
#: Folders whose docstrings are checked. Add others as they are rewritten.
DOCUMENTED = ("flashinfer_trace", "tools")

SPELLINGS = (
    "normalis|quantis|initialis|serialis|recognis|organis|optimis|minimis|maximis|summaris|parametris|generalis|"
    "specialis|randomis|tokenis|vectoris|materialis|synchronis|canonicalis|categoris|characteris|utilis|penalis|"
    "equalis|localis|finalis|memoris|standardis|customis|prioritis|sanitis|linearis|factoris|symmetris|realis"
)
#: What is wrong -> what to write.
TICS = {
    r"\b(?:is|are|was|were) no (?!longer\b)": "is not a ...",
    r"(?:^|[,;(] )(?:of|by|from) which\b": "split the sentence",
    r"(?:^|[.!?] )Of (?:a|an|the|all)\b": "begin with the subject",
    r"(?:^|[.!?] )What (?!do you\b)[^?]*?[.:]$": "begin with the subject",
    r", too\b": "also",
    r"\bbeside\b": "next to",
    r"\bso that\b": "so",
    r"\bnobody ran\b|\bnobody has run\b|\bha(?:s|ve) (?:a|no) run\b": "has not been run",
    r"\b(?:lies|stands) in\b": "is in",
    r"\ball the same\b": "anyway",
    r"\btake no word of\b|\bsay nothing of\b": "say what happens",
    rf"\b(?:{SPELLINGS})(?=e|i|a|o)": "American spelling: z",
    r"\b(?:behaviou|neighbou|colou|favou|honou)r|labelled|labelling|modelled|modelling|cancelled|cancelling|judgement"
    r"|\bcentre\b|\btowards\b|artefact|licence|\bgrey\b|\banalyse|\bwhilst\b|\btravell": "American spelling",
}


def plain(markdown: str) -> str:
    """The prose of a Markdown document: no code, tables or addresses; one paragraph or list item a line."""
    text = re.sub(r"^---\n.*?\n---\n|^ *```.*?^ *```$|^\|.*$|^#.*$|<[^>]+>", "", markdown, flags=re.M | re.S)
    text = re.sub(r"``.*?``|`[^`]*`", "X", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^[ ]*(?:[-*]|\d+\.|:)[ ]+", "\n\n", text, flags=re.M)
    paragraphs = (" ".join(one.split()) for one in re.split(r"\n\s*\n", text))
    return "\n".join(one.replace("*", "") for one in paragraphs if one)


def docstrings(path: Path) -> Iterator[str]:
    """Each docstring of a file, its sections on lines of their own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = re.sub(r"^( *)(?:Args|Returns|Raises|Attributes):$", "", ast.get_docstring(node) or "", flags=re.M)
            yield re.sub(r"^ *[\w, .]+: (?=\S)", "\n\n", text, flags=re.M)


def texts() -> dict[str, str]:
    """What is checked, by where it is."""
    documents = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/site/assets/*.md"))
    found = {one.relative_to(ROOT).as_posix(): one.read_text("utf-8") for one in documents}
    for folder in DOCUMENTED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[path.relative_to(ROOT).as_posix()] = "\n\n".join(docstrings(path))
    for one in read_findings(ROOT):
        parts = [text for defect in one.defects for text in (defect.input, defect.result, defect.right)]
        found[f"findings/kernels.json: {one.id}"] = "\n\n".join([one.title, *parts])
    for name, command in main.commands.items():
        options = [one.help or "" for one in command.params if isinstance(one, click.Option)]
        found[f"flashinfer-trace {name} --help"] = "\n\n".join([command.help or "", *options])
    return {place: plain(text) for place, text in found.items()}


TEXTS = texts()


@pytest.mark.parametrize("place", TEXTS)
def test_prose_has_none_of_the_tics(place: str) -> None:
    found = [
        f"{line[max(found.start() - 30, 0) : found.end() + 30]!r}: {advice}"
        for line in TEXTS[place].splitlines()
        for wrong, advice in TICS.items()
        for found in re.finditer(wrong, line)
    ]
    assert found == []


@pytest.mark.parametrize("place", TEXTS)
def test_sentences_are_short(place: str) -> None:
    sentences = [one for line in TEXTS[place].splitlines() for one in re.split(r"(?<=[.!?:;]) ", line)]
    assert [one for one in sentences if len(one.split()) > LONGEST] == []


#: Checks of proselint that do not fit source files, which have straight quotes and three dots.
UNUSED = ("typography",)


@pytest.mark.parametrize("place", TEXTS)
def test_proselint_finds_nothing(place: str) -> None:
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    checks = {name: on and name not in UNUSED for name, on in DEFAULT["checks"].items()}
    found = LintFile(place, TEXTS[place] or "-").lint({**DEFAULT, "checks": checks})
    assert [(one.check_result.check_path, one.check_result.message, one.pos) for one in found] == []


def test_the_rules_find_the_tics() -> None:
    samples = {
        "It is no kernel.": 1,
        "Kernels, of which two ran.": 1,
        "Of a cache it reads rows.": 1,
        "What it reads is counted.": 1,
        "This one, too.": 1,
        "A row beside it, so that it fits.": 2,
        "It normalises colours.": 2,
        "What do you want to do?": 0,
        "It is no longer here.": 0,
    }
    for text, count in samples.items():
        assert sum(len(re.findall(wrong, text)) for wrong in TICS) == count, text
