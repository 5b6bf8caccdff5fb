"""A recorded run as a document of schema/runtime_trace.schema.json: built from a log, written, and read again."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.digests import content_sha256
from flashinfer_trace.format import files, json_source, json_values
from tools.runtime_tracing import frames
from tools.runtime_tracing.call_log import CallLog, LoggedCall
from tools.runtime_tracing.timeline import Launch

#: The library of a call of a function of SGLang that computes step by step in PyTorch. Recordings have its steps.
COMPOSED = "sglang"
#: Longest name of a CUDA kernel; the arguments of its templates are cut.
LONGEST_NAME = 160
#: Programs that drive a step: chains end below them.
DRIVERS = ("sglang/bench_one_batch.py", "sglang/benchmark/one_batch.py")
#: Functions that prepare a kernel on the host. They may copy, but compute nothing.
PREPARING = ("plan", "begin_forward", "fast_decode_plan", "get_num_sms")
#: How the names of CUDA kernels begin that exchange data between GPUs: those of NCCL, and SGLang's own all-reduce.
COMMUNICATING = ("ncclDevKernel_", "sglang::cross_device_reduce")
#: How the profiler calls a copy.
COPY = "Memcpy"
SCHEMA = "../../schema/runtime_trace.schema.json"
#: Where SGLang keeps kernels, as a library would: up to 0.5.14, and since.
_JIT = ("sglang/jit_kernel/", "sglang/kernels/ops/", "sglang/kernels/jit/")
#: SGLang's layers between its kernels and their callers since 0.5.15: operators, and the choice between variants.
_GLUE = ("sglang/srt/utils/custom_op.py", "sglang/kernels/fused_op.py", "sglang/kernels/kernel_api_logging.py")
#: The tables of a document; its calls refer to them by index.
TABLES = ("files", "frames", "stacks", "kernels", "arguments", "cuda_kernels")
#: Tables that are spread over lines, one item a line.
_ONE_A_LINE = tuple((name,) for name in (*TABLES, "calls") if name != "stacks")


class RecordingError(ValueError):
    """A recorded run cannot be read. The message names the file and the fix."""


@dataclass(frozen=True)
class RecordedLaunch:
    """CUDA kernels of one name that a call launched.

    Attributes:
        cuda_kernel: its name.
        layer: index of the decoder layer; None outside of the layers.
        count, microseconds: how many ran, and how long together.
    """

    cuda_kernel: str
    layer: int | None
    count: int
    microseconds: float

    @property
    def communicates(self) -> bool:
        """Whether it exchanges data with other GPUs: its time contains the wait for them."""
        return self.cuda_kernel.startswith(COMMUNICATING)


@dataclass(frozen=True)
class RecordedCall:
    """One kernel call of a run.

    Attributes:
        phase: prefill, decode or capture.
        library, kernel: who ships it, and its dotted path. "" for launches that no call was seen to make.
        stack: frames, the call site first.
        arguments: shapes and dtypes of tensors, and plain values.
        count: how often it was called.
        through: dotted paths of the logged calls inside of it, in order.
        launches: what it launched.
    """

    phase: str
    library: str
    kernel: str
    stack: tuple[frames.Frame, ...]
    arguments: str
    count: int
    through: tuple[str, ...]
    launches: tuple[RecordedLaunch, ...]

    @property
    def exchanged(self) -> tuple[RecordedLaunch, ...]:
        """The launches that exchange data with other GPUs, and the copies to and from shared memory of the GPUs."""
        if not any(one.communicates for one in self.launches):
            return ()
        return tuple(one for one in self.launches if one.communicates or one.cuda_kernel.startswith(COPY))


@dataclass(frozen=True)
class Recording:
    """One run: ``document`` holds what describes it (see the schema), ``calls`` what it called."""

    document: Mapping[str, Any]
    calls: tuple[RecordedCall, ...]

    @property
    def name(self) -> str:
        """The name of its configuration."""
        return str(self.document["configuration"])

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """Dotted paths of the kernels that were replaced."""
        return tuple(self.document.get("stand_ins", ()))

    def weight(self, layer: int | None) -> int:
        """How many layers of the whole model a recorded layer stands for; 1 outside of the layers."""
        return 1 if layer is None else int(self.document["layers"][layer])


def recorded_calls(
    log: CallLog, phases: Mapping[str, str], launches: Mapping[str, Sequence[Launch]]
) -> list[RecordedCall]:
    """The kernel calls of the chosen phases.

    A call that another logged call encloses is part of that one, unless the outer one is an operator of SGLang, which
    is Python code around kernels. PyTorch's own functions are kept where they launched something.

    Args:
        phases: phase in the log -> phase in the recording.
        launches: phase in the recording -> what ran on the GPU.
    """
    owners = _owners(log.calls)
    launched: dict[int | None, list[RecordedLaunch]] = defaultdict(list)
    unlinked: dict[str, list[RecordedLaunch]] = defaultdict(list)
    for phase, found in launches.items():
        for one in found:
            record = RecordedLaunch(_short(one.cuda_kernel), one.layer, one.count, round(one.microseconds, 2))
            (unlinked[phase] if one.call is None else launched[owners[one.call]]).append(record)
    inside: dict[int, dict[str, None]] = defaultdict(dict)
    for call in log.calls:
        if owners[call.number] != call.number and call.library != "torch":
            inside[owners[call.number]].setdefault(_path(call), None)
    calls = [
        _recorded(call, phases[call.phase], tuple(inside[call.number]), launched[call.number])
        for call in log.calls
        if call.phase in phases and owners[call.number] == call.number
        if launched[call.number] or (call.library != "torch" and not _is_python(call))
    ]
    calls += [RecordedCall(phase, "", "", (), "", 1, (), tuple(found)) for phase, found in unlinked.items()]
    return calls


def _owners(calls: Sequence[LoggedCall]) -> list[int]:
    """For each call, the number of the call that it is part of: its own, or that of an enclosing one."""
    owners: list[int] = []
    for call in calls:  # a call is logged after the one that encloses it
        outer = call.parent
        own = outer is None or _is_python(calls[owners[outer]]) or calls[owners[outer]].library == "torch"
        owners.append(call.number if outer is None or own else owners[outer])
    return owners


def _is_python(call: LoggedCall) -> bool:
    """Whether it is an operator that SGLang defines in Python, around kernels that are logged themselves."""
    return call.library == "torch.ops" and call.kernel.startswith("sglang.") and not _is_jit(call)


def _is_jit(call: LoggedCall) -> bool:
    """Whether it was made inside of ``sglang.jit_kernel``, whose functions are kernels like those of a library."""
    return bool(call.stack) and (frames.package_path(call.stack[0].code.co_filename) or "").startswith(_JIT)


def _path(call: LoggedCall) -> str:
    return f"torch.ops.{call.kernel}" if call.library == "torch.ops" else call.kernel


def _recorded(
    call: LoggedCall, phase: str, through: tuple[str, ...], launches: Sequence[RecordedLaunch]
) -> RecordedCall:
    stack = tuple(frames.located(frame) for frame in call.stack)
    library, kernel = call.library, _path(call)
    entered = _entered(stack)
    if entered and entered < len(stack) and library != "torch":
        last = stack[entered - 1]
        through = (kernel, *through)
        module = last.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        library, kernel = "jit", f"{module}.{last.function}"
        stack = stack[entered:]
    return RecordedCall(phase, library, kernel, stack, call.arguments, call.count, through, tuple(launches))


def _entered(stack: Sequence[frames.Frame]) -> int:
    """How many frames are inside of SGLang's own kernels: the outermost of them is the kernel that SGLang calls."""
    entered = 0
    for index, frame in enumerate(stack):
        if frame.file.startswith(_JIT):
            entered = index + 1
        elif frame.file not in _GLUE or not stack[0].file.startswith("sglang/kernels/"):
            break
    return entered


