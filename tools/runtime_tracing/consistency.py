"""Facts that a recorded run says twice: settings, versions, counts and times must agree with each other and with the
list.

A recording is measured, so it cannot be computed again. Its digest (`recording.read`) shows that it was edited;
these rules refuse one whose digest was written again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.format import json_source
from flashinfer_trace.kernels.stacks import BEFORE, TODAY
from tools.runtime_tracing.configurations import SET, configurations
from tools.runtime_tracing.recording import RecordedCall, RecordedLaunch, Recording, RecordingError, read_all

#: Microseconds that no launch on a GPU is shorter than; the shortest one recorded takes 0.6.
SHORTEST = 0.2
#: How many times as long as in one layer a launch of the same sizes takes in another, at most; recorded: up to 1.7.
VARIATION = 5.0
#: Library of a call -> how the paths of its functions begin. Triton kernels and functions of torch have any path.
PATHS: Mapping[str, str | tuple[str, ...]] = {
    "deep_gemm": "deep_gemm.",
    "flashinfer": "flashinfer.",
    "jit": ("sglang.jit_kernel.", "sglang.kernels."),
    "sgl_kernel": "sgl_kernel.",
    "torch.ops": "torch.ops.",
}


def consistent(directory: Path, root: Path) -> list[Recording]:
    """Every recorded run of a directory, by name (see `recording.read_all`).

    Raises:
        RecordingError: one cannot be read, or contradicts itself or the list of configurations.
        ConfigurationError, JsonSourceError: see `contradictions`.
    """
    runs = read_all(directory)
    for run in runs:
        if (found := next(contradictions(run, root), None)) is not None:
            fix = f"record it again: python -m tools.runtime_tracing --configuration {run.name}"
            raise RecordingError(f"{directory / run.name}.json: {found}; {fix}")
    return runs


def contradictions(run: Recording, root: Path) -> Iterator[str]:
    """Place and text of what a recorded run contradicts; nothing if it agrees.

    Args:
        run: the recording.
        root: the dataset root, for the pinned packages and the known GPUs.

    Raises:
        ConfigurationError, JsonSourceError: a file that it is compared with is unusable.
    """
    yield from _settings(run)
    yield from _versions(run.document["versions"], root)
    for index, call in enumerate(run.calls):
        yield from (f"calls[{index}]: {text}" for text in _call(call))


def _settings(run: Recording) -> Iterator[str]:
    document = run.document
    known = configurations() | (configurations(SET) if _of_today(document["versions"]) else {})
    if (listed := known.get(run.name)) is not None:
        expected = {
            "model": listed.model.name,
            "model_config": dict(listed.model.config),
            "layers": list(listed.model.layers),
            "server": dict(listed.server),
            "environment": dict(listed.environment),
            "prompts": list(listed.prompts),
            "gpus": listed.gpus,
            "stand_ins": list(listed.stand_ins),
        }
        for name in (name for name, value in expected.items() if document[name] != value):
            yield f"{name}: configurations.json has another one for {run.name}"
    for name, value in document["server"].items():
        if (resolved := document["resolved"].get(name, value)) != value:
            yield f"resolved.{name}: {resolved!r}, but server has {value!r}"


def _of_today(versions: Mapping[str, str]) -> bool:
    return versions.get("sglang") == TODAY["sglang"]


def _versions(versions: Mapping[str, str], root: Path) -> Iterator[str]:
    for name, pinned in (TODAY if _of_today(versions) else BEFORE).items():
        if versions.get(name, pinned) != pinned:
            yield f"versions.{name}: {versions[name]}, but the recorded runs are of {pinned}"
    gpus: dict[str, Any] = json_source.load_object(root / "schema" / "gpus.json")["gpus"]
    if (gpu := versions.get("gpu")) not in {name for one in gpus.values() for name in one["names"]}:
        yield f"versions.gpu: schema/gpus.json has no {gpu}"


def _call(call: RecordedCall) -> Iterator[str]:
    """The contradictions in the figures of one call. Launches that no call was seen to make have no kernel."""
    if not call.kernel.startswith(PATHS.get(call.library, "")):
        yield f"{call.kernel} is not a function of {call.library}"
    by_name: dict[str, list[RecordedLaunch]] = defaultdict(list)
    for one in call.launches:
        by_name[one.cuda_kernel].append(one)
        if one.count < 1 or one.microseconds < SHORTEST * one.count:
            yield f"{one.cuda_kernel} ran {one.count} times in {one.microseconds} microseconds"
    if not call.kernel:
        return
    for name, launches in by_name.items():
        total = sum(one.count for one in launches)
        if call.count < 1 or total % call.count:
            yield f"{call.count} calls launch {name} {total} times: calls of the same arguments launch the same"
        of_layers = [one for one in launches if one.layer is not None]
        if len({one.layer for one in of_layers}) < len(of_layers):
            continue  # several kernels whose names are cut alike
        if len({one.count for one in of_layers}) > 1:
            yield f"{name} ran {' and '.join(str(one.count) for one in of_layers)} times in layers that are alike"
        means = [one.microseconds / max(one.count, 1) for one in of_layers if not one.communicates]
        if means and max(means) > VARIATION * min(means):
            yield f"{name} took {max(means):.2f} microseconds in one layer, and {min(means):.2f} in another"
