"""The plan of a run: a recorded run again, a model of the list, or any config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import find_root
from flashinfer_trace.dataset.coverage import plain_name
from tools.dry_run.compare import changes, compare, report
from tools.dry_run.device import GPUS
from tools.dry_run.many import Outcome, run_many
from tools.runtime_tracing import recording
from tools.runtime_tracing.configurations import (
    SET,
    Configuration,
    ConfigurationError,
    Model,
    listed,
    models,
    named,
)

_RECORDS = find_root() / "traces" / "dry"
PHASES = ("prefill", "decode", "extend")
#: Files next to a config.json that SGLang reads before it builds a model.
BESIDE = ("hf_quant_config.json", "generation_config.json", "quantize_config.json")
#: Fields of a configuration that hold the one of the language model.
_TEXT = ("text_config", "llm_config", "language_config")


class PlanError(ValueError):
    """Nothing can be run. The message names what is wrong, and the fix."""


def of_record(path: Path) -> tuple[Configuration, str]:
    """The plan of a recorded run, and its release of SGLang."""
    document = recording.read(path).document
    phases = {call[0] for call in document["calls"]}
    plan = Configuration(
        name=document["configuration"],
        model=Model(document["model"], document["model_config"], tuple(document["layers"])),
        server=document["server"],
        environment=document["environment"],
        prompts=tuple(document["prompts"]),
        phases=tuple(phase for phase in PHASES if phase in phases),
        stand_ins=tuple(document["stand_ins"]),
        gpu="h200" if "H200" in document["versions"]["gpu"] else "sm90",
    )
    return plan, str(document["versions"]["sglang"])


def of_model(
    model: str, server: Mapping[str, Any], gpu: str, phases: tuple[str, ...], prompts: tuple[int, ...]
) -> Configuration:
    """The plan of a model of the list, or of a config.json.

    Raises:
        PlanError: the model is unknown, or the file cannot be read.
    """
    known = models(SET)
    wanted = next((name for name in known if plain_name(name).startswith(plain_name(model))), model)
    if model in known or wanted in known:
        found = known.get(model) or known[wanted]
    elif model.endswith(".json"):
        found = _of_file(Path(model))
    else:
        raise PlanError(f"{model}: no model of this name; give a config.json, or one of {', '.join(known)}")
    words = [found.name]
    words += [] if gpu == "sm90" else [gpu]
    words += [f"{key}_{value}" for key, value in server.items()]
    name = "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in "-".join(words))[:120]
    return Configuration(name, found, server, gpu=gpu, prompts=prompts, phases=phases)


def renamed(plan: Configuration, name: str | None, environment: Mapping[str, str]) -> Configuration:
    """The plan under another name, with environment variables."""
    return dataclasses.replace(plan, name=name or plan.name, environment=environment)


def _of_file(path: Path) -> Model:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("architectures"), list):
            raise ValueError("it names no architectures")
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not the config.json of a model: {error}") from None
    text = next((config[name] for name in _TEXT if isinstance(config.get(name), dict)), config)
    count = text.get("num_hidden_layers", 1)
    beside = [path.with_name(name).resolve() for name in BESIDE if path.with_name(name).exists()]
    return Model(path.resolve().parent.name, config, (1,) * int(count), beside=beside)


def recorded_runs() -> dict[str, Path]:
    """Name -> file of each run that was recorded on a GPU; one of a folder has the folder, a release, before it."""
    folder = find_root() / "traces" / "runtime"
    paths = sorted(folder.rglob("*.json"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def compare_all(names: Sequence[str], jobs: int) -> int:
    """Repeats recorded runs; 1 if a difference is not explained, or a run failed or was too large.

    Args:
        names: of recorded runs, or files; all recorded runs if there are none.
        jobs: runs at a time.

    Raises:
        PlanError: a run does not exist.
    """
    known = recorded_runs()
    unknown = [name for name in names if name not in known and not name.endswith(".json")]
    if unknown:
        raise PlanError(f"no recorded run {', '.join(unknown)}; there are {', '.join(known)}")
    known |= {name: Path(name) for name in names if name.endswith(".json")}
    failed = 0
    for outcome in run_many({name: of_record(known[name]) for name in names or known}, jobs):
        found = compare(recording.read(known[outcome.name]), outcome.record.calls) if outcome.record else None
        print("\n".join([outcome.line, *(report(found) if found else [])]), flush=True)
        failed += not outcome.fits or found is None or bool(found.unexplained)
    return int(failed > 0)


def run_all(write: bool, version: str, jobs: int) -> int:
    """Runs every run of the set; 1 if one failed or was too large, or differs from its record.

    Args:
        write: replaces the records of traces/dry; otherwise they are compared with what a release calls.
        jobs: runs at a time.
    """
    failed = 0
    for outcome, lines in of_the_set(version, jobs):
        if write and outcome.record:
            (_RECORDS / f"{outcome.name}.json").write_bytes(outcome.content)
            lines = []
        print("\n".join([outcome.line, *lines]), flush=True)
        failed += not outcome.fits or outcome.record is None or bool(lines)
    return int(failed > 0)


def of_the_set(version: str, jobs: int) -> Iterator[tuple[Outcome, list[str]]]:
    """The outcome of every run of the set with a release, and its other calls than those of its record, a line each."""
    for outcome in run_many({name: (of_configuration(name), version) for name in named("set")}, jobs):
        path = _RECORDS / f"{outcome.name}.json"
        yield outcome, changes(recording.read(path), outcome.record) if outcome.record and path.exists() else []


def of_configuration(name: str) -> Configuration:
    """The plan of a listed run.

    Raises:
        PlanError: there is none of this name, or it is for a GPU that cannot be made.
    """
    try:
        one = listed(name)
    except ConfigurationError as error:
        raise PlanError(str(error)) from None
    if one.gpu not in GPUS:
        raise PlanError(f"{name}: for {one.gpu}; dry runs know {', '.join(GPUS)}")
    return one