@functools.cache
def _short(name: str) -> str:
    """The name of a CUDA kernel without its parameters, cut."""
    name = re.sub(r"\(anonymous namespace\)", "{anonymous}", name)
    name = re.sub(r"^void ", "", name)
    depth = 0
    for index, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:index]
            break
    name = name.rstrip()
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


class _Table:
    """Values, each of which is written once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[Any, int] = {}

    def index(self, value: Any) -> int:
        if value not in self._known:
            self._known[value] = len(self.values)
            self.values.append(value)
        return self._known[value]


def write(path: Path, about: Mapping[str, Any], calls: Sequence[RecordedCall]) -> None:
    """Writes a recorded run. Frames, stacks, arguments and names are in tables, so none is written twice.

    Args:
        about: what describes the run: every field of the schema but the tables and the calls.
    """
    tables = {name: _Table() for name in TABLES}
    rows = [_row(call, tables) for call in calls]
    content = {**about, **{name: table.values for name, table in tables.items()}, "calls": rows}
    document = {"$schema": SCHEMA, "sha256": content_sha256(content), **content}
    layout = _layout if any(call.launches for call in calls) else _layout_of_dry_run
    files.write_text(path, files.laid_out(document, layout, files.COMPACT))


def _row(call: RecordedCall, tables: Mapping[str, _Table]) -> list[Any]:
    node = -1
    for file, *place in reversed(call.stack):
        frame = tables["frames"].index((tables["files"].index(file), *place))
        node = tables["stacks"].index((frame, node))
    kernel = tables["kernels"].index((call.library, call.kernel, *call.through))
    launches = [
        [tables["cuda_kernels"].index(one.cuda_kernel), one.layer, one.count, one.microseconds] for one in call.launches
    ]
    return [call.phase, kernel, node, tables["arguments"].index(call.arguments), call.count, launches]


def _layout(path: tuple[str, ...], value: Any) -> files.Lines | None:
    if not path:
        return files.Lines(2, closing=0)
    return files.Lines(4, closing=2) if path in _ONE_A_LINE else None


def _layout_of_dry_run(path: tuple[str, ...], value: Any) -> files.Lines | None:
    return None if path and path != ("calls",) else _layout(path, value)


def read(path: Path) -> Recording:
    """Reads a recorded run.

    Raises:
        RecordingError: it cannot be read, is not what its digest is of, or its tables do not fit together.
    """
    try:
        document = json_source.load_object(path, json_source.TRACES)
        if document["sha256"] != content_sha256(document, "$schema", "sha256"):
            raise ValueError("its sha256 is of another content: it was edited")
        _check(document)
        return Recording(document, tuple(_calls(document)))
    except (json_source.JsonSourceError, KeyError, IndexError, TypeError, ValueError) as error:
        raise RecordingError(f"{path}: {error!r}; record it again: python -m tools.runtime_tracing") from None


def _check(document: Mapping[str, Any]) -> None:
    """Checks the types of what describes a run and of its tables.

    Raises:
        TypeError, KeyError: a value has another type, or is missing.
    """
    json_values.strings([document["configuration"], document["model"]])
    json_values.strings(document["stand_ins"])
    for name in ("environment", "versions"):
        json_values.strings([*document[name].values()])
    for name in ("server", "resolved", "model_config"):
        if not isinstance(document[name], dict):
            raise TypeError(f"{name} is not an object")
    json_values.strings(document["model_config"]["architectures"])
    if not document["model_config"]["architectures"] or "sglang" not in document["versions"]:
        raise KeyError("architectures, or versions.sglang")
    window = document["model_config"].get("sliding_window")
    if not (window is None or type(window) is int):
        raise TypeError("model_config.sliding_window is not an integer")
    for name in ("files", "arguments", "cuda_kernels"):
        json_values.strings(document[name])
    for _, line, *texts in document["frames"]:
        json_values.strings(texts)
        if type(line) is not int or len(texts) != 2:
            raise TypeError(f"frames: [{line!r}, ...] is not file, line, function and what is called")


def read_all(directory: Path) -> list[Recording]:
    """Every recorded run of a directory, by name."""
    return [read(path) for path in sorted(directory.glob("*.json"))]


def _calls(document: Mapping[str, Any]) -> Iterator[RecordedCall]:
    places = [frames.Frame(document["files"][file], *place) for file, *place in document["frames"]]
    stacks: list[tuple[frames.Frame, ...]] = []
    for frame, rest in document["stacks"]:
        stacks.append((places[frame], *(stacks[rest] if rest >= 0 else ())))
    names = document["cuda_kernels"]
    for phase, kernel, stack, arguments, count, launches in document["calls"]:
        library, path, *through = json_values.strings(document["kernels"][kernel])
        json_values.strings([phase])
        for _, layer, *figures in launches:
            if not (layer is None or type(layer) is int) or not all(type(one) in (int, float) for one in figures):
                raise TypeError(f"calls: {figures!r} are not how many ran, and how long")
        yield RecordedCall(
            phase=phase,
            library=library,
            kernel=path,
            stack=stacks[stack] if stack >= 0 else (),
            arguments=document["arguments"][arguments],
            count=count,
            through=tuple(through),
            launches=tuple(RecordedLaunch(names[one[0]], *one[1:]) for one in launches),
        )
