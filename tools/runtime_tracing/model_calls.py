"""models/recorded/: the recorded runs of each model that call a Definition. Its `model:` tags follow from them.

A run has few layers and the real sizes of its model, or of one rank of it. Its calls count even if the
Definition lacks evidence. The kernels of a Definition are those of its family's record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace import Definition
from flashinfer_trace.dataset.coverage import plain_name
from flashinfer_trace.dataset.evidence import kernels_today
from flashinfer_trace.dataset.model_claims import recorded_path
from flashinfer_trace.format.files import json_text
from flashinfer_trace.format.json_source import load_object
from tools.runtime_tracing.attention_calls import merges_parts
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.expert_calls import sums_rows
from tools.runtime_tracing.matching import Evidence
from tools.runtime_tracing.recording import RecordedCall, Recording

#: Constants of a model in which its runs may differ: which layers there are, and the class that runs it. The format of
#: the weights is compared apart.
OTHERWISE = {
    *("architectures", "first_k_dense_replace", "layer_types", "quantization_config"),
    *("compress_ratios", "hybrid_override_pattern", "linear_attn_config", "moe_layer_freq"),
    "sparse_attention_config",
}


def documents(root: Path, runs: Iterable[Recording], dataset: Iterable[Definition]) -> dict[Path, str]:
    """The path of each file and its text; nothing for a root without models.

    Args:
        root: the dataset root.
        runs: the recorded runs, which `consistency.consistent` has accepted.
        dataset: the Definitions of the root.
    """
    models = {path.stem: load_object(path) for path in sorted((root / "models").glob("*.json"))}
    if not models:
        return {}
    every = list(dataset)
    known = Evidence(every, {one.name: [kernel.path for kernel in kernels_today(root, one).values()] for one in every})
    found: dict[str, dict[tuple[str, ...], set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        if names := models_of(run, models):
            for definition in called(run, known):
                found[definition][names].add(run.name)
    return {recorded_path(root, name): _text(name, runs_of) for name, runs_of in sorted(found.items())}


def _text(definition: str, runs_of: Mapping[tuple[str, ...], set[str]]) -> str:
    recorded = [{"models": models, "runs": sorted(runs)} for models, runs in sorted(runs_of.items())]
    return json_text(
        {"$schema": "../../schema/recorded_calls.schema.json", "definition": definition, "recorded": recorded}
    )


def models_of(run: Recording, models: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The models that a run is one of: the one that it names, and those with the same constants.

    None if models/ has no such model, or if the run does not have its sizes, or weights of a published format.

    Args:
        run: the recorded run.
        models: model -> its file.
    """
    whole = run.document["model_config"]
    config = {**whole, **whole.get("text_config", {})}
    for name, model in models.items():
        if plain_name(name) == plain_name(run.document["model"]):
            own = model["config"]
            published = {_format(one) for one in (own, *model.get("quantized", ()))}
            given = run.document["server"].get("quantization", _format(config))
            if given not in published:
                return ()
            if any(config.get(field) != value for field, value in own.items() if field not in OTHERWISE):
                return ()
            return tuple(sorted(other for other, theirs in models.items() if theirs["config"] == own))
    return ()


def _format(config: Mapping[str, Any]) -> str:
    """How weights are quantized; "" if they are not."""
    return str((config.get("quantization_config") or {}).get("quant_method", ""))


def called(run: Recording, known: Evidence) -> set[str]:
    """The Definitions that a run calls: of each call, the one that it computes, if that is a single one.

    Launches that only merge or sum what another launch computed count for none: their outputs alone tell them.

    Args:
        run: the recorded run.
        known: the kernels of each Definition.
    """
    window = run.document["model_config"].get("sliding_window")
    found = (known.of(call, window)[1] for call in composed(run.calls) if call.launches and not _is_rest(call))
    return {names[0] for names in found if len(names) == 1}


def _is_rest(call: RecordedCall) -> bool:
    return merges_parts(call) or sums_rows(call)
