"""models/needs/<model>.json: the Definitions that a model is claimed to need, and the kernels that its code calls.

Which Definitions an op needs, and at which parallel sizes, are claims: they are kept, with what the model's own runs
call, and tests compare them with the constants of the model. The kernels, and the ops that no Definition describes,
follow from the newest runs of the model, on a GPU or dry, or, if there are none, from those of its architecture.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace import Definition, definitions
from flashinfer_trace.dataset.coverage import definitions_by_kernel, plain_name
from flashinfer_trace.dataset.store import DatasetError
from flashinfer_trace.format.files import Lines, laid_out
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.kernels.stacks import TODAY
from tools.extract.matched import Dataset, State, rows_of
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.model_calls import models_of
from tools.runtime_tracing.recording import Recording
from tools.trace.calls import TORCH, keys_of, traced
from tools.trace.records import committed, of_release

#: Why no Definition describes the calls of an op.
REASONS = {False: "no family covers it", True: "its Definitions have other sizes or settings"}

#: Fields of a configuration that no parallel size divides.
WHOLE = (
    *("hidden_size", "vocab_size", "head_dim", "n_routed_experts", "num_experts", "num_local_experts"),
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "n_group", "topk_group", "index_topk"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_n_heads", "linear_key_head_dim"),
)


@dataclass
class Sizes:
    """The sizes and Definitions that the models need from one op_type.

    Attributes:
        tensor: tensor-parallel sizes.
        expert: expert-parallel sizes.
        names: the Definitions.
    """

    tensor: set[int] = field(default_factory=set)
    expert: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def documents(root: Path) -> dict[Path, str]:
    """The file of every model under `models/`: what it is claimed to need, and what its own runs of today call.

    Raises:
        DatasetError: a file cannot be read.
        RecordingError: a recorded run cannot be read.
    """
    models = {
        path.stem: load_object(path) for path in sorted((root / "models").glob("*.json"), key=lambda one: one.stem)
    }
    if not models:
        return {}
    runs = committed(root)
    dataset = Dataset(root, list(definitions(root=root)))
    known = definitions_by_kernel(root, dataset.definitions.values())
    found = {}
    for name in models:
        path = root / "models" / "needs" / f"{name}.json"
        try:
            own = runs_of(name, models, runs)
            own = of_release(own, None) if own else []
            claimed = load_object(path) if path.exists() else {"ops": [], "sizes": []}
            called = [
                run for run in own if name in models_of(run, models) and _versions([run])["sglang"] == TODAY["sglang"]
            ]
            document = {
                "$schema": "../../schema/model_needs.schema.json",
                "model": name,
                "ops": _ops(claimed["ops"], called, dataset),
                "sizes": _sizes(claimed["sizes"], called, models[name]["config"], dataset),
                "unsupported": _unsupported(own, dataset),
                "kernels": _kernels(own, known),
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


def _ops(claimed: Iterable[Mapping[str, Any]], runs: Sequence[Recording], dataset: Dataset) -> list[dict[str, Any]]:
    """The claimed ops, and those of runs, each with the Definitions that its calls have: of each, a single one."""
    ops: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for op in claimed:
        for op_type, names in op["definitions"].items():
            ops[op["name"]][op_type].update(names)
    for op_name, definition in (pair for run in runs for pair in _called(run, dataset)):
        ops[op_name][definition.op_type].add(definition.name)
    return [
        {"name": op, "definitions": {op_type: sorted(names) for op_type, names in sorted(found.items())}}
        for op, found in sorted(ops.items())
    ]


def _sizes(
    claimed: Iterable[Mapping[str, Any]], runs: Sequence[Recording], config: Mapping[str, Any], dataset: Dataset
) -> list[dict[str, Any]]:
    """The claimed parallel sizes, and those of runs: of the Definitions that are not the same at every size."""
    sizes: dict[str, set[str]] = defaultdict(set)
    for size in claimed:
        sizes[size["tag"]].update(size["definitions"])
    whole = {value for field in WHOLE if isinstance(value := config.get(field), int)} | {1}
    whole |= {size + 1 for size in whole} | {64, 128}  # with a shared expert; sizes of pages and groups
    for run in runs:
        for key, namespace in (("tp_size", "tp"), ("ep_size", "ep")):
            number = int(run.document["server"].get(key, 1))
            divided = {one.name for _, one in _called(run, dataset) if not whole.issuperset(one.const_axes.values())}
            if number > 1 or namespace == "tp":
                sizes[f"{namespace}:{number}"].update(divided)
    order = sorted(sizes, key=lambda tag: (tag[0] != "t", int(tag.partition(":")[2])))
    return [{"tag": tag, "definitions": sorted(sizes[tag])} for tag in order if sizes[tag]]


def _called(run: Recording, dataset: Dataset) -> Iterator[tuple[str, Definition]]:
    """Op and Definition of each call of a run that a single Definition describes."""
    for row in rows_of([run], dataset, ("prefill", "decode")):
        if row.state in (State.VERIFIED, State.EXISTS) and len(row.definitions) == 1:
            yield row.op, dataset.definitions[row.definitions[0]]


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


def _kernels(runs: Iterable[Recording], known: Container[str]) -> list[dict[str, Any]]:
    """All kernels that the runs call, each with its ops: by the name under which Definitions have it, if one has it."""
    ops: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for call in traced(run):
            if call.kernel.source != TORCH:
                own = f"{call.kernel.source}:{call.kernel.name}"
                keys = keys_of({**dataclasses.asdict(call.kernel), "through": call.recorded.through})
                known_as = own if keys[0] in known else next((key for key in keys if key in known), own)
                ops[known_as].add(call.op)
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
