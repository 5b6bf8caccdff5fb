"""Traces as files: each frame and each set of configurations is written once, in tables, and referred to by index.

`packed` makes that form from a document of `merge.merged`, `unpacked` the document from it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace.format import json_source
from flashinfer_trace.format.files import COMPACT, Lines, laid_out, write_text
from tools.kernel_tracing.configuration.needs import needs
from tools.kernel_tracing.verify.check import schema_problems

#: Where the traces of the pinned release are.
TRACES = Path("traces")
FRAME = ("file", "line", "function", "call")
KERNEL = ("name", "source", "category", "definition")
_SITE = FRAME[:3]


class _Table(dict[Any, int]):
    """Values and their indexes."""

    def index(self, value: Any) -> int:
        """The index of a value, which is added if it is new."""
        return self.setdefault(value, len(self))


def packed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The form on disk of a document."""
    numbers = {one["name"]: number for number, one in enumerate(document["configurations"])}
    frames, uses, runs, tests = _Table(), _Table(), _Table(), _Table()
    kernels = []
    for kernel in document["kernels"]:
        chains = []
        for chain in kernel["chains"]:
            taken: dict[tuple[str, ...], list[int]] = {}
            for name, phases in chain["configurations"].items():
                taken.setdefault(tuple(phases), []).append(numbers[name])
            written = {
                "frames": [frames.index(tuple(frame[key] for key in FRAME)) for frame in chain["frames"]],
                "op": chain["op"],
                "uses": uses.index(tuple((phases, tuple(found)) for phases, found in taken.items())),
            }
            if chain["group"]:
                written["group"] = chain["group"]
            if chain["undecided"]:
                written["undecided"] = [tests.index(text) for text in chain["undecided"]]
            if chain["seen"]:
                written["seen"] = [runs.index(name) for name in chain["seen"]]
            chains.append(written)
        kernels.append({**{key: kernel[key] for key in KERNEL}, "chains": chains})
    tables = {
        "frames": [list(frame) for frame in frames],
        "uses": [[[list(phases), list(found)] for phases, found in one] for one in uses],
        "tests": list(tests),
        "runs": list(runs),
    }
    head = {key: document[key] for key in ("sources", "model", "platform", "configurations")}
    return {**head, **tables, "kernels": kernels, "not_evaluated": document["not_evaluated"]}


def unpacked(data: Mapping[str, Any]) -> dict[str, Any]:
    """The document of what `packed` made, with what follows from it: `needs` per chain, call sites and ops per kernel.

    Raises: IndexError for an index outside of its table.
    """
    names = [one["name"] for one in data["configurations"]]
    settings = {one["name"]: settings_of(one) for one in data["configurations"]}
    frames = [dict(zip(FRAME, frame, strict=True)) for frame in data["frames"]]
    uses = [{names[at]: phases for phases, found in use for at in found} for use in data["uses"]]
    uses = [{name: use[name] for name in names if name in use} for use in uses]
    texts = [needs(use, settings) for use in uses]
    kernels = []
    for kernel in data["kernels"]:
        chains = [
            {
                "frames": [frames[at] for at in chain["frames"]],
                "op": chain["op"],
                "group": chain.get("group", ""),
                "configurations": uses[chain["uses"]],
                "needs": texts[chain["uses"]],
                "undecided": [data["tests"][at] for at in chain.get("undecided", ())],
                "seen": [data["runs"][at] for at in chain.get("seen", ())],
            }
            for chain in kernel["chains"]
        ]
        kernels.append(_completed(kernel, chains))
    head = {key: data[key] for key in ("sources", "model", "platform", "configurations", "not_evaluated")}
    return {**head, "kernels": kernels}


def completed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document of `merge.merged`, with what follows from it."""
    return unpacked(packed(document))


def _completed(kernel: Mapping[str, Any], chains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sites = {tuple(chain["frames"][0][key] for key in _SITE): None for chain in chains}
    return {
        **{key: kernel[key] for key in KERNEL},
        "call_sites": [dict(zip(_SITE, site, strict=True)) for site in sites],
        "ops": sorted({chain["op"] for chain in chains}),
        "chains": chains,
    }


def settings_of(configuration: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a configuration that may tell it apart, as texts."""
    given = configuration["resolved"] | configuration["server"] | configuration["environment"]
    plain = {name: str(value).lower() for name, value in given.items() if name != "quantization"}
    return plain | {name: str(configuration[name]) for name in ("architecture", "model", "quantization", "gpu")}


def restricted(document: Mapping[str, Any], chosen: Sequence[str], model: str) -> dict[str, Any]:
    """A document with only the chosen configurations and what they take."""
    kept = set(chosen)
    kernels = []
    for kernel in copy.deepcopy(document["kernels"]):
        for chain in kernel["chains"]:
            chain["configurations"] = {name: phases for name, phases in chain["configurations"].items() if name in kept}
        kernel["chains"] = [chain for chain in kernel["chains"] if chain["configurations"]]
        if kernel["chains"]:
            kernels.append(kernel)
    problems = [one for one in document["not_evaluated"] if not kept.isdisjoint(one["configurations"])]
    found = {
        **document,
        "model": model,
        "configurations": [one for one in document["configurations"] if one["name"] in kept],
        "kernels": kernels,
        "not_evaluated": problems,
    }
    return completed(found)


def dumps(document: Mapping[str, Any]) -> str:
    """Kernel traces as JSON: one line for each configuration, frame, set of configurations, test and chain."""
    return laid_out(packed(document), _lines, COMPACT)


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    match path:
        case ():
            return Lines(0, closing=0)
        case ("configurations" | "frames" | "uses" | "tests" | "kernels" | "not_evaluated",):
            return Lines(1, closing=0)
        case ("kernels", "*"):
            return Lines(2, closing=1)
        case ("kernels", "*", "chains"):
            return Lines(3)
    return None


def load(path: Path) -> dict[str, Any]:
    """Reads a trace as it is on disk. Raises OSError, which names the file, if it does not exist or is not JSON."""
    try:
        return json_source.load_object(path, json_source.TRACES)
    except json_source.JsonSourceError as error:
        raise OSError(f"{path}: {error}") from error


def load_traces(path: Path) -> dict[str, Any]:
    """Reads kernel traces and unpacks them.

    Raises: OSError if the file does not exist, does not follow the schema, or has an index outside of its table.
    """
    traces = load(path)
    for problem in schema_problems(traces):
        raise OSError(f"{path}: not kernel traces: {problem}; write them again: python -m tools.kernel_tracing")
    return unpacked(traces)


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    check_writable(path)
    write_text(path, text)


def check_writable(*paths: Path | None) -> None:
    """Raise OSError for files that cannot be written, before the work begins."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise OSError(f"{path}: no directory {path.parent}")
        if path is not None and path.is_dir():
            raise OSError(f"{path}: is a directory, not a file")
