"""models/needs/<model>.json: the Definitions that a model is claimed to need, and the kernels that its code calls.

Which Definitions an op needs, and at which parallel sizes, are claims: they are kept, and tests compare them with the
constants of the model and with its recorded runs. The kernels, and the ops that no Definition describes, follow from
the runs of the model or, if there are none, from those of its architecture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace import Definition, definitions
from flashinfer_trace.dataset.coverage import plain_name
from flashinfer_trace.dataset.store import DatasetError
from flashinfer_trace.format.files import Lines, laid_out
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from tools.extract.matched import Dataset, State, rows_of
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.model_calls import models_of
from tools.runtime_tracing.recording import Recording, read_all
from tools.trace.calls import TORCH, traced
from tools.trace.records import of_release

#: What the dataset says of the calls of an op that no Definition describes.
REASONS = {False: "no family covers it", True: "its Definitions have other sizes or settings"}


@dataclass
class Sizes:
    """What the models need from one op_type.

    Attributes:
        tensor: tensor-parallel sizes.
        expert: expert-parallel sizes.
        names: the Definitions.
    """

    tensor: set[int] = field(default_factory=set)
    expert: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def documents(root: Path) -> dict[Path, str]:
    """The file of every model under `models/`; a model that has none is claimed to need what its own runs call.

    Raises:
        DatasetError: a file cannot be read.
        RecordingError: a recorded run cannot be read.
    """
    models = {
        path.stem: load_object(path) for path in sorted((root / "models").glob("*.json"), key=lambda one: one.stem)
    }
    if not models:
        return {}
    runs = read_all(root / "traces" / "runtime")
    dataset = Dataset(root, list(definitions(root=root)))
    found = {}
    for name in models:
        path = root / "models" / "needs" / f"{name}.json"
        try:
            own = runs_of(name, models, runs)
            own = of_release(own, None) if own else []
            claimed = load_object(path) if path.exists() else {"ops": _called(name, models, own, dataset), "sizes": []}
            document = {
                "$schema": "../../schema/model_needs.schema.json",
                "model": name,
                "ops": claimed["ops"],
                "sizes": claimed["sizes"],
                "unsupported": _unsupported(own, dataset),
                "kernels": _kernels(own),
                "kernel_sources": _versions(own),
            }
        except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{path}: {error!r}; restore it from version control") from None
        found[path] = dumps(document)
    return found


def runs_of(name: str, models: Mapping[str, Mapping[str, Any]], runs: Sequence[Recording]) -> list[Recording]:
    """The runs of a model, or of one with the same constants; if there are none, those of its architecture."""
    same = {plain_name(name), plain_name(str(models[name].get("same_as", name)))}
    own = [run for run in runs if plain_name(str(run.document["model"])) in same or name in models_of(run, models)]
    architecture = models[name]["config"]["architectures"]
    return own or [run for run in runs if run.document["model_config"]["architectures"] == architecture]


def curated(dataset: Iterable[Definition], needs: Iterable[Mapping[str, Any]]) -> list[Definition]:
    """The Definitions of a dataset that no model needs. People write them; extraction does not create them.

    Args:
        dataset: its Definitions.
        needs: the documents of all models (schema/model_needs.schema.json).
    """
    needed = {name for model in needs for op in model["ops"] for names in op["definitions"].values() for name in names}
    return [one for one in dataset if one.name not in needed]


def parallel_sizes(needs: Iterable[Mapping[str, Any]]) -> dict[str, Sizes]:
    """By op_type, what models need.

    Args:
        needs: the documents of all models.
    """
    found: dict[str, Sizes] = defaultdict(Sizes)
    for model in needs:
        types: dict[str, str] = {}
        for op in model["ops"]:
            for op_type, names in op["definitions"].items():
                found[op_type].names.update(names)
                types |= dict.fromkeys(names, op_type)
        for size in model["sizes"]:
            namespace, _, number = size["tag"].partition(":")
            for name in size["definitions"]:
                of_type = found[types[name]]
                (of_type.tensor if namespace == "tp" else of_type.expert).add(int(number))
    return found


def _called(
    name: str, models: Mapping[str, Mapping[str, Any]], runs: Iterable[Recording], dataset: Dataset
) -> list[dict[str, Any]]:
    """Ops of a model, each with the Definitions that its runs call: those of calls that a single one describes."""
    own = [run for run in runs if name in models_of(run, models)]
    ops: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows_of(own, dataset, ("prefill", "decode")):
        if row.state in (State.VERIFIED, State.EXISTS) and len(row.definitions) == 1:
            definition = dataset.definitions[row.definitions[0]]
            ops[row.op][definition.op_type].add(definition.name)
    return [
        {"name": op, "definitions": {op_type: sorted(names) for op_type, names in sorted(found.items())}}
        for op, found in sorted(ops.items())
    ]


def _unsupported(runs: Iterable[Recording], dataset: Dataset) -> list[dict[str, str]]:
    """The ops of the forward pass and the sampler whose calls no Definition describes, each with its kernels."""
    described: set[str] = set()
    kernels: dict[str, set[str]] = defaultdict(set)
    other: dict[str, bool] = defaultdict(bool)
    for run in runs:
        window = run.document["model_config"].get("sliding_window")
        for call in traced(Recording(run.document, tuple(composed(run.calls)))):
            if call.group and (call.group != "sampling" or call.kernel.source == TORCH):
                continue
            state, *_, detail = dataset.of(call.recorded, window)
            if state in (State.NO_FAMILY, State.PYTORCH):
                kernels[call.op].add(
                    TORCH if call.kernel.source == TORCH else f"{call.kernel.source}:{call.kernel.name}"
                )
                other[call.op] |= detail.startswith("other sizes")
            else:
                described.add(call.op)
    return [
        {"name": op, "reason": f"{REASONS[other[op]]}: {', '.join(sorted(names))}"}
        for op, names in sorted(kernels.items())
        if op not in described
    ]


def _kernels(runs: Iterable[Recording]) -> list[dict[str, Any]]:
    """All kernels that the runs call, each with its ops."""
    ops: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for call in traced(run):
            if call.kernel.source != TORCH:
                ops[f"{call.kernel.source}:{call.kernel.name}"].add(call.op)
    return [{"kernel": kernel, "ops": sorted(names)} for kernel, names in sorted(ops.items())]


def _versions(runs: Sequence[Recording]) -> dict[str, str]:
    return {name: version for run in runs[:1] for name, version in run.document["versions"].items() if name != "gpu"}


def dumps(document: dict[str, Any]) -> str:
    """The document as JSON, one line per op."""
    return laid_out(document, _lines)


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    match path:
        case ():
            return Lines(2, closing=0)
        case ("ops",) | ("sizes",) | ("unsupported",) | ("kernels",):
            return Lines(4, closing=2)
    return None
