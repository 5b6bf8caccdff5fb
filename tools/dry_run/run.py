"""One dry run in this process, which must be a fresh one: from a configuration to a record."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.dry_run import findings
from tools.dry_run import install as installing
from tools.dry_run.release import Release
from tools.runtime_tracing import recording, serving, sglang_runner, speculation, stand_ins, timeline
from tools.runtime_tracing.call_log import CallLog
from tools.runtime_tracing.wrapping import Wrapping, torch_functions

#: Folders, in a site, whose packages are found without their own name.
_INNER = ("nvidia_cutlass_dsl/python_packages", "nvidia_cutlass_dsl/dsl_packages")


@dataclass(frozen=True)
class Plan:
    """A dry run to make.

    Attributes:
        name: of the configuration, and of the record.
        model: the model's name.
        config: the content of its config.json.
        layers: for each decoder layer that runs, how many of the whole model are like it.
        server: SGLang's server arguments that differ from `sglang_runner.SERVER`.
        environment: environment variables that are set.
        prompts: length of each prompt, in tokens.
        phases: what is recorded.
        stand_ins: kernels that the recorded run, which this one repeats, had replaced.
        gpu: name in `device.GPUS`.
        beside: other files of the model's folder, such as hf_quant_config.json.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    layers: tuple[int, ...]
    server: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prompts: tuple[int, ...] = (700, 512, 300, 256, 129, 64, 17, 1)
    phases: tuple[str, ...] = ("prefill", "decode", "extend")
    stand_ins: tuple[str, ...] = ()
    gpu: str = "sm90"
    beside: Sequence[Path] = ()


@dataclass
class _Run:
    plan: Plan
    release: Release
    log: CallLog = field(default_factory=CallLog)
    #: Phase -> number of a call of a PyTorch function that would launch something.
    launched: dict[str, dict[int, timeline.Launch]] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def run(plan: Plan, release: Release) -> tuple[dict[str, Any], list[recording.RecordedCall]]:
    """Runs a plan; what describes the run, and its calls in order.

    Raises: whatever SGLang raises, with its own message.
    """
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        # What SGLang tunes and keeps on a GPU that is not there is of this run only.
        os.environ["SGLANG_CACHE_DIR"] = folder
        return _run(_Run(plan, release), Path(folder, "model"))


def _run(one: _Run, folder: Path) -> tuple[dict[str, Any], list[recording.RecordedCall]]:
    plan, release = one.plan, one.release
    os.environ.update({**sglang_runner.ENVIRONMENT, **_environment(plan, release), **plan.environment})
    site = str(release.site)
    sys.path[1:1] = [site, *(str(release.site / inner) for inner in _INNER)]
    folder.mkdir()
    wrapping = _fake(one, folder)
    batch = _batch(one, folder)
    wrapping.rewire()
    _steps(one, batch)
    phases = {call.phase: call.phase for call in one.log.calls}
    launches = {phase: list(found.values()) for phase, found in one.launched.items()}
    calls = recording.recorded_calls(one.log, phases, launches)
    return _about(one), [dataclasses.replace(call, launches=()) for call in calls if call.kernel]


def _environment(plan: Plan, release: Release) -> dict[str, str]:
    from tools.dry_run.device import GPUS

    major, minor = GPUS[plan.gpu].capability
    return {
        **{"FLASHINFER_CUDA_ARCH_LIST": f"{major}.{minor}a", "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1"},
        **{"FLASHINFER_WORKSPACE_BASE": str(release.site), "FLASHINFER_DISABLE_VERSION_CHECK": "1"},
        **{"CUDA_HOME": str(release.site / "cuda"), "TOKENIZERS_PARALLELISM": "false"},
        **release.environment,
    }


