"""The kernel calls of a recorded run, each with its chain and with the op of the model that makes it.

The op of a call is named after the frame nearest to the kernel in the model's own files: ``self.q_b_proj(q)`` is the op
``q_b_proj``. A kernel that the model calls itself is an op of its own. Work outside of the model's forward (sampling,
loading, scheduling) is named after what the file with which its chain begins calls.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.kernels import launched_by
from flashinfer_trace.kernels.names import key_of
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.recording import DRIVERS, PREPARING, RecordedCall, Recording

#: In this order, phases are shown. A CUDA graph is captured while a server loads, and replayed by each decode.
PHASES = ("prefill", "decode", "extend", "draft", "verify", "capture")
#: The source of PyTorch's own functions.
TORCH = "torch"
MODEL_FILES = "sglang/srt/models/"
#: Module, and class with method, of what the runtime calls outside of the model's forward -> what for, and when.
OCCASIONS = {
    r"model_executor/model_runner\.py:ModelRunner\.sample": ("sampling", "after every forward"),
    r"model_executor/model_runner\.py:ModelRunner\.(__init__|init\w*|load\w*)": ("loading", "when the server starts"),
    r"model_executor/model_runner\.py:ModelRunner\.\w*forward\w*": (
        "attention metadata",
        "in every forward, before the model runs",
    ),
    r"model_executor/forward_batch_info\.py:.*": ("batch", "before every forward"),
    r"managers/schedule_batch\.py:.*": ("KV-cache I/O", "when a batch is scheduled"),
    r"mem_cache/.*": ("KV-cache I/O", "when a batch is scheduled"),
}
ELSEWHERE = ("utilities", "as part of a step")
#: Names of calls that pass on to the module itself; they do not describe it.
_PLAIN = {"forward", "__call__", ""}


@dataclass(frozen=True, order=True)
class Kernel:
    """A kernel, or a function of PyTorch.

    Attributes:
        name: the function, or ``Class.method``.
        source: who ships it, as tags and lists call it; `TORCH` for PyTorch.
        path: its dotted path.
    """

    name: str
    source: str
    path: str

    @property
    def category(self) -> str:
        """Its purpose, according to ``categories.json``."""
        known = _categories()
        return "PyTorch" if self.source == TORCH else known.get(self.name, known.get(_last(self.path), "other"))


@dataclass(frozen=True)
class TracedCall:
    """One call of a run.

    Attributes:
        run: name of the run.
        phase: prefill, decode, extend, capture, ...
        frames: the chain, the call of the kernel first.
        op: the op's name.
        position: the frame that calls the op, counted from the kernel.
        group, when: outside of the model's forward, what the work belongs to and when it is done; "" inside.
        order: grows with time.
        layer: the first decoder layer in which it was launched; None outside of the layers, or if it is not known.
        recorded: the call as it was recorded.
    """

    run: str
    phase: str
    kernel: Kernel
    frames: tuple[Frame, ...]
    op: str
    position: int
    group: str
    when: str
    order: int
    layer: int | None
    recorded: RecordedCall

    @property
    def site(self) -> tuple[str, int, str]:
        """Where the op is called: file, line, function."""
        return self.frames[self.position][:3]


def traced(run: Recording) -> Iterator[TracedCall]:
    """The kernels and PyTorch functions of a run, in execution order; what launches nothing on the GPU is left out."""
    measured = any(call.launches for call in run.calls)
    for order, call in enumerate(run.calls):
        frames = tuple(frame for frame in call.stack if not frame.file.startswith(DRIVERS))
        if not frames or not is_shown(call, measured, run.stand_ins):
            continue
        kernel = _kernel_of(call.library, call.kernel)
        layers = [one.layer for one in call.launches if one.layer is not None]
        layer = min(layers, default=None)
        yield TracedCall(run.name, call.phase, kernel, frames, *_op(frames, kernel), order, layer, call)


def is_shown(call: RecordedCall, measured: bool, stand_ins: tuple[str, ...] = ()) -> bool:
    """Whether a call is one of a kernel.

    Kernels that a CUDA graph captures are launched when it is replayed. A dry run (not `measured`) and stand-ins
    launch nothing.
    """
    if not call.kernel or _last(call.kernel) in PREPARING or call.kernel.startswith("torch.ops.sglang."):
        return False
    return bool(call.launches) or call.phase == "capture" or not measured or call.kernel in stand_ins


def in_model(file: str) -> bool:
    """Whether a file is one of the models'."""
    return file.startswith(MODEL_FILES)


def settings_of(run: Recording) -> Mapping[str, str]:
    """The settings of a run that may tell it apart, as texts."""
    document, config = run.document, run.document["model_config"]
    given = document["resolved"] | document["server"] | document["environment"]
    quantization = document["server"].get("quantization") or (config.get("quantization_config") or {}).get(
        "quant_method"
    )
    return {name: str(value).lower() for name, value in given.items() if name != "quantization"} | {
        "architecture": str(config["architectures"][0]),
        "model": str(document["model"]),
        "quantization": str(quantization or "none"),
        "gpu": str(document["versions"].get("gpu", "")),
    }


def keys_of(kernel: Mapping[str, Any]) -> list[str]:
    """``source:name`` of a kernel of a trace, of its launcher, and of its callees: the keys for looking it up."""
    own = f"{kernel['source']}:{kernel['name'].partition('.')[0]}"  # a method counts as its class
    paths = (launched_by().get(kernel["path"], kernel["path"]), *kernel.get("through", ()))
    # A module that SGLang compiles for its arguments has one function of SGLang's.
    named = (re.sub(r"^sgl_kernel_jit_\w+", "sglang", path) for path in paths)
    return list(dict.fromkeys(filter(None, (own, *map(key_of, named)))))


def _op(frames: tuple[Frame, ...], kernel: Kernel) -> tuple[str, int, str, str]:
    """Name and position of the op, and its group and occasion outside of the model's forward."""
    inside = [at for at, frame in enumerate(frames) if in_model(frame.file)]
    own = _last(kernel.path)
    if inside and frames[inside[-1]].function.endswith(".forward"):
        at = inside[0]
        return (own if at == 0 or frames[at].called in _PLAIN else frames[at].called), at, "", ""
    *_, last = frames
    root = f"{last.file.removeprefix('sglang/srt/')}:{last.function}"
    occasion = next((found for rule, found in OCCASIONS.items() if re.fullmatch(rule, root)), ELSEWHERE)
    at = next(at for at in range(len(frames)) if all(frame.file == last.file for frame in frames[at:]))
    return (frames[at].called if at and frames[at].called not in _PLAIN else own), at, *occasion


@functools.cache
def _kernel_of(library: str, path: str) -> Kernel:
    if library == TORCH:
        return Kernel(path.removeprefix("torch."), TORCH, path)
    parts = path.split(".")
    name = ".".join(parts[-2:]) if len(parts) > 1 and parts[-2].lstrip("_")[:1].isupper() else parts[-1]
    if library == "torch.ops":  # operators of other packages: torch.ops.deep_gemm.<name>
        library = path.removeprefix("torch.ops.").partition(".")[0]
    return Kernel(name, key_of(path).partition(":")[0] or library.replace("_", "-"), path)


@functools.cache
def _categories() -> Mapping[str, str]:
    listed = json.loads(Path(__file__).with_name("categories.json").read_text(encoding="utf-8"))
    return {name: category for category, names in listed.items() for name in names}


def _last(path: str) -> str:
    return path.rpartition(".")[2]
