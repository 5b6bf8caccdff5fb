"""What is run: a recorded run again, a model of the list, or any config.json."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import find_root
from flashinfer_trace.dataset.coverage import plain_name
from tools.dry_run.compare import compare, report
from tools.dry_run.device import GPUS
from tools.dry_run.run import Plan
from tools.runtime_tracing import recording
from tools.runtime_tracing.configurations import configurations, models

#: In the form of the list of configurations: models and runs that it lacks; ``set`` names the runs of traces/dry.
SET = Path(__file__).with_name("set.json")
PHASES = ("prefill", "decode", "extend")
#: Files beside a config.json that SGLang reads before it builds a model.
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
        PlanError: there is no such model, or the file cannot be read.
    """
    listed = models() | _further()
    wanted = next((name for name in listed if plain_name(name).startswith(plain_name(model))), model)
    if model in listed or wanted in listed:
        found = listed.get(model) or listed[wanted]
        title, config, layers, beside = found.name, found.config, found.layers, list[Path]()
    elif model.endswith(".json"):
        title = Path(model).resolve().parent.name
        config, layers, beside = _of_file(Path(model))
    else:
        raise PlanError(f"{model}: no model of this name; give a config.json, or one of {', '.join(listed)}")
    words = [title]
    words += [] if gpu == "sm90" else [gpu]
    words += [f"{key}_{value}" for key, value in server.items()]
    name = "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in "-".join(words))[:120]
    return Plan(name, title, config, layers, server, {}, prompts, phases, (), gpu, beside)


def named(plan: Plan, name: str | None, environment: Mapping[str, str]) -> Plan:
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


def _further() -> dict[str, Any]:
    """The models of `SET`."""
    return dict(models(SET))


def compare_all(names: Sequence[str]) -> int:
    """Repeats the recorded runs of those names, or all, one after the other; 1 if a difference is not explained."""
    failed = 0
    known = {path.stem: path for path in sorted((find_root() / "traces" / "runtime").glob("*.json"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PlanError(f"no recorded run {', '.join(unknown)}; there are {', '.join(known)}")
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


def _in_process(arguments: Sequence[str]) -> str:
    """Runs one dry run in a process of its own, and returns the end of its output."""
    command = [sys.executable, "-m", "tools.dry_run", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return "\n".join(f"    {line[:500]}" for line in done.stdout.splitlines()[-30:])


def write_all() -> int:
    """Writes every record of traces/dry again; 1 if a run failed."""
    failed = 0
    root = find_root()
    names: list[str] = json.loads(SET.read_text(encoding="utf-8"))["set"]
    for name in names:
        out = root / "traces" / "dry" / f"{name}.json"
        out.parent.mkdir(exist_ok=True)
        output = _in_process(["--configuration", name, "--out", str(out)])
        print(output.splitlines()[-1] if output else f"{name}: no output", flush=True)
        failed += "recorded after" not in output
    return int(failed > 0)


def of_configuration(name: str) -> Plan:
    """The plan of a listed run.

    Raises:
        PlanError: there is none of this name, or it is for a GPU that cannot be made.
    """
    known = configurations() | configurations(SET)
    if name not in known:
        raise PlanError(f"{name}: no such run; there are {', '.join(known)}")
    one = known[name]
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
