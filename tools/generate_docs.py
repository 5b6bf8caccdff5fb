"""Generates verification.md, accuracy.md and the folders beside them, harness_power.md, hostile_files.md, coverage.md,
compatibility.md, performance.md, reference_speed.md and safeguards.md of docs/.

It also writes the table of cheats in docs/judge.md, traces/op_traces.md, models/needs/, models/recorded/ and
schema/records.json. All are derived from the dataset, the family records, the evidence, the recorded runs, times and
verdicts, the results of `tools.mutate` and `tools.fuzz`, and the committed kernel and op traces. The sources of SGLang
are not needed.

python -m tools.generate_docs            # write them
python -m tools.generate_docs --check    # exit 1 if one is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.page import reference_speed_document
from benchmarks.times import TimesError
from flashinfer_trace import DatasetError, Definition, InputError, definitions, find_root
from flashinfer_trace.benching.results import ResultsError
from flashinfer_trace.ecosystem import EcosystemError, load_compatibility
from flashinfer_trace.families import FamilyError, all_families, family_of, module_of
from flashinfer_trace.files import UnreadableFile, json_text, read_text, write_text
from flashinfer_trace.json_source import TRACES, JsonSourceError, load_object
from flashinfer_trace.kernel_coverage import LISTED
from flashinfer_trace.kernel_paths import KernelPathsError
from flashinfer_trace.ledger import VERIFIED, LedgerError, proofs
from flashinfer_trace.model_claims import ModelClaimsError, load_model_claims
from flashinfer_trace.model_coverage import matrix, model_coverages, op_table
from flashinfer_trace.naming import NamingError
from flashinfer_trace.records import RecordsError, records_path
from flashinfer_trace.validation.contract_rules import contract_of
from tools.accuracy import accuracy_documents
from tools.cheats import cheats_document
from tools.compatibility.page import compatibility
from tools.extract_definitions import model_needs
from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.traces import RELEASE
from tools.fuzz import summary as fuzz
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.report.render import pages
from tools.kernel_tracing.report.trace_files import load_traces, restricted
from tools.mutate.__main__ import harness_power
from tools.mutate.reasons import ReasonError
from tools.mutate.results import MutateDataError, read_summaries
from tools.mutate.summary import RESULTS
from tools.op_tracing.asked_for import ASKED, asked_for, asked_kernels, models_not_claimed
from tools.op_tracing.definitions import covered, page_cover
from tools.op_tracing.kernel_coverage import kernel_coverage, without_definition
from tools.op_tracing.only_named import only_named
from tools.op_tracing.render import render
from tools.performance import performance_documents
from tools.runtime_tracing import model_calls
from tools.runtime_tracing.consistency import consistent
from tools.runtime_tracing.recording import RecordingError
from tools.runtime_tracing.time_coverage import time_coverage
from tools.safeguards import safeguards_document
from tools.shared.command import end_with
from tools.shared.family_records import usable_families
from tools.shared.markdown import table
from tools.verification import verification_documents

MODELS = f"""## Models

The Definitions that each model needs at the sizes that families cover by default, by op_type: verified / existing /
needed. They are listed in `models/needs/`, which is derived from `models/` and from the traces of the model's code in
SGLang {RELEASE}, the release that the recipes understand; the kernels above are those of the kernel traces' release.
`flashinfer-trace coverage` prints the same table. A gap is an op of which no Definition follows from the model; each is
named below with its reason.
"""

#: Folders that hold nothing but pages that are generated here.
PAGES = ("docs/accuracy", "docs/verification", "traces/kernels")

CURATED = """## Curated Definitions

Definitions that no model in `models/` needs. People write them; extraction does not create them.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document is out of date")
    options = parser.parse_args(arguments)
    root = find_root()
    outdated = []
    try:
        # What people write and nobody can use is an error before anything is written.
        usable_families()
        load_model_claims(root)
        # The facts of the records come first: what is proven, and thus the other documents, depends on them.
        for write_documents in (record_documents, documents):
            texts = write_documents(root)
            for path, text in texts.items():
                if not path.exists() or read_text(path, TRACES.bytes) != text:
                    outdated.append(path)
                    if not options.check:
                        path.parent.mkdir(exist_ok=True)
                        write_text(path, text)
            if options.check and outdated:
                break  # the other documents are judged by records that are up to date
            for path in leftovers(root, texts) if write_documents is documents else ():
                outdated.append(path)
                if not options.check:
                    path.unlink()
    except (
        ConfigurationError,
        DatasetError,
        EcosystemError,
        ExtractionError,
        FamilyError,
        InputError,
        KernelPathsError,
        LedgerError,
        ModelClaimsError,
        MutateDataError,
        NamingError,
        OSError,
        ReasonError,
        RecordingError,
        RecordsError,
        ResultsError,
        TimesError,
        UnreadableFile,
    ) as error:
        print(error, file=sys.stderr)
        return 2
    for path in outdated:
        done = "written" if path.exists() else "removed"
        print(f"{path}: {'out of date; run `python -m tools.generate_docs`' if options.check else done}")
    return 1 if options.check and outdated else 0


def leftovers(root: Path, texts: Mapping[Path, str]) -> list[Path]:
    """Pages of op_types and of kernels' categories that are none any more."""
    return [path for folder in PAGES for path in sorted((root / folder).glob("*.md")) if path not in texts]


def record_documents(root: Path) -> dict[Path, str]:
    """The path of schema/records.json and its text."""
    return {records_path(root): record_facts(root)}


def documents(root: Path) -> dict[Path, str]:
    """Every other generated document and its text."""
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
        **model_needs.documents(root),
        **model_calls.document(root, runs, dataset),
    }


def compatibility_document(root: Path, dataset: list[Definition]) -> dict[Path, str]:
    """docs/compatibility.md and its text; nothing for a root without the table of flashinfer-bench's names."""
    known = load_compatibility(root)
    return {} if known is None else {root / "docs" / "compatibility.md": compatibility(known, dataset)}


def record_facts(root: Path) -> str:
    """The text of schema/records.json: facts about the kernels of all families, for code that imports no torch."""
    of_family: dict[str, list[Definition]] = {}
    for definition in definitions(root=root):
        of_family.setdefault(family_of(definition).name, []).append(definition)
    families = {
        family.name: {
            "module": module_of(family),
            **common_contract(of_family.get(family.name, [])),
            "policies": {output: policy.reason for output, policy in family.compare.items()},
            "kernels": [
                {
                    "label": kernel.label,
                    "library": kernel.library,
                    "path": kernel.path,
                    "variant": kernel.variant,
                    "min_capability": ".".join(map(str, kernel.min_capability)),
                    "max_capability": ".".join(map(str, kernel.max_capability)),
                    "policies": {output: policy.reason for output, policy in kernel.compare.items()},
                    "unsupported": [one.name for one in of_family.get(family.name, []) if kernel.unsupported(one)],
                }
                for kernel in family.kernels
            ],
        }
        for family in all_families()
    }
    return json_text({"$schema": "records.schema.json", "families": families})


def common_contract(members: list[Definition]) -> dict[str, Any]:
    """The entry ``contract`` of a family in schema/records.json, which all of its Definitions must have.

    Raises:
        DatasetError: two of them have another contract.
    """
    contracts = {one.name: contract_of(one) for one in members}
    for name, contract in contracts.items():
        if contract != contracts[members[0].name]:
            raise DatasetError(
                f"{name} and {members[0].name} are of one family, but their axes, tensors or constraints differ; "
                "`flashinfer-trace validate` shows where"
            )
    return {"contract": contracts[members[0].name]} if members else {}


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
