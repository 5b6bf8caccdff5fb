"""The part of docs/harness_power.md about faulty kernels, from what the GPU tests recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.mutate.results import read_powers
from tools.shared.markdown import table

#: Written by ``pytest -m gpu_harness tests/test_mutants.py --record-power DIR``; committed.
RECORDS = Path(__file__).with_name("power")

HEADER = """
## Faulty kernels

The outputs of real kernels are spoiled on a GPU, at real sizes, or the kernel is called with other inputs than
those that it was given, and a verification judges it: `pytest -m gpu_harness tests/test_mutants.py --record-power
tools/mutate/power`. A fault is as small as faults of kernels are: one element, row, tile or column, drawn uniformly in
each case, or a parameter that is off by a little. The tables show the number of cases, corners included, until the
kernel was rejected; the largest over the kernels and outputs of a family. *no*: none of the cases rejected it. A dash:
it makes no difference to this family. *Any*: a bit of an element that is drawn uniformly among those that are not 0;
*largest*: of the element of largest magnitude. A sampler that ignores its seed shows in no single call: every
verification calls it with two seeds, and fails it if the results are equal.
"""

#: The faults of any kernel as `harness.faults` names them, and the titles of their columns.
COLUMNS = {
    "mantissa bit 1 of any element flipped": "Bit 1, any",
    "mantissa bit 2 of any element flipped": "Bit 2, any",
    "mantissa bit 3 of any element flipped": "Bit 3, any",
    "mantissa bit 1 of the largest element flipped": "Bit 1, largest",
    "mantissa bit 2 of the largest element flipped": "Bit 2, largest",
    "mantissa bit 3 of the largest element flipped": "Bit 3, largest",
    "lowest bit of any element flipped": "Lowest bit of an integer",
    "a stale row": "Stale row",
    "a stale tile": "Stale tile",
    "a stale last column": "Stale column",
    "last column zero": "Zero column",
    "two rows exchanged": "Rows exchanged",
}


def load_power(directory: Path = RECORDS) -> list[dict[str, Any]]:
    """The records of a directory, in order of family and kernel; raises MutateDataError (see `read_powers`)."""
    return sorted(read_powers(directory), key=lambda record: (record["family"], record["kernel"]))


def render_power(
    records: Iterable[Mapping[str, Any]], unseen: Mapping[str, Mapping[str, str]], kernels: Iterable[tuple[str, str]]
) -> str:
    """The section of the document."""
    records, without = list(records), set(kernels)
    complete = len(without)
    without -= {(record["family"], record["kernel"]) for record in records}
    families: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    names: dict[tuple[str, str], list[str]] = {}
    gpus = set()
    for record in records:
        gpus.add(record["gpu"])
        for fault, power in record["faults"].items():
            families.setdefault(record["family"], {}).setdefault(fault.split(": ")[-1], []).append(power)
            if power["applied"] and power["cases"] is None:
                names.setdefault((record["family"], fault), []).append(record["kernel"])
    lines = [HEADER]
    if not families:
        return "\n".join([*lines, "No GPU run is recorded yet.", ""])
    lines += [f"Recorded on {' and '.join(sorted(gpus))}, for {complete - len(without)} of {complete} kernels."]
    if without:
        lines += ["", "These have no record yet:", ""]
        lines += [f"- `{family}`: `{kernel}`" for family, kernel in sorted(without)]
    lines.append("")
    every = sorted(families.items())
    rows = [[f"`{family}`", *(cell(faults.get(fault, [])) for fault in COLUMNS)] for family, faults in every]
    lines += table(["Family", *COLUMNS.values()], rows, "l" + "r" * len(COLUMNS))
    own = [(family, faults, fault) for family, faults in every for fault in sorted(faults.keys() - COLUMNS.keys())]
    rows = [[f"`{family}`", fault, cell(faults[fault])] for family, faults, fault in own]
    lines += ["", *table(["Family", "Fault of its own", "Cases"], rows, "llr")]
    return "\n".join([*lines, *not_rejected(names, unseen), ""])


def cell(found: Iterable[Mapping[str, Any]]) -> str:
    """The largest number of cases among several kernels and outputs."""
    applied = [power["cases"] for power in found if power["applied"]]
    if not applied:
        return "–"
    return "no" if None in applied else str(max(applied))


def not_rejected(names: Mapping[tuple[str, str], list[str]], unseen: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The faults that no case rejected, by reason."""
    if not names:
        return []
    reasons: dict[str, list[str]] = {}
    for (family, fault), kernels in sorted(names.items()):
        why = unseen.get(family, {}).get(fault) or "Not explained yet."
        reasons.setdefault(why, []).append(f"- `{family}`, {fault}: {', '.join(f'`{kernel}`' for kernel in kernels)}")
    found = ["", "### Faults that are not rejected", ""]
    for why, entries in reasons.items():
        found += [why, "", *entries, ""]
    return found[:-1]