def _fake(one: _Run, folder: Path) -> Wrapping:
    """Makes the GPU and everything around it, and imports SGLang; returns what wraps its kernels."""
    from tools.dry_run import caught, device, groups, kernels, packages, tensors

    site, gpu = one.release.site, device.GPUS[one.plan.gpu]
    device.install(gpu, max(int(one.plan.server.get("tp_size", 1)), 1), site)
    device.install_command(gpu, folder)
    tensors.launched, tensors.other_operator = _launch_noted(one), kernels.of_operator
    served = packages.install(site, one.release.required)
    caught.install(site)
    tensors.install()
    kernels.install_extensions()
    for library, schemas in installing.schemas(site).items():
        for start, namespace in one.release.namespaces.items():
            if library.startswith(start):
                kernels.define(namespace, schemas)
    for namespace, schemas in one.release.schemas.items():
        kernels.define(namespace, schemas)
    kernels.install_triton(gpu)
    groups.install()
    sglang_runner._allow_registering_twice()
    wrapping = Wrapping(one.log, one.problems)
    logged = wrapping.logged
    if "tilelang" in served:
        kernels.install_tilelang(stand_ins.StandInModule("tilelang", packages.NotedStandIn), logged)
    importlib.import_module("sglang")
    if one.plan.stand_ins:
        stand_ins.flash_attention_3()
    kernels.install_modules(wrapping.compiled_module)
    sglang_runner._wrap(wrapping)
    for problem in one.problems:
        name = problem.partition(":")[0]
        absent = problem.endswith(f"No module named '{name}'")  # the release has no such module
        if not absent and problem not in findings.REVIEWED["not_wrapped"]:
            findings.note(findings.NOT_WRAPPED, problem)
    kernels.install_cute(logged)
    groups.replace_communicators(logged)
    return wrapping


def _launch_noted(one: _Run) -> Callable[[str], None]:
    """A function that notes that the innermost open call would launch something."""

    def note(operator: str) -> None:
        log = one.log
        open_calls = log._local.__dict__.get("open")
        if log.phase is not None and open_calls:
            found = one.launched.setdefault(log.phase, {})
            found.setdefault(open_calls[-1], timeline.Launch(operator, open_calls[-1], log.layer, operator))

    return note


def _batch(one: _Run, folder: Path) -> serving.Batch:
    (folder / "config.json").write_text(json.dumps(dict(one.plan.config)), encoding="utf-8")
    for path in one.plan.beside:
        (folder / path.name).write_bytes(path.read_bytes())
    server = serving.server_arguments(str(folder), sglang_runner.SERVER, one.plan.server)
    one.resolved = sglang_runner.resolved(server)
    graphs = serving.graph_runner()
    graphs.capture = _in_phase(graphs.capture, one, "capture")
    if speculation.algorithm(server) is None:
        return serving.Batch(serving.model_runner(server), one.plan.prompts)
    batch = speculation.Speculation(server, one.plan.prompts)
    batch.verifying(lambda function: _in_phase(function, one, "verify"))
    return batch


def _in_phase(function: Callable[..., Any], one: _Run, phase: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, one.log.phase = one.log.phase, phase
        try:
            with torch_functions(one.log) if outer is None else contextlib.nullcontext():
                return function(*args, **kwargs)
        finally:
            one.log.phase = outer

    return call


def _steps(one: _Run, batch: serving.Batch) -> None:
    """Warms up as on a GPU, and then runs each phase from the cache that it needs."""
    batch.prefill()
    for phase, prepare, step in batch.phases(one.plan.phases):
        prepare()
        _in_phase(step, one, phase)()


def _about(one: _Run) -> dict[str, Any]:
    """Every field of schema/runtime_trace.schema.json but the tables and the calls."""
    from tools.dry_run.device import GPUS

    plan = one.plan
    versions = {}
    for name in sglang_runner.DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "configuration": plan.name,
        "model": plan.model,
        "model_config": dict(plan.config),
        "layers": list(plan.layers),
        "server": dict(plan.server),
        "environment": dict(plan.environment),
        "prompts": list(plan.prompts),
        "gpus": max(int(plan.server.get("tp_size", 1)), 1),
        "stand_ins": list(plan.stand_ins),
        "resolved": one.resolved,
        "versions": {**versions, "gpu": GPUS[plan.gpu].name},
    }
