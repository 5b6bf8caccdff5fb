"""Builds a model in the installed SGLang, runs prefill and decode under the profiler, and logs every kernel call."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.runtime_tracing import serving, stand_ins, timeline
from tools.runtime_tracing.call_log import CallLog
from tools.runtime_tracing.configurations import Configuration
from tools.runtime_tracing.wrapping import Wrapping, torch_functions

#: How often each phase is profiled. The fastest repetition is kept: other processes may use the GPU at the same time.
REPETITIONS = 3
#: Distributions whose versions a recording names.
DISTRIBUTIONS = ("sglang", "sglang-kernel", "flashinfer-python", "torch", "triton", "transformers")
#: Server arguments whose values, as SGLang computed them, a recording names.
RESOLVED = (
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend"),
    *("moe_runner_backend", "fp8_gemm_runner_backend", "kv_cache_dtype", "page_size", "tp_size", "ep_size"),
    *("quantization", "disable_cuda_graph", "nsa_prefill_backend", "nsa_decode_backend"),
)
#: Server arguments of every run: dummy weights, a small cache, and nothing but the forward pass.
SERVER = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 16384,
    "max_running_requests": 16,
    "chunked_prefill_size": 8192,
    "context_length": 8192,
    "cuda_graph_bs": [8],
    "cuda_graph_max_bs": 8,
    "cuda_graph_bs_decode": [8],
    "cuda_graph_max_bs_decode": 8,
    "random_seed": 1,
    "log_level": "warning",
    "device": "cuda",
}
#: Where ``load_jit`` is: since 0.5.15, and before.
JIT_MODULES = (
    *("sglang.kernels.jit.utils.compile.loader", "sglang.kernels.jit.utils.compile", "sglang.kernels.jit.utils"),
    "sglang.jit_kernel.utils",
)
#: Environment variables that must be set before anything is imported.
ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        log: every call.
        phases: phase of the log -> name in the recording.
        launches: phase in the recording -> what ran on the GPU.
        versions, resolved: see `DISTRIBUTIONS` and `RESOLVED`.
        problems: what could not be wrapped.
        reached: the last step that began.
    """

    log: CallLog = field(default_factory=CallLog)
    phases: dict[str, str] = field(default_factory=dict)
    launches: dict[str, list[timeline.Launch]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    reached: str = "start"


def run(configuration: Configuration, outcome: Outcome, rank: int, port: int) -> None:
    """Runs one configuration in this process, which must be a fresh one.

    Args:
        outcome: is filled in as the run proceeds, to show how far a failed run came.
        rank: the rank of this process among `Configuration.gpus`. Only rank 0 records.
        port: where the ranks meet.
    """
    os.environ.update({**ENVIRONMENT, **configuration.environment})
    outcome.reached = "import"
    stand_ins.install()
    _allow_registering_twice()
    import sglang  # noqa: F401

    if configuration.stand_ins:
        stand_ins.flash_attention_3()
    wrapping = Wrapping(outcome.log, outcome.problems)
    if rank == 0:
        _wrap(wrapping)
    _load_compiled(wrapping.compiled_module if rank == 0 else lambda module, name: module)
    with tempfile.TemporaryDirectory(prefix="model-") as directory:
        Path(directory, "config.json").write_text(json.dumps(configuration.model.config), encoding="utf-8")
        runner = _runner(directory, configuration.server, outcome, rank, port)
    wrapping.rewire()
    _follow_layers(runner.model, len(configuration.model.layers), outcome.log)
    _spread_weights(runner.model)
    outcome.reached = "warm-up"
    batch = serving.Batch(runner, configuration.prompts)
    batch.warm_up()
    _profile(batch, configuration, outcome, rank)
    outcome.reached = "end"


def _wrap(wrapping: Wrapping) -> None:
    import torch
    from triton.runtime.jit import JITFunction

    wrapping.operators((torch._ops.OpOverloadPacket, torch._ops.OpOverload))
    wrapping.triton(JITFunction)
    wrapping.packages()


def _load_compiled(found: Callable[[Any, str], Any]) -> None:
    """Makes SGLang load the modules of its kernels that were compiled beforehand, on every rank.

    Args:
        found: is given each module and its name, and returns what SGLang uses.
    """
    modules = jit_modules()
    real = modules[0].load_jit
    prebuilt = Path(os.environ.get("RUNTIME_TRACING_JIT", "/nonexistent"))

    def load_jit(*args: Any, **kwargs: Any) -> Any:
        name = "_".join(str(one) for one in ("sgl_kernel_jit", *args)).replace("/", "_")
        if (prebuilt / f"{name}.so").exists():
            import tvm_ffi

            return found(tvm_ffi.load_module(str(prebuilt / f"{name}.so")), name)
        print(f"compiling {name}", flush=True)
        return found(real(*args, **kwargs), name)

    for module in modules:
        module.load_jit = load_jit


def jit_modules() -> list[Any]:
    """The modules of SGLang that hold the function by which its kernels are compiled at first use."""
    found: list[Any] = []
    for name in JIT_MODULES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                raise
    return found


def _runner(directory: str, arguments: Mapping[str, Any], outcome: Outcome, rank: int, port: int) -> Any:
    """SGLang's ModelRunner, with random weights for the ``config.json`` of a directory."""
    import torch

    outcome.versions = versions(torch.cuda.get_device_name())
    outcome.reached = "server arguments"
    server = serving.server_arguments(directory, SERVER, arguments)
    outcome.resolved = resolved(server)
    outcome.reached = "load"
    for graphs in serving.graph_runners():
        graphs.capture = _in_phase(graphs.capture, outcome, "capture")
    return serving.model_runner(server, rank, port)


def versions(gpu: str) -> dict[str, str]:
    """The versions that a recording names, and the GPU."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "gpu": gpu}


def resolved(server: Any) -> dict[str, Any]:
    """`RESOLVED`, as SGLang computed it."""
    view = serving.view(server)
    found = {name: getattr(view, name, None) for name in RESOLVED}
    return {name: value for name, value in found.items() if isinstance(value, (str, int, bool))}


def _in_phase(function: Callable[..., Any], outcome: Outcome, phase: str) -> Callable[..., Any]:
    """The function, with its calls logged under a phase."""

    def call(*args: Any, **kwargs: Any) -> Any:
        outcome.log.phase = outcome.phases[phase] = phase
        try:
            with torch_functions(outcome.log):
                return function(*args, **kwargs)
        finally:
            outcome.log.phase = None

    return call


def _follow_layers(model: Any, count: int, log: CallLog) -> None:
    """Tells the log which decoder layer runs."""
    import torch

    found = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "layers" and isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    for index, layer in enumerate(found[0] if found else ()):

        def enter(*_: Any, index: int = index) -> None:
            log.layer = index

        def leave(*_: Any) -> None:
            log.layer = None

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)


def _spread_weights(model: Any) -> None:
    """Makes tokens differ, to have a router send them to different experts, as with real weights.

    SGLang's dummy weights lie within 0.001 of 0, those of norms too: every token would choose the same experts.
    """
    import torch

    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if not torch.is_floating_point(weight) or torch.finfo(weight.dtype).bits < 16:
            continue
        owner = name.rpartition(".")[0]
        if owner.endswith("norm") and weight.dim() == 1:
            weight.data.fill_(1.0)
        elif owner.endswith("embed_tokens"):
            weight.data.normal_()
        elif owner.endswith((".gate", ".router")) and weight.dim() == 2:
            weight.data.normal_(std=0.02)


def _profile(batch: serving.Batch, configuration: Configuration, outcome: Outcome, rank: int) -> None:
    for phase, prepare, step in batch.phases(configuration.phases):
        outcome.reached = phase
        found: dict[str, list[timeline.Launch]] = {}
        for repetition in range(-1, REPETITIONS):  # the first one warms up
            prepare()
            if rank or repetition < 0:
                step()
                batch.wait()
            else:
                name = f"{phase} {repetition}"
                found[name] = _profiled(name, step, batch, outcome.log, configuration.gpus)
        if found:
            best = min(found, key=lambda name: sum(launch.microseconds for launch in found[name]))
            outcome.phases[best], outcome.launches[phase] = phase, found[best]


def _profiled(
    phase: str, step: Callable[[], None], batch: serving.Batch, log: CallLog, gpus: int
) -> list[timeline.Launch]:
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with _alone(gpus), torch.profiler.profile(activities=activities) as profiler:
        log.phase, log.marker = phase, torch._C._profiler._RecordFunctionFast
        try:
            with torch_functions(log):
                step()
            batch.wait()
        finally:
            log.phase = log.marker = None
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return timeline.launches(json.loads(Path(file.name).read_bytes())["traceEvents"])


@contextlib.contextmanager
def _alone(gpus: int) -> Iterator[None]:
    """While no other recording on this machine is being profiled."""
    with open(Path(tempfile.gettempdir(), "runtime_tracing.lock"), "w") as lock:
        if gpus == 1:  # a process that waits for others must not wait for a lock as well
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _allow_registering_twice() -> None:
    """SGLang registers configurations of models that newer versions of transformers have by themselves."""
    from transformers.models.auto import auto_factory, configuration_auto

    mappings: tuple[Any, ...] = (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping)
    for one in mappings:
        one.register = _registering(one.register)


def _registering(real: Callable[..., Any]) -> Callable[..., Any]:
    def register(self: Any, key: Any, value: Any, exist_ok: bool = False) -> Any:
        return real(self, key, value, exist_ok=True)

    return register
