"""A dry run in this process, which is a fork of one that imported SGLang: from a plan to a record."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.dry_run import findings
from tools.dry_run import install as installing
from tools.dry_run.release import Release
from tools.runtime_tracing import recording, serving, sglang_runner, speculation, stand_ins, timeline
from tools.runtime_tracing.call_log import CallLog
from tools.runtime_tracing.configurations import Configuration
from tools.runtime_tracing.wrapping import Wrapping, torch_functions

#: Folders, in a site, whose packages are found without their own name.
_INNER = ("nvidia_cutlass_dsl/python_packages", "nvidia_cutlass_dsl/dsl_packages")


def gpus(plan: Configuration) -> int:
    """How many GPUs a replica of the model has."""
    return max(int(plan.server.get("tp_size", 1)), 1) * max(int(plan.server.get("pp_size", 1)), 1)


@dataclass
class Process:
    """A process for dry runs. `begin` imports SGLang; each plan is resolved and run in a fork after that.

    Attributes:
        release: of SGLang.
        log: what was called.
        launched: phase -> number of a call of a PyTorch function that would launch something.
        problems: what could not be wrapped.
    """

    release: Release
    log: CallLog = field(default_factory=CallLog)
    launched: dict[str, dict[int, timeline.Launch]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _wrapping: Wrapping | None = None

    def begin(self, plan: Configuration, folder: Path) -> None:
        """Makes the GPU of a plan and everything around it, and imports SGLang and its kernels.

        Args:
            folder: for what SGLang keeps, and commands that it calls.
        """
        # SGLang's tuning results for a GPU that is not there are of this process only.
        os.environ["SGLANG_CACHE_DIR"] = str(folder)
        os.environ.update({**sglang_runner.ENVIRONMENT, **_environment(plan, self.release), **plan.environment})
        site = self.release.site
        sys.path[1:1] = [str(site), *(str(site / inner) for inner in _INNER)]
        self._wrapping = _fake(self, plan, folder)

    def resolve(self, plan: Configuration, folder: Path) -> Any:
        """The server arguments of a plan, completed by SGLang, which also sets environment variables.

        Args:
            folder: for the files of the model, and for what SGLang keeps.

        Raises: whatever SGLang raises, with its own message.
        """
        from tools.dry_run import device

        os.environ["SGLANG_CACHE_DIR"] = str(folder)
        device.set_count(gpus(plan))
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(dict(plan.model.config)), encoding="utf-8")
        for path in plan.model.beside:
            (model / path.name).write_bytes(path.read_bytes())
        return serving.server_arguments(str(model), sglang_runner.SERVER, plan.server)

    def import_models(self) -> None:
        """Imports what every run imports after `resolve`: the steps of serving, and the models."""
        serving.bench()
        importlib.import_module("sglang.srt.models.registry")

    def run(self, plan: Configuration, server: Any) -> tuple[dict[str, Any], list[recording.RecordedCall]]:
        """Runs a plan; what describes the run, and its calls in order.

        Args:
            server: its arguments, see `resolve`.

        Raises: whatever SGLang raises, with its own message.
        """
        assert self._wrapping is not None
        from tools.dry_run.device import GPUS

        resolved, versions = sglang_runner.resolved(server), sglang_runner.versions(GPUS[plan.gpu].name)
        about = plan.about(gpus(plan), resolved, versions)
        batch = _batch(self, plan, server)
        self._wrapping.rewire()
        _steps(self, plan, batch)
        phases = {call.phase: call.phase for call in self.log.calls}
        launches = {phase: list(found.values()) for phase, found in self.launched.items()}
        calls = recording.recorded_calls(self.log, phases, launches)
        return about, [dataclasses.replace(call, launches=()) for call in calls if call.kernel]


def _environment(plan: Configuration, release: Release) -> dict[str, str]:
    from tools.dry_run.device import GPUS

    major, minor = GPUS[plan.gpu].capability
    return {
        **{"FLASHINFER_CUDA_ARCH_LIST": f"{major}.{minor}a", "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1"},
        **{"FLASHINFER_WORKSPACE_BASE": str(release.site), "FLASHINFER_DISABLE_VERSION_CHECK": "1"},
        **{"CUDA_HOME": str(release.site / "cuda"), "TOKENIZERS_PARALLELISM": "false"},
        **release.environment,
    }


def _fake(one: Process, plan: Configuration, folder: Path) -> Wrapping:
    """Makes the GPU and everything around it, and imports SGLang; returns what wraps its kernels."""
    from tools.dry_run import caught, device, groups, kernels, packages, tensors

    site, gpu = one.release.site, device.GPUS[plan.gpu]
    device.install(gpu, site)
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
    if plan.stand_ins:
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


def _launch_noted(one: Process) -> Callable[[str], None]:
    """A function that notes that the innermost open call would launch something."""

    def note(operator: str) -> None:
        log = one.log
        open_calls = log._local.__dict__.get("open")
        if log.phase is not None and open_calls:
            found = one.launched.setdefault(log.phase, {})
            found.setdefault(open_calls[-1], timeline.Launch(operator, open_calls[-1], log.layer, operator))

    return note


def _batch(one: Process, plan: Configuration, server: Any) -> serving.Batch:
    for graphs in serving.graph_runners():
        graphs.capture = _in_phase(graphs.capture, one, "capture")
    if speculation.algorithm(server) is None:
        return serving.Batch(serving.model_runner(server), plan.prompts)
    batch = speculation.Speculation(server, plan.prompts)
    batch.verifying(lambda function: _in_phase(function, one, "verify"))
    return batch


def _in_phase(function: Callable[..., Any], one: Process, phase: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, one.log.phase = one.log.phase, phase
        try:
            with torch_functions(one.log) if outer is None else contextlib.nullcontext():
                return function(*args, **kwargs)
        finally:
            one.log.phase = outer

    return call


def _steps(one: Process, plan: Configuration, batch: serving.Batch) -> None:
    """Warms up as on a GPU, and then runs each phase from the cache that it needs."""
    batch.prefill()
    for phase, prepare, step in batch.phases(plan.phases):
        prepare()
        _in_phase(step, one, phase)()
