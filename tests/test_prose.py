"""Prose reads like American English: short sentences and none of the tics that this project once had.

Documents, the findings, docstrings, comments, messages, and the help of every command are checked by proselint and by
the rules in `TICS`. No rule is switched off for a file. Code spans and blocks are not prose.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from flashinfer_trace.cli import main
from flashinfer_trace.dataset.model_claims import load_model_claims
from tools.shared.findings import read_findings

ROOT = Path(__file__).resolve().parent.parent
#: Ends the place of a file's messages. They mix prose with code, so proselint does not read them.
MESSAGES = ": messages"
#: Parts of code that evidence is bound to: they wait for the next run of its kernels on a GPU.
BOUND = (
    "What is not chosen is replaced: it may hold NaN, and 0 * NaN is NaN.",
    "What is no key comes last: as many places as a row has keys are those of keys.",
    "What is padded by less than nothing is cut.",
    "indices are not those of the values beside them",
)
#: How long a sentence may be, in words.
LONGEST = 40
#: Folders whose Python files are checked. Texts in tests are not messages of the program.
FOLDERS = ("flashinfer_trace", "reference", "tests", "tools")

SPELLINGS = (
    "normalis|quantis|initialis|serialis|recognis|organis|optimis|minimis|maximis|summaris|parametris|generalis|"
    "specialis|randomis|tokenis|vectoris|materialis|synchronis|canonicalis|categoris|characteris|utilis|penalis|"
    "equalis|localis|finalis|memoris|standardis|customis|prioritis|sanitis|linearis|factoris|symmetris|realis"
)
#: Wrong phrase -> advice.
TICS = {
    r"(?<!here )\b(?:is|are|was|were) no (?!longer\b)": "is not a ...",
    r"(?:^|[,;(] )(?:of|by|from) which\b": "split the sentence",
    r"(?:^|[.!?] )Of (?:a|an|the|all)\b": "begin with the subject",
    r"(?:^|[.!?] )What (?!do you\b)[^?]*?[.:]$": "begin with the subject",
    r", too\b": "also",
    r"\bbeside\b": "next to",
    r"\bso that\b": "so",
    r"\b[Nn]obody (?:ran|has run)\b|\bha(?:s|ve) (?:a|no) run\b": "has not been run",
    r"\b(?:lies|stands) in\b": "is in",
    r"\ball the same\b": "anyway",
    r"\btake no word of\b|\bsay nothing of\b": "say what happens",
    rf"\b(?:{SPELLINGS})(?=e|i|a|o)": "American spelling: z",
    r"\b(?:behaviou|neighbou|colou|favou|honou)r|labelled|labelling|modelled|modelling|cancelled|cancelling|judgement"
    r"|\bcentre\b|\btowards\b|artefact|licence|\bgrey\b|\banalyse|\bwhilst\b|\btravell": "American spelling",
}


def plain(markdown: str) -> str:
    """The prose of a Markdown document: no code, tables or addresses; one paragraph or list item a line."""
    text = re.sub(r"\A---\n.*?\n---\n|^ *```.*?^ *```$", "", markdown, flags=re.M | re.S)
    text = re.sub(r"^\|.*$|^#.*$|<[^>\n]+>", "", text, flags=re.M)
    text = re.sub(r"``.*?``|`[^`]*`", "X", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^[ ]*(?:[-*]|\d+\.|:)[ ]+", "\n\n", text, flags=re.M)
    paragraphs = (" ".join(one.split()) for one in re.split(r"\n\s*\n", text))
    return "\n".join(one.replace(" * ", "×").replace("*", "") for one in paragraphs if one)


def docstrings(path: Path) -> Iterator[str]:
    """Each docstring of a file, its sections on lines of their own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = re.sub(r"^( *)(?:Args|Returns|Raises|Attributes):$", "", ast.get_docstring(node) or "", flags=re.M)
            yield re.sub(r"^    (?:\w+|\.)[\w, .]*: (?=\S)", "\n\n", text, flags=re.M)


def comments(path: Path) -> Iterator[str]:
    """Each comment of a file; comments on successive lines are one."""
    last, block = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            follows = token.start[0] == last + 1 and not token.line[: token.start[1]].strip()
            words = re.sub(r"^#[:!]? ?(?:(?:noqa|type|fmt|mypy)\b.*)?", "", token.string)
            if not follows:
                yield block
            last, block = token.start[0], f"{block} {words}" if follows else words
    yield block


