"""The trace: the chains of all configurations, merged, each with the configurations that take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.kernel_tracing.configuration.listed import Configuration
from tools.kernel_tracing.report.evaluation import Call, Evaluation, Frame
from tools.kernel_tracing.rules.categories import categorise
from tools.kernel_tracing.source.sources import SourceTree

#: In this order, chains of one configuration are shown.
PHASES = ("prefill", "decode", "extend", "min_p", "load")
#: The platform whose machine `rules/environments.py` describes.
PLATFORM = "cuda"
Key = tuple[str, str, str, int]


@dataclass
class _Chain:
    """A chain, and where it is taken: configuration -> phases."""

    call: Call
    uses: dict[str, list[str]] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()


def merged(evaluations: Sequence[Evaluation], sources: SourceTree, platform: str, model: str) -> dict[str, Any]:
    """The document of a trace (see `trace_files` for its form on disk).

    A kernel's chains are in the order of the configurations: those of the first, in execution order, come first. Of
    one configuration, chains that it decides come before those that depend on tests that it leaves open.
    """
    kernels: dict[Key, dict[tuple[Frame, ...], _Chain]] = {}
    for one in evaluations:
        for call in sorted(one.kernels, key=lambda call: (bool(call.undecided), PHASES.index(call.phase))):
            chains = kernels.setdefault((call.name, call.source, call.file, call.line), {})
            chain = chains.setdefault(call.frames, _Chain(call, undecided=call.undecided))
            chain.uses.setdefault(one.configuration.name, []).append(call.phase)
            chain.undecided = min(chain.undecided, call.undecided, key=len)
    return {
        "sources": sources.describe(),
        "model": model,
        "platform": platform,
        "configurations": [described(one.configuration, one.resolved) for one in evaluations],
        "kernels": [_kernel(key, kernels[key].values()) for key in sorted(kernels)],
        "not_evaluated": _problems(evaluations),
    }


def described(one: Configuration, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a trace has it; `resolved` are the fields of ServerArgs that SGLang computes."""
    return {
        "name": one.name,
        "model": one.model.name,
        "architecture": one.model.config["architectures"][0],
        "quantization": one.quantization,
        "gpu": one.gpu,
        "server": dict(one.server),
        "environment": dict(one.environment),
        "resolved": dict(resolved),
        "recorded": one.recorded,
    }


def _kernel(key: Key, chains: Iterable[_Chain]) -> dict[str, Any]:
    name, source, file, line = key
    written = [_written(chain) for chain in chains]
    return {
        "name": name,
        "source": source,
        "category": categorise(name),
        "definition": {"file": file, "line": line},
        "chains": written,
    }


def _written(chain: _Chain) -> dict[str, Any]:
    call = chain.call
    found: dict[str, Any] = {
        "frames": [frame._asdict() for frame in call.frames],
        "op": call.op,
        "group": call.group,
        "configurations": {name: sorted(phases, key=PHASES.index) for name, phases in chain.uses.items()},
        "undecided": list(chain.undecided),
        "seen": [],
    }
    return found


def _problems(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """What could not be evaluated, each once, with the configurations in which it was met."""
    found: dict[str, list[str]] = {}
    for one in evaluations:
        for text in one.problems:
            found.setdefault(text, []).append(one.configuration.name)
    return [{"text": text, "configurations": names} for text, names in sorted(found.items())]
