"""Builds the pages that summarize the dataset, from what is committed. None of them is committed.

python -m tools.site [--out DIR]        # the default, build/site, is ignored by git

The pages are derived from the dataset, the family records, the evidence, the recorded runs, times and verdicts, the
results of `tools.mutate` and `tools.fuzz`, and the committed kernel and op traces. SGLang's sources are not needed. The
documents that people write are copied next to them, so the links between pages work. A folder that an earlier run
wrote is replaced. Exit status: 0 done, 2 a file cannot be read or used, and nothing was written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.page import reference_speed_document
from flashinfer_trace import DatasetError, Definition, definitions, find_root
from flashinfer_trace.dataset.coverage import LISTED, matrix, model_coverages, op_table
from flashinfer_trace.dataset.evidence import VERIFIED, proofs
from flashinfer_trace.dataset.flashinfer_bench import load_compatibility
from flashinfer_trace.format.files import write_text
from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load_object
from tools.accuracy import accuracy_documents
from tools.cheats import cheats_document
from tools.compatibility.page import compatibility
from tools.extract_definitions import model_needs
from tools.extract_definitions.traces import RELEASE
from tools.fuzz import summary as fuzz
from tools.kernel_tracing.report.render import pages
from tools.kernel_tracing.report.trace_files import load_traces, restricted
from tools.mutate.__main__ import harness_power
from tools.mutate.results import read_summaries
from tools.mutate.summary import RESULTS
from tools.op_tracing.asked_for import ASKED, asked_for, asked_kernels, models_not_claimed
from tools.op_tracing.definitions import covered, page_cover
from tools.op_tracing.kernel_coverage import kernel_coverage, without_definition
from tools.op_tracing.only_named import only_named
from tools.op_tracing.render import render
from tools.performance import performance_documents
from tools.runtime_tracing.consistency import consistent
from tools.runtime_tracing.time_coverage import time_coverage
from tools.safeguards import safeguards_document
from tools.shared.command import end_with, names_its_cause
from tools.shared.markdown import table
from tools.verification import verification_documents

MODELS = f"""## Models

The Definitions that each model needs at the sizes that families cover by default, by op_type: verified / existing /
needed. They are listed in `models/needs/`, which is derived from `models/` and from the traces of the model's code in
SGLang {RELEASE}, the release that the recipes understand; the kernels above are those of the kernel traces' release.
`flashinfer-trace coverage` prints the same table. A gap is an op of which no Definition follows from the model; each is
named below with its reason.
"""

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
        built = documents(root)
    except Exception as error:
        if not names_its_cause(error):
            raise
        print(error, file=sys.stderr)
        return 2
    write_pages(root, built, out)
    print(f"{out}: {len(built)} pages")
    return 0


def write_pages(root: Path, pages: Mapping[Path, str], out: Path) -> None:
    """Writes the pages under `out` at the places that they have relative to the root, and the documents of people."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).write_text("")
    for path in (*root.glob("*.md"), *root.glob("docs/*.md")):
        (out / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / path.relative_to(root))
    for path, text in pages.items():
        (out / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
        write_text(out / path.relative_to(root), text)


def documents(root: Path) -> dict[Path, str]:
    """Every page and its text, by the path that it would have under the root."""
    traces = load_traces(root / "traces" / "kernel_traces.json")
    ops = _trace(root / "traces" / "op_traces.json")
    dataset = list(definitions(root=root))
    known = covered(dataset)
    fuzzed = _trace(fuzz.RESULTS)
    asked, without = _trace(root / ASKED), _trace(root / LISTED)
    names = [one["name"] for one in traces["configurations"] if one["model"].startswith(ops["model"])]
    proven = {one.name: [entry.path for entry in proofs(root, one)] for one in dataset}
    runs = consistent(root / "traces" / "runtime", root)
    return {
        **verification_documents(root),
        **accuracy_documents(root),
        **performance_documents(root, dataset),
        **reference_speed_document(root, dataset),
        **cheats_document(root),
        root / "docs" / "harness_power.md": harness_power(),
        root / "docs" / "hostile_files.md": fuzz.document(fuzzed),
        **safeguards_document(root, fuzzed, read_summaries(RESULTS)),
        root / "docs" / "coverage.md": kernel_coverage(root, traces, dataset)
        + without_definition(without)
        + only_named(root, dataset)
        + asked_for(asked_kernels(root, dataset, asked, without))
        + time_coverage(runs, dataset, proven)
        + model_coverage(root, dataset)
        + models_not_claimed(root, asked, dataset),
        **compatibility_document(root, dataset),
        root / "traces" / "op_traces.md": render(ops, restricted(traces, names, ops["model"]), known),
        **{
            root / "traces" / "kernels" / name: text for name, text in pages(traces, page_cover(dataset, known)).items()
        },
    }


def compatibility_document(root: Path, dataset: list[Definition]) -> dict[Path, str]:
    """docs/compatibility.md and its text; nothing for a root without the table of flashinfer-bench's names."""
    known = load_compatibility(root)
    return {} if known is None else {root / "docs" / "compatibility.md": compatibility(known, dataset)}


def model_coverage(root: Path, dataset: list[Definition]) -> str:
    """The part of docs/coverage.md about models: all of them, then the ops of each, then what none of them needs."""
    needs = {path.stem: json.loads(text) for path, text in model_needs.documents(root).items()}
    found = model_coverages(root, needs=needs)
    headings, *rows = matrix(found)
    lines = ["", MODELS, *table(headings, rows, "l" + "r" * (len(headings) - 1))]
    for one in found:
        headings, *rows = op_table(one)
        lines += ["", f"### {one.model}", "", *table(headings, rows, "llrrrl")]
        if one.unsupported:
            lines += ["", "Ops of which no Definition follows from the model:", "", *gaps(one.unsupported)]
    rows = [
        [f"`{one.op_type}`", f"`{one.name}`", "yes" if VERIFIED in one.tags else "no"]
        for one in model_needs.curated(dataset, needs.values())
    ]
    lines += ["", CURATED, *(table(["op_type", "Definition", "Verified"], rows) if rows else ["There are none yet."])]
    return "\n".join(lines) + "\n"


def gaps(unsupported: Mapping[str, str]) -> list[str]:
    """One line for each reason, without the kernels that it ends with, and the ops that it keeps out."""
    ops: dict[str, list[str]] = {}
    for op, reason in unsupported.items():
        ops.setdefault(reason.rpartition(": ")[0], []).append(f"`{op}`")
    return [f"- {', '.join(names)}: {reason}" for reason, names in ops.items()]


def _trace(path: Path) -> dict[str, Any]:
    try:
        return load_object(path, TRACES)
    except JsonSourceError as error:
        raise DatasetError(f"{path}: {error}; generate it again or restore it from version control") from error


if __name__ == "__main__":
    end_with(main)
