"""The data that the pages show, read once."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace import DatasetError, Definition, definitions
from flashinfer_trace.dataset.evidence import Entry, proofs
from flashinfer_trace.dataset.finding import Catalog
from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load_object
from flashinfer_trace.format.naming import Naming, load_naming
from flashinfer_trace.judging.bench import results
from flashinfer_trace.judging.bench.statistics import IN_TIME
from flashinfer_trace.judging.traffic import path_of
from flashinfer_trace.kernels.names import KINDS
from tools.runtime_tracing.consistency import consistent
from tools.runtime_tracing.matching import Evidence
from tools.runtime_tracing.recording import Recording
from tools.shared.findings import Finding, read_findings
from tools.shared.markdown import slug


@dataclass(frozen=True)
class Facts:
    """The dataset and what is recorded of it.

    Attributes:
        proofs: Definition -> the runs that prove it.
        times: Definition -> its recorded times under workloads of today, the latest of each kernel, workload and GPU.
        workloads: Definition -> its workloads.
        runs: the recorded runs of models.
        models: the constants of models by name.
    """

    root: Path
    naming: Naming
    dataset: tuple[Definition, ...]
    catalog: Catalog
    proofs: Mapping[str, Sequence[Entry]]
    times: Mapping[str, Sequence[Mapping[str, Any]]]
    workloads: Mapping[str, Mapping[str, Any]]
    runs: Sequence[Recording]
    findings: Sequence[Finding]
    models: Mapping[str, Mapping[str, Any]]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Definition]:
        """The dataset by name."""
        return {one.name: one for one in self.dataset}

    @functools.cached_property
    def evidence(self) -> Evidence:
        """Matches recorded calls with Definitions."""
        return Evidence(self.dataset, {name: [one.path for one in found] for name, found in self.proofs.items()})

    @functools.cached_property
    def families(self) -> Mapping[str, Sequence[Definition]]:
        """Family -> its Definitions."""
        found: dict[str, list[Definition]] = defaultdict(list)
        for one in self.dataset:
            found[self.catalog.family(one)].append(one)
        return dict(sorted(found.items()))

    @functools.cached_property
    def kernels(self) -> Mapping[str, str]:
        """Path of each kernel that has a page -> the name of that page."""
        paths = {entry.path for found in self.proofs.values() for entry in found}
        paths |= {path for one in self.dataset for path in called_as(one)}
        paths |= {path for one in self.findings for path in one.kernels}
        pages: dict[str, str] = {}
        for path in sorted(paths):
            name = slug(path)
            pages[path] = name if name not in pages.values() else f"{name}-{len(pages)}"
        return pages

    @functools.cached_property
    def kernels_by_last(self) -> Mapping[tuple[str, str], str]:
        """Library and last name of each kernel that has a page -> its path."""
        return {(path.split(".")[0], last_name(path)): path for path in self.kernels}


def last_name(path: str) -> str:
    """The last part of a kernel's path; of a method, its class."""
    parts = path.split(".")
    return parts[-2] if len(parts) > 1 and parts[-2][:1].isupper() else parts[-1]


def gather(root: Path) -> Facts:
    """Reads everything under a root. Raises the error of the first file that cannot be used."""
    dataset = tuple(definitions(root=root))
    naming = load_naming()
    known = {one.name: one for one in dataset}
    times: dict[str, dict[tuple[str, ...], Mapping[str, Any]]] = defaultdict(dict)
    for one in results.read(root / "results"):
        definition = known.get(one["definition"])
        if definition is not None and results.of_today(one, definition, root):
            times[definition.name][one["gpu"], one["workload"], one["kernel"]] = one
    workloads = {
        one.name: json.loads(path.read_text(encoding="utf-8"))["workloads"]
        for one in dataset
        if (path := path_of(one, root)).exists()
    }
    models = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(root.glob("models/*.json"))}
    return Facts(
        root,
        naming,
        dataset,
        Catalog(dataset, naming),
        {one.name: proofs(root, one) for one in dataset},
        {name: list(found.values()) for name, found in times.items()},
        workloads,
        consistent(root / "traces" / "runtime", root),
        list(read_findings(root)),
        models,
    )


def committed(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the checkout."""
    try:
        return load_object(path, TRACES)
    except JsonSourceError as error:
        raise DatasetError(f"{path}: {error}; generate it again or restore it from version control") from error


def seconds_of(record: Mapping[str, Any]) -> float:
    """The time in a line of results/; for a kernel that plans once for many layers, that of `run()`."""
    return float(record["run"] or record["seconds"])


def waited(record: Mapping[str, Any]) -> bool:
    """Whether the GPU waited for the processor in many calls."""
    return float(record["ahead"]) < IN_TIME


def state(definition: Definition) -> str:
    """Verified or unverified."""
    return "".join(definition.tag_values("status"))


def title_of(definition: Definition) -> str:
    """The first sentence of its description."""
    return definition.description.split(". ")[0].rstrip(".")


def called_as(definition: Definition) -> list[str]:
    """The paths by which its tags name kernels, whether or not they have run."""
    return [value for kind in KINDS for value in definition.tag_values(kind)]
