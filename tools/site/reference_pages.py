"""The pages about findings, tags, commands, the format and verdicts, and the home page: all made from data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import click

from flashinfer_trace.cli import main
from tools.runtime_tracing.matching import Standing
from tools.runtime_tracing.time_coverage import PHASES, mean
from tools.shared.markdown import code as span
from tools.shared.markdown import escape as markdown
from tools.shared.markdown import table as markdown_table
from tools.site.facts import Facts, state
from tools.site.html import code, escape, link, scrolled, table
from tools.site.model_pages import step

#: State of a defect -> its meaning.
_STATES = {
    "shown": "shown by its probe on a GPU",
    "gone": "gone: its probe is right in today's release",
    "reported": "reported; its probe has not been run",
}
#: The text for the state upstream, in addition to its note.
_UPSTREAM = {"unknown": "We found no report.", "reported": "Reported.", "fixed": "Fixed.", "replaced": ""}


def numbers(facts: Facts) -> Mapping[str, str]:
    """The figures on the home page, by their placeholders."""
    steps = [(phase, rows) for run in facts.runs for phase in PHASES if (rows := step(facts, run, phase))]
    shares: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for phase, rows in steps:
        total = sum(row.microseconds for row in rows)
        shares[phase].append(sum(row.microseconds for row in rows if row.standing is Standing.VERIFIED) / total)
    defects = [defect for one in facts.findings for defect in one.defects]
    return {
        "definitions": f"{len(facts.dataset):,}",
        "verified": f"{sum(state(one) == 'verified' for one in facts.dataset):,}",
        "families": str(len(facts.families)),
        "models": str(len(facts.models)),
        "kernels": str(len(facts.kernels)),
        "defects": str(sum(len(one.probes) for one in defects)),
        **{f"share_{phase}": f"{mean(found):.0%}" for phase, found in shares.items()},
    }


def _linked(text: str) -> str:
    """A text with its addresses as links."""
    return re.sub(r"https://[^\s]*[^\s.,:]", lambda found: f'<a href="{found[0]}">{found[0]}</a>', escape(text))


def findings_page(facts: Facts) -> str:
    """Every finding, with filters by library, version and state."""
    parts = [
        "# Kernel findings\n",
        "Defects of real kernels: wrong results, memory that is never written, and inputs that pass a wrapper's checks "
        "and then give garbage or end the process. `pytest -m gpu_harness tests/test_kernel_findings.py` repeats each "
        "on a GPU. To report one, add it to `findings/kernels.json` and its probe to "
        "`tests/support/kernel_findings.py`.\n",
        '<div class="filters" data-filter="finding"></div>\n',
    ]
    for one in facts.findings:
        states = sorted({defect.state for defect in one.defects})
        data = (
            f'data-library="{escape(one.library)}" data-version="{escape(one.version)}" data-state="{" ".join(states)}"'
        )
        kernels = ", ".join(
            link(f"kernels/{facts.kernels[path]}.html", code(path)) if path in facts.kernels else code(path)
            for path in one.kernels
        )
        upstream = " ".join(filter(None, (_UPSTREAM[one.upstream["state"]], one.upstream.get("note"))))
        parts.append(
            f'<section class="finding" {data}><h2 id="{one.id}">{escape(one.title)}</h2>'
            f"<p>{kernels}<br>Seen in {escape(one.library)} {escape(one.version)}. {_linked(upstream)}</p>"
        )
        for defect in one.defects:
            rows = [
                ["Input", escape(defect.input)],
                ["Result", escape(defect.result)],
                ["Right", escape(defect.right)],
                ["State", _STATES[defect.state]],
                ["Probe", "<br>".join(code(probe) for probe in defect.probes)],
            ]
            heading = f"<h3>{escape(defect.title[:1].upper() + defect.title[1:])}</h3>" if defect.title else ""
            body = "".join(f'<tr><th scope="row">{name}</th><td>{text}</td></tr>' for name, text in rows)
            parts.append(heading + scrolled(f"<tbody>{body}</tbody>"))
        parts.append("</section>\n")
    return "\n".join(parts)


def tags_page(facts: Facts) -> str:
    """Every tag, and every abbreviation of a name."""
    spaces = [
        [
            f"`{one.name}:`",
            markdown(one.description),
            ", ".join(span(value) for value in one.values) or "any",
            "yes" if one.required else "",
        ]
        for one in facts.naming.namespaces.values()
    ]
    flags = [[span(name), markdown(text)] for name, text in facts.naming.flags.items()]
    shorts = [
        [span(short), ", ".join(span(axis) for axis in axes)]
        for short, axes in sorted(facts.naming.abbreviations.items())
    ]
    return "\n".join(
        [
            "# Tags and names\n",
            "A tag is `namespace:value`, or a flag without a namespace. `schema/naming.json` defines them, and "
            "`flashinfer-trace validate` enforces them.\n",
            "## Namespaces\n",
            *markdown_table(["Tag", "Meaning", "Values", "Required"], spaces),
            "\n## Flags\n",
            *markdown_table(["Tag", "Meaning"], flags),
            "\n## Names\n",
            "A name is `{op_type}_{variant}_{sizes}`. Each size is an abbreviation and a number:\n",
            *markdown_table(["Abbreviation", "Axis"], shorts),
            "",
        ]
    )


def cli_page() -> str:
    """Every command with its options, from the commands themselves."""
    parts = [
        "# Commands\n",
        "Exit status of each command: 0 success, 1 a failure, 2 wrong usage or a kernel that was not judged, 3 nothing "
        "was verified, judged, or timed, 130 after an interrupt. A command that differs says so.\n",
    ]
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"flashinfer-trace {name}")
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


#: The pages that list all of a kind: their titles, and what they say first.
INDEXES = {
    "families": ("Families", "Definitions of one family share a reference, an oracle, and bounds."),
    "models": ("Models", "Each model's calls, in order, with their times."),
    "runs": ("Recorded runs", "Each run of SGLang that was recorded on a GPU, step by step."),
    "kernels": ("Kernels", "Each real kernel: its Definitions, the versions that were run, its defects, and callers."),
}


def index_page(facts: Facts, directory: str, pages: Mapping[str, str]) -> str:
    """The page that lists all pages of a folder by their titles."""
    title, text = INDEXES[directory]
    lines = [f"- [{_heading(page)}]({name}.md)" for name, page in pages.items()]
    return f"# {title}\n\n{text}\n\n" + "\n".join(lines) + "\n"


def format_page(facts: Facts) -> str:
    """The fields of a Definition, from the schema, after the text that people write."""
    schema = json.loads((facts.root / "schema" / "definition.schema.json").read_text(encoding="utf-8"))
    text = (facts.root / "docs" / "format.md").read_text(encoding="utf-8")
    return f"{text}\n## Fields\n\n{table(['Field', 'Type', 'Meaning'], _rows(schema, schema))}\n"


def verdict_page(facts: Facts) -> str:
    """The fields of a verdict, from its schema."""
    schema = json.loads((facts.root / "schema" / "verdict.schema.json").read_text(encoding="utf-8"))
    return (
        "# Verdict JSON\n\n`flashinfer-trace check --format json` prints one verdict. "
        f"{markdown(schema.get('description', ''))}\n\n{table(['Field', 'Type', 'Meaning'], _rows(schema, schema))}\n"
    )


def _rows(schema: Mapping[str, Any], whole: Mapping[str, Any], prefix: str = "") -> Iterator[list[str]]:
    required = schema.get("required", ())
    for name, given in schema.get("properties", {}).items():
        field = _resolved(given, whole)
        kinds = field.get("type") or ("enum" if "enum" in field else "")
        shown = kinds if isinstance(kinds, str) else " or ".join(kinds)
        values = f" One of {', '.join(map(str, field['enum']))}." if "enum" in field else ""
        optional = "" if name in required else " (optional)"
        yield [code(prefix + name), escape(shown + optional), escape(field.get("description", "") + values)]
        inner = _resolved(field["items"], whole) if isinstance(field.get("items"), Mapping) else field
        if prefix.count(".") < 2:
            yield from _rows(inner, whole, f"{prefix}{name}.")


def _resolved(field: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """A field with what its reference into the same schema says."""
    target: Any = whole
    if not str(field.get("$ref", "")).startswith("#/"):
        return field
    for part in field["$ref"][2:].split("/"):
        target = target[part]
    return {**target, **{name: value for name, value in field.items() if name != "$ref"}}


def _heading(page: str) -> str:
    return page.partition("# ")[2].partition("\n")[0]