def messages(path: Path) -> Iterator[str]:
    """Each text of at least four words that is not a docstring; values in it are an X."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    skipped = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    skipped |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in skipped:
            parts = [getattr(part, "value", part) for part in getattr(node, "values", [node])]
            text = "".join(part if isinstance(part, str) else "X" for part in parts)
            if text.count(" ") >= 3:
                yield text


def texts() -> dict[str, str]:
    """The prose to check, by its place."""
    documents = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/site/assets/*.md"))
    found = {one.relative_to(ROOT).as_posix(): one.read_text("utf-8") for one in documents}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            found[place] = "\n\n".join([*docstrings(path), *comments(path)])
            if folder != "tests":
                found[f"{place}{MESSAGES}"] = "\n\n".join(messages(path))
    for one in read_findings(ROOT):
        parts = [text for defect in one.defects for text in (defect.input, defect.result, defect.right)]
        found[f"findings/kernels.json: {one.id}"] = "\n\n".join([one.title, *parts])
    for name, command in main.commands.items():
        options = [one.help or "" for one in command.params if isinstance(one, click.Option)]
        found[f"flashinfer-trace {name} --help"] = "\n\n".join([command.help or "", *options])
    for one in BOUND:
        found = {place: text.replace(one, "") for place, text in found.items()}
    return {place: prose for place, text in found.items() if (prose := plain(text))}


TEXTS = texts()


#: Checks of proselint that do not fit source files, which have straight quotes and three dots.
UNUSED = ("typography",)


def of_proselint(place: str) -> list[str]:
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    checks = {name: on and name not in UNUSED for name, on in DEFAULT["checks"].items()}
    text = TEXTS[place].replace("\n", "\n-\n")
    found = LintFile(place, text).lint({**DEFAULT, "checks": checks})
    return [
        f"{text[slice(*(end - 1 for end in one.check_result.span))]!r}: {one.check_result.message}" for one in found
    ]


def tics(prose: str) -> list[str]:
    """The tics and the long sentences of plain text, with advice."""
    found = []
    for line in prose.splitlines():
        found += [
            f"{line[max(tic.start() - 30, 0) : tic.end() + 30]!r}: {advice}"
            for wrong, advice in TICS.items()
            for tic in re.finditer(wrong, line)
        ]
        sentences = re.split(r"(?<=[.!?:;]) ", line)
        found += [f"{one}: at most {LONGEST} words" for one in sentences if len(one.split()) > LONGEST]
    return found


@pytest.mark.parametrize("place", TEXTS)
def test_prose_is_plain(place: str) -> None:
    assert tics(TEXTS[place]) + ([] if place.endswith(MESSAGES) else of_proselint(place)) == []


def test_descriptions_of_definitions_are_plain() -> None:
    """They say "Used by MODEL at TP 8" or "Sizes of MODEL ...", and spell models as models/ does."""
    titles = load_model_claims(ROOT).titles
    spaced = "|".join(re.escape(title.replace("-", " ")) for title in titles if "-" in title)
    model = "|".join(sorted({re.escape(title.split("-")[0]) for title in titles}))
    phrased = re.compile(
        rf"\b(?:{spaced})\b|\bUsed (?:at|in)\b|(?:^|\. )In (?:{model})\b|[Tt]hese are the sizes|The size is"
        r"|It normalizes|(?<!x )\b1 (?:key-value |query |key )?(?:head|group|page|token|expert)s\b"
    )
    found = []
    for path in (ROOT / "definitions").glob("*/*.json"):
        definition = json.loads(path.read_text(encoding="utf-8"))
        parts = [one for key in ("axes", "inputs", "outputs") for one in definition[key].values()]
        text = "\n\n".join(one.get("description", "") for one in (definition, *parts))
        found += [f"{path.stem}: {wrong}" for wrong in (*phrased.findall(text), *tics(plain(text)))]
    assert found == []


def test_documents_are_read_past_their_headings() -> None:
    code = "```\nso that\n```\n"
    text = (
        f"# A title\n\nOne\nsentence with `code`.\n\n| a | table |\n\n{code}- An item.\n\n## More\n\nThe [end](a.md).\n"
    )
    assert plain(text) == "One sentence with X.\nAn item.\nThe end."


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
        "There is no file.": 0,
    }
    for text, count in samples.items():
        assert sum(len(re.findall(wrong, text)) for wrong in TICS) == count, text
