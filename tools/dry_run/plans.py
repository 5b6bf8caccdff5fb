"""What is run: a recorded run again, a model of the list, or any config.json."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashinfer_trace import find_root
from flashinfer_trace.dataset.coverage import plain_name
from tools.dry_run.compare import changes, compare, report
from tools.dry_run.device import GPUS
from tools.dry_run.run import Plan
from tools.runtime_tracing import recording
from tools.runtime_tracing.configurations import SET, ConfigurationError, listed, models, named

PHASES = ("prefill", "decode", "extend")
#: Files next to a config.json that SGLang reads before it builds a model.
BESIDE = ("hf_quant_config.json", "generation_config.json", "quantize_config.json")
#: Fields of a configuration that hold the one of the language model.
_TEXT = ("text_config", "llm_config", "language_config")


class PlanError(ValueError):
    """Nothing can be run. The message names what is wrong, and the fix."""


def of_record(path: Path) -> tuple[Plan, str]:
    """The plan of a recorded run, and its release of SGLang."""
    document = recording.read(path).document
    phases = {call[0] for call in document["calls"]}
    plan = Plan(
        name=document["configuration"],
        model=document["model"],
        config=document["model_config"],
        layers=tuple(document["layers"]),
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
) -> Plan:
    """The plan of a model of the list, or of a config.json.

    Raises:
        PlanError: the model is unknown, or the file cannot be read.
    """
    known = models(SET)
    wanted = next((name for name in known if plain_name(name).startswith(plain_name(model))), model)
    if model in known or wanted in known:
        found = known.get(model) or known[wanted]
        title, config, layers, beside = found.name, found.config, found.layers, list[Path]()
    elif model.endswith(".json"):
        title = Path(model).resolve().parent.name
        config, layers, beside = _of_file(Path(model))
    else:
        raise PlanError(f"{model}: no model of this name; give a config.json, or one of {', '.join(known)}")
    words = [title]
    words += [] if gpu == "sm90" else [gpu]
    words += [f"{key}_{value}" for key, value in server.items()]
    name = "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in "-".join(words))[:120]
    return Plan(name, title, config, layers, server, {}, prompts, phases, (), gpu, beside)


def renamed(plan: Plan, name: str | None, environment: Mapping[str, str]) -> Plan:
    """The plan under another name, with environment variables."""
    return dataclasses.replace(plan, name=name or plan.name, environment=environment)


def _of_file(path: Path) -> tuple[dict[str, Any], tuple[int, ...], list[Path]]:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("architectures"), list):
            raise ValueError("it names no architectures")
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not the config.json of a model: {error}") from None
    text = next((config[name] for name in _TEXT if isinstance(config.get(name), dict)), config)
    count = text.get("num_hidden_layers", 1)
    return config, (1,) * int(count), [path.with_name(name) for name in BESIDE if path.with_name(name).exists()]


def recorded_runs() -> dict[str, Path]:
    """Name -> file of each run that was recorded on a GPU; one of a folder has the folder, a release, before it."""
    folder = find_root() / "traces" / "runtime"
    paths = sorted(folder.rglob("*.json"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def compare_all(names: Sequence[str]) -> int:
    """Repeats recorded runs, one after the other; 1 if a difference is not explained.

    Args:
        names: of recorded runs, or files; all recorded runs if there are none.

    Raises:
        PlanError: a run does not exist.
    """
    failed = 0
    known = recorded_runs()
    unknown = [name for name in names if name not in known and not name.endswith(".json")]
    if unknown:
        raise PlanError(f"no recorded run {', '.join(unknown)}; there are {', '.join(known)}")
    known |= {name: Path(name) for name in names if name.endswith(".json")}
    for name in names or known:
        with tempfile.TemporaryDirectory(prefix="dry-run-") as directory:
            out = Path(directory, "record.json")
            output = _in_process(["--repeat", str(known[name]), "--out", str(out)])
            if not out.exists():
                print(f"{name}: failed\n{output}", flush=True)
                failed += 1
                continue
            comparison = compare(recording.read(known[name]), recording.read(out).calls)
        print("\n".join(report(comparison)), flush=True)
        failed += bool(comparison.unexplained)
    return int(failed > 0)


def _in_process(arguments: Sequence[str], wanted: str = "") -> str:
    """Runs one dry run in a process of its own, and returns the line with a text, or the end of its output."""
    command = [sys.executable, "-m", "tools.dry_run", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = done.stdout.splitlines()
    found = next((line for line in lines if wanted and wanted in line), None)
    return found if found is not None else "\n".join(f"    {line[:500]}" for line in lines[-30:])


def run_all(write: bool, version: str, jobs: int) -> int:
    """Runs every run of the set, several at a time; 1 if one failed, or differs from its record.

    Args:
        write: replaces the records of traces/dry; otherwise they are compared with what a release calls.
    """
    folder = find_root() / "traces" / "dry"
    with tempfile.TemporaryDirectory(prefix="dry-run-") as directory, ThreadPoolExecutor(jobs) as pool:
        out = folder if write else Path(directory)
        out.mkdir(exist_ok=True)

        def one(name: str) -> tuple[str, str]:
            path = out / f"{name}.json"
            given = ["--configuration", name, "--release", version, "--out", str(path)]
            return name, _in_process(given, "recorded after")

        failed = 0
        for name, output in pool.map(one, named("set")):
            ran = "recorded after" in output
            lines = [] if write or not ran else changes(*(recording.read(at / f"{name}.json") for at in (folder, out)))
            print("\n".join([output if ran else f"{name}: failed\n{output}", *lines]), flush=True)
            failed += bool(lines) or not ran
    return int(failed > 0)


def of_configuration(name: str) -> Plan:
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
    return Plan(
        name=name,
        model=one.model.name,
        config=one.model.config,
        layers=one.model.layers,
        server=one.server,
        environment=one.environment,
        prompts=one.prompts,
        phases=one.phases,
        gpu=one.gpu,
    )
