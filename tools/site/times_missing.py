"""The part of docs/performance.md about kernels without a time, and why they have none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import read_text
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.judging.traffic import path_of
from flashinfer_trace.judging.traffic.plans import unfit
from flashinfer_trace.judging.traffic.profiles import load_traffic
from tools.shared.family_records import capabilities
from tools.shared.findings import read_findings
from tools.shared.markdown import code, table

UNKNOWN = "no time is recorded yet"


#: A Definition, and the values of its variable axes in some workloads.
Given = tuple[Definition, list[Mapping[str, int]]]


def times_missing(
    root: Path,
    dataset: Iterable[Definition],
    capability: tuple[int, int],
    times: Mapping[tuple[str, str], Mapping[str, Sequence[Mapping[str, Any]]]],
) -> list[str]:
    """Lines about the families of the dataset and the kernels for a GPU that have no time on it."""
    families: dict[str, list[Definition]] = {}
    for definition in dataset:
        families.setdefault(family_of(definition).name, []).append(definition)
    axes: dict[str, list[Mapping[str, int]]] = {}
    labels: dict[str, set[str]] = {}
    for (name, _), kernels in times.items():
        axes.setdefault(name, []).append(next(iter(kernels.values()))[-1]["axes"])
        labels.setdefault(name, set()).update(kernels)
    defects, rows, without, untimed = {path for one in read_findings(root) for path in one.kernels}, [], 0, set()
    for name, members in sorted(families.items()):
        family = family_of(members[0])
        timed = [(one, axes[one.name]) for one in members if one.name in axes]
        done = {label for one, _ in timed for label in labels[one.name]}
        without += not timed
        runnable = [kernel for kernel in family.kernels if kernel.unavailable(capability) is None]
        rows += [[code(name), "all", _other_gpu(family)]] if not runnable else []
        for kernel in runnable:
            if kernel.label not in done:
                why = _reason(kernel, timed or _planned(root, members))
                if why == UNKNOWN and not timed:
                    untimed.add(code(name))
                    continue
                defect = "; it has [a defect](../findings.md)" if kernel.path in defects else ""
                rows.append([code(name), code(kernel.label), why + defect])
    if not rows and not untimed:
        return []
    text = (
        f"{len(families) - without} of {len(families)} families have times. The table has the families whose kernels "
        "all need another GPU, and the kernels that run on this one and have no time."
    )
    if untimed:
        names = ", ".join(sorted(untimed))
        text += f" It leaves out those of which no time is recorded yet, {len(untimed)} in all: {names}."
    lines = table(["Family", "Kernel", "Why"], rows) if rows else []
    return ["### Without a time", "", text, "", *lines, ""]


def _other_gpu(family: Family) -> str:
    return f"needs a GPU of compute capability {capabilities(family.kernels)}"


def _planned(root: Path, members: Sequence[Definition]) -> list[Given]:
    """Those of a family that have workloads in a file, with those that are timed: the quick ones."""
    found: list[Given] = []
    for definition in members:
        path = path_of(definition, root)
        if path.exists():
            every = json.loads(read_text(path))["workloads"]
            quick = {one.name for each in load_traffic(root).values() for one in each if one.quick}
            found.append((definition, [one["axes"] for name, one in every.items() if name in quick]))
    return found


def _reason(kernel: Kernel, given: Sequence[Given]) -> str:
    """Why a kernel takes none of the workloads of its family, if that is known."""
    reasons: list[str | None] = []
    for definition, axes in given:
        why = kernel.unsupported(definition)
        reasons += [f"not for {code(definition.name)}: {why}"] if why else [unfit(kernel, one) for one in axes]
    return str(reasons[0]) if reasons and all(reasons) else UNKNOWN
