"""models/needs/<model>.json: the Definitions that each op of a model needs, at the default sizes of each family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace import Definition
from flashinfer_trace.dataset.coverage import plain_name
from flashinfer_trace.format.files import Lines, laid_out
from flashinfer_trace.format.json_source import TRACES, load_object
from tools.extract_definitions.models import Model, available, load_model
from tools.extract_definitions.needs import Options, Request
from tools.extract_definitions.plan import Planner
from tools.extract_definitions.traces import usage_of


def documents(root: Path) -> dict[Path, str]:
    """The file of every model under `models/`, from the committed digests."""
    planner = Planner(root, root / "definitions")
    trace = load_object(root / "traces" / "kernel_traces.json", TRACES)
    found = {}
    for name in available(root):
        model = load_model(root, name)
        request = Request(model, usage_of(model.architecture, None), Options())
        found[root / "models" / "needs" / f"{name}.json"] = dumps(_document(planner, request, trace))
    return found


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


def curated(dataset: Iterable[Definition], needs: Iterable[Mapping[str, Any]]) -> list[Definition]:
    """The Definitions of a dataset that no model needs. People write them; extraction does not create them.

    Args:
        dataset: its Definitions.
        needs: the documents of all models (schema/model_needs.schema.json).
    """
    needed = {name for model in needs for op in model["ops"] for names in op["definitions"].values() for name in names}
    return [one for one in dataset if one.name not in needed]


def parallel_sizes(root: Path) -> dict[str, Sizes]:
    """By op_type, what all models under `models/` need at the default sizes."""
    planner = Planner(root, root / "definitions")
    found: dict[str, Sizes] = defaultdict(Sizes)
    for name in available(root):
        model = load_model(root, name)
        for recipe, need in planner.needs(Request(model, usage_of(model.architecture, None), Options())):
            of_type = found[recipe.op_type]
            of_type.tensor.update([] if need.use.tp is None else [need.use.tp])
            of_type.expert.update([] if need.use.ep is None else [need.use.ep])
            of_type.names.add(planner.name_of(need))
    return found


def _document(planner: Planner, request: Request, trace: Mapping[str, Any]) -> dict[str, Any]:
    ops, unsupported = planner.needs_of(request)
    return {
        "$schema": "../../schema/model_needs.schema.json",
        "model": request.model.name,
        "sources": {name: source["version"] for name, source in request.usage.sources.items()},
        "ops": [{"name": op, "definitions": _by_op_type(names)} for op, names in sorted(ops.items())],
        "sizes": _sizes(planner, request),
        "unsupported": [{"name": op, "reason": reason} for op, reason in sorted(unsupported.items())],
        "kernels": _kernels(request.model, trace),
        "kernel_sources": {name: source["version"] for name, source in trace["sources"].items()},
    }


def _sizes(planner: Planner, request: Request) -> list[dict[str, Any]]:
    """The parallel sizes at which the model calls Definitions; for the others, they make no difference."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for _, need in planner.needs(request):
        for namespace, size in (("tp", need.use.tp), ("ep", need.use.ep)):
            if size is not None:
                found[namespace, size].add(planner.name_of(need))
    return [
        {"tag": f"{namespace}:{size}", "definitions": sorted(names)}
        for (namespace, size), names in sorted(found.items())
    ]


def _kernels(model: Model, trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All kernels that the code calls in the listed configurations, each with its ops.

    The configurations are those of the model, or of the one with the same config (`same_as`); if the list has none,
    those of its architecture.
    """
    listed, models = trace["configurations"], {plain_name(model.name), plain_name(model.same_as)}
    own = {n for n, one in enumerate(listed) if plain_name(one["model"]) in models}
    own = own or {n for n, one in enumerate(listed) if one["architecture"] == model.architecture}
    ops: dict[str, set[str]] = defaultdict(set)
    for kernel in trace["kernels"]:
        for chain in kernel["chains"]:
            if any(own.intersection(numbers) for _, numbers in trace["uses"][chain["uses"]]):
                ops[f"{kernel['source']}:{kernel['name']}"].add(chain["op"])
    return [{"kernel": kernel, "ops": sorted(names)} for kernel, names in sorted(ops.items())]


def _by_op_type(names: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, op_type in sorted(names.items(), key=lambda item: (item[1], item[0])):
        found.setdefault(op_type, []).append(name)
    return found


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
