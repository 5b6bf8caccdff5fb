"""The code that runs inside a submission's process: it loads the submission, then calls it as often as the judge asks.

Nothing here can be trusted once the submission was loaded, and nothing has to be: the judge looks at memory, and no
oracle, bound or earlier case is in the memory of this process. The inputs of one call are all that it is given.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import os
import re
import secrets
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.judging.after_call import Replaced, Undisturbed, stored, unhush, unreplaced
from flashinfer_trace.judging.compiled import CompileError, built
from flashinfer_trace.judging.loading import LoadError, Planned, ReturnError, Submitted, bound, load
from flashinfer_trace.judging.stopwatch import Stopwatch, TimedCalls, captured, seed_all
from flashinfer_trace.sandbox import confine, protocol
from flashinfer_trace.sandbox.far_rows import FarRows
from flashinfer_trace.sandbox.limits import MAX_MESSAGE, MAX_TEXT
from flashinfer_trace.sandbox.shared_memory import SharedMemory, Slot, tensor_in

#: Errors that are failures of another kind than that of a submission that raises.
_KINDS = {ReturnError: "outputs", Replaced: "tampered"}

_PACKAGE = "flashinfer_trace"
#: Bytes of a page of a GPU's memory; fewer pages than this are taken before tensors are moved, at random.
PAGE, BESIDE = 2 << 20, 100

#: Functions of clocks, of synchronization and of torch that a submission has no reason to replace. The judge relies on
#: none of them: it compares outputs and memory in its own process. That a submission replaces one says that its author
#: expects to be timed or compared with it, so it is reported. Like every look from inside of a process it finds the
#: careless; what keeps a verdict true is that nothing but tensors leaves the process.
_WATCHED = {
    "builtins": ("abs", "all", "any", "isinstance", "max", "min", "open", "print"),
    "time": (
        *("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "sleep", "time", "time_ns"),
    ),
    "torch": ("all", "allclose", "empty", "empty_like", "equal", "isclose", "isnan", "zeros"),
    "torch.Tensor": ("allclose", "clone", "copy_", "data_ptr", "equal", "fill_", "isclose", "isnan", "item", "tolist"),
    "torch.cuda": ("Event", "current_stream", "default_stream", "stream", "synchronize"),
    "torch.cuda.Event": ("elapsed_time", "query", "record", "synchronize", "wait"),
    "torch.cuda.Stream": ("query", "record_event", "synchronize", "wait_event", "wait_stream"),
    "torch.testing": ("assert_close",),
}

#: Places of frames that do not concern a submission: those of the judge, and of the import system.
_OURS = (os.path.dirname(__file__), os.path.dirname(importlib.__file__), "<frozen importlib")

#: Where modules are called, and functions that torch's decorators made: no place of a submission.
_TORCH = os.path.dirname(torch.__file__) + os.sep

#: How many frames of a traceback are shown.
MAX_FRAMES = 12

#: Longest file name shown, in characters.
MAX_FILE = 200


def prepare(kernel: object | None) -> tuple[int, Callable[[socket.socket], None]]:
    """Gets the server of submissions ready (see `fork_server.Service`): first, whether domains work here.

    No process that has a submission in it is asked, which could lie. The server has never touched CUDA, so its
    processes can; and it has imported neither a family nor the harness.

    Args:
        kernel: a callable that this process was forked with; a request then names no file.
    """
    return confine.landlock_domain_works(), functools.partial(_serve, kernel=kernel)


def _serve(pipe: socket.socket, kernel: object | None) -> None:
    """Answers requests from the pipe to the judge until it is closed. Never returns."""
    try:
        confine.enter_landlock_domain()
        os.dup2(2, 1)  # standard output is the judge's: it may be JSON
        if kernel is None:
            _seed_afresh()
        _Session(pipe, kernel).answer_all()
    except EOFError:
        os._exit(0)
    except BaseException:
        os._exit(1)


class _Session:
    """One submission and the memory that it works in."""

    def __init__(self, pipe: socket.socket, kernel: object | None) -> None:
        self._pipe, self._kernel = pipe, kernel
        self._shared: SharedMemory | None = None
        self._on_device: torch.Tensor | None = None
        self._beside: torch.Tensor | None = None
        self._slots: Mapping[str, Any] = {}
        self._root: str | None = None
        self._stopwatch: Stopwatch | None = None
        self._plans = False

    def answer_all(self) -> None:
        before = _watched()
        submitted: Submitted | None = None
        while True:
            request = protocol.read_header(self._read)
            if "submission" in request:  # another one only after a known kernel, if at all
                if request["printed"]:
                    self._print_to_judge()
                submitted = self._answer(
                    lambda: {"loaded": True, "plans": self._plans}, functools.partial(self._load, request)
                )
                continue
            if "rest" in request or "awake" in request:
                submitted = None
                self._answer(dict, self._rest if "rest" in request else dict)
                continue
            if "memory" in request:
                self._receive_memory(request["memory"])
            assert submitted is not None  # the judge calls nothing that was not loaded
            compute = functools.partial(self._timed if "timing" in request else self._call, submitted, request)
            self._answer(lambda: {"tampered": _replaced(before)}, compute)

    def _answer(self, more: Callable[[], dict[str, Any]], compute: Callable[[], Any]) -> Any:
        try:
            found = compute()
            answer = protocol.pack_header({**(found if isinstance(found, dict) else {}), **more()})
        except BaseException as error:
            kind = next(({"kind": kind} for one, kind in _KINDS.items() if isinstance(error, one)), {})
            told = {"failed": error_line(error, self._root), "traceback": own_traceback(error, self._root)}
            found, answer = None, protocol.pack_header({**told, **kind})
        self._pipe.sendall(answer)
        return found

    def _load(self, request: Mapping[str, Any]) -> Submitted:
        self._device, self._inputs, self._outputs = request["device"], request["inputs"], request["outputs"]
        if self._stopwatch is None:
            self._stopwatch = Stopwatch(self._device)
        submission = request["submission"]
        self._root = submission["root"] if submission["kind"] == "package" else None
        if self._device != "cpu":
            torch.cuda.set_device(torch.device(self._device).index or 0)
        self._limit_memory(request["memory_bytes"])
        if submission["kind"] == "known":
            self._stopwatch.watch_phases(submission["kernel"].partition("[")[0])
        elif submission["kind"] != "forked":
            _hide_package()
        names = self._device, self._inputs, self._outputs
        if submission["kind"] == "known":
            return _known(submission)
        if submission["kind"] == "forked":
            found = bound(self._kernel, *names)
        elif "language" in submission:
            found = bound(built(submission, self._device), *names, submission["destination"])
        else:
            found = load(submission, *names)
        self._plans = isinstance(found, Planned)
        return found

    def _limit_memory(self, memory_bytes: int | None) -> None:
        if memory_bytes is None:
            return
        if self._device == "cpu":
            confine.limit_address_space(memory_bytes)
        else:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total))

    def _rest(self) -> None:
        """Gives back all memory until there is another known kernel."""
        assert self._stopwatch is not None
        self._stopwatch.watch_no_phases()
        self._shared, self._on_device, self._beside, self._slots = None, None, None, {}
        gc.collect(1)  # what the last kernel left; all that libraries have made would take half a second
        if self._device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _call(self, submitted: Submitted, request: Mapping[str, Any]) -> dict[str, Any]:
        """One call. Returned values are copied at once into the memory of the outputs, on the stream of the call."""
        assert self._shared is not None
        host = self._shared.memory[: request["size"]]
        memory = self._device_memory(host)
        inputs, outputs = self._tensors(memory, request)
        seed_all(request["seed"])
        poisoned = [tensor.clone() for tensor in outputs.values()]
        del poisoned  # memory that the submission allocates is likely this one
        stream = None if memory is host else torch.cuda.current_stream()
        with torch.no_grad():
            far = FarRows(**request["far"]) if "far" in request else None
            given, written = (far.given(inputs), far.filled(outputs)) if far else (inputs, outputs)
            returned = submitted(dict(given), dict(written))
            with Undisturbed():
                unreplaced()
                if stream is not None:
                    torch.cuda.set_stream(stream)  # the submission may have left another one
                described = {} if returned is None else stored(returned, written)
                if far is not None:
                    _bring_back(far.inputs, given, inputs)
                    _bring_back(far.outputs, written, outputs, described)
                    del given, written, returned  # tens of gigabytes
                if memory is not host:
                    snapshot = memory.clone()  # on the stream of the call, before anything waits for other streams
                    host.copy_(snapshot)
                    torch.cuda.synchronize()
        if far is not None and memory is not host:
            torch.cuda.empty_cache()
        return {"returned": described}

    def _timed(self, submitted: Submitted, request: Mapping[str, Any]) -> dict[str, Any]:
        """Several calls: memory is as it was before each, and outputs are copied after it, on the stream of the call.

        The judge says when the calls begin, and is told when they have ended. Its own clock runs in between.
        """
        assert self._shared is not None and self._stopwatch is not None
        size, timing = request["size"], request["timing"]
        host = self._shared.memory[:size]
        self._move()
        ready = self._ready(submitted, request)
        memory = self._device_memory(host)
        inputs, outputs = self._tensors(memory, request)
        first = min(request["slots"][f"output {name}"]["offset"] for name in self._outputs)
        copies = self._shared.memory[size : size + timing["repeats"] * (size - first)].view(timing["repeats"], -1)
        series = TimedCalls(self._stopwatch, memory, first, request["seed"], timing)
        run = submitted.run if isinstance(submitted, Planned) else submitted
        if isinstance(submitted, Planned):
            known = [Slot.from_json(self._slots[name]) for name in submitted.names if name in self._slots]
            series.plan_with(lambda: submitted.plan(inputs), [(slot.offset, slot.end) for slot in known])
        series.prepare(ready or (lambda: run(inputs, dict(outputs))), outputs)
        self._answer(dict, dict)
        returned = series.run(protocol.read_header(self._read))
        self._answer(dict, dict)
        protocol.read_header(self._read)
        with Undisturbed():
            copies.copy_(series.snapshots)
            if memory is not host:
                host[:first].copy_(memory[:first])
        unhush()
        return {"returned": returned, "times": series.times()}

    def _ready(self, submitted: Submitted, request: Mapping[str, Any]) -> Callable[[], Any] | None:
        """The call, made once on the data that the previous call left on a GPU; None if it left nothing. After that,
        only new inputs can slow the first timed call. A call to be replayed is also captured there: the submission's
        code never runs on inputs before they are timed.

        Raises:
            RuntimeError: it cannot be captured.
        """
        graph = request["timing"]["graph"]
        if self._on_device is None or self._slots != request["slots"]:
            if graph:
                raise RuntimeError("a CUDA graph is captured on earlier inputs of the same shapes, and there are none")
            return None
        inputs, outputs = self._tensors(self._on_device[: request["size"]], request)
        run = submitted.run if isinstance(submitted, Planned) else submitted

        def call() -> Any:
            return run(inputs, dict(outputs))

        with torch.no_grad():
            submitted(inputs, dict(outputs))
        torch.cuda.synchronize()
        return captured(call) if graph else call

    def _move(self) -> None:
        """Moves the data on a GPU, and the kernel's future allocations, to other pages of GPU memory. The time
        depends slightly on these pages. Without enough room, nothing moves."""
        if self._on_device is None:
            return
        self._beside = None
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):
            self._beside = torch.empty(PAGE * secrets.randbelow(BESIDE), dtype=torch.uint8, device=self._device)
            self._on_device = self._on_device.clone()

    def _tensors(
        self, memory: torch.Tensor, request: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        self._slots = request["slots"]
        slots = {name: Slot.from_json(slot) for name, slot in self._slots.items()}
        inputs = {
            name: tensor_in(memory, slots[name]) if name in slots else request["numbers"][name] for name in self._inputs
        }
        return inputs, {name: tensor_in(memory, slots[f"output {name}"]) for name in self._outputs}

    def _device_memory(self, host: torch.Tensor) -> torch.Tensor:
        """The bytes on the submission's device: at the same address in every call, outside of series, that needs no
        more of them."""
        if self._device == "cpu":
            return host
        if self._on_device is None or len(self._on_device) < len(host):
            self._on_device = None
            self._on_device = torch.empty(len(host), dtype=torch.uint8, device=self._device)
        memory = self._on_device[: len(host)]
        memory.copy_(host)
        torch.cuda.synchronize()
        return memory

    def _print_to_judge(self) -> None:
        """Has the judge read what is printed here, and by what is started here."""
        _, descriptors, _, _ = socket.recv_fds(self._pipe, 1, 1)
        for number in (1, 2):
            os.dup2(descriptors[0], number)
        os.close(descriptors[0])
        for stream in (sys.stdout, sys.stderr):  # else it is lost if the process dies
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def _receive_memory(self, size: int) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._pipe, 1, 1)
        self._shared = SharedMemory(size, descriptors[0])
        self._shared.close()

    def _read(self, target: memoryview) -> None:
        while target:
            count = self._pipe.recv_into(target)
            if count == 0:
                raise EOFError
            target = target[count:]


def _bring_back(
    rows: Mapping[str, int], far: dict[str, Any], own: dict[str, Any], described: dict[str, Any] | None = None
) -> None:
    """Copies the rows of the case, which are behind so many others, and describes them as they are then."""
    for name, before in rows.items():
        own[name].copy_(far[name][before:])
        form = (described or {}).get(name, {})
        if form.get("shape"):
            form["shape"][0] -= before


def _known(request: Mapping[str, Any]) -> Submitted:
    """A real kernel of the Definition's own record, which the dataset verified: it may import this package."""
    from flashinfer_trace.families import family_of
    from flashinfer_trace.format.definition import Definition

    definition = Definition.from_dict(request["definition"], root=Path(request["root"]))
    (kernel,) = (one for one in family_of(definition).kernels if one.label == request["kernel"])
    draw = kernel.seeded
    if draw is not None:  # its adapter makes a seed of the inputs, for the harness; here each call has one
        return lambda inputs, outputs: draw(definition, inputs, torch.initial_seed() % (1 << 31))
    return lambda inputs, outputs: kernel.call(definition, inputs, outputs)


def _seed_afresh() -> None:
    """Seeds global generators as a new interpreter does: a fork has those of its parent, and draws what others draw."""
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


class _Hidden(importlib.abc.MetaPathFinder):
    """Refuses to import this package. A submission that takes this finder away finds the files where they are."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
            raise ModuleNotFoundError(f"{name} is not there for a submission, which stands on its own", name=name)


def _hide_package() -> None:
    """Takes this package from the submission: it must not answer with a reference or an oracle."""
    for name in [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Hidden())


def _watched() -> dict[str, object]:
    return {
        f"{owner}.{name}": getattr(_owner(owner), name, None) for owner, names in _WATCHED.items() for name in names
    }


def _replaced(before: Mapping[str, object]) -> list[str]:
    """Dotted names of the functions that are others than `before`, in order."""
    return [name for name, value in _watched().items() if value is not before[name]]


def _owner(path: str) -> object:
    if path in sys.modules:
        return sys.modules[path]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:  # a class
        parent, _, name = path.rpartition(".")
        return getattr(_owner(parent), name)


def error_line(error: BaseException, root: str | None = None) -> str:
    """Type and message of an error, and the first line of the submission on its way.

    Args:
        error: what it raised.
        root: of a Solution, the directory that contains its package.
    """
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    if root is not None and frames and isinstance(error, ModuleNotFoundError):
        hint = _own_import(str(error.name), frames[-1], Path(root))
        if hint:  # as an ImportError, because no package is missing
            return f"ImportError: {hint}"[:MAX_MESSAGE] + _place(frames[-1])
    kind = "" if isinstance(error, (CompileError, LoadError, Replaced, ReturnError)) else f"{type(error).__name__}: "
    frames = [one for one in frames if not one.filename.startswith(_TORCH)] or frames
    return f"{kind}{_message(error)}"[:MAX_MESSAGE] + (_place(frames[0]) if frames else "")


def own_traceback(error: BaseException, root: str | None = None) -> str:
    """The lines of the submission's own code that an error came through, as Python prints them; the last ones if they
    are many."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    text = "".join(traceback.format_list(frames)[-MAX_FRAMES:])
    return (text.replace(f"{root}/submission/", "") if root is not None else text)[-MAX_TEXT:]


def _message(error: BaseException) -> str:
    """The message of an error. The code that makes it may be the submission's."""
    try:
        return str(error)
    except BaseException as another:
        return f"its message cannot be read: __str__ raises {type(another).__name__}"


def _place(frame: traceback.FrameSummary) -> str:
    return f" ({os.path.basename(frame.filename)[-MAX_FILE:]}:{frame.lineno})"


def _own_import(name: str, frame: traceback.FrameSummary, root: Path) -> str:
    """The import to write instead, if a source of a Solution was imported as a top-level module; empty if none was.

    Sources are modules of one package: from the directory of the importing file, or from the package's own directory.
    """
    file, module = Path(frame.filename), name.partition(".")[0]
    if not module.isidentifier() or root not in file.parents:
        return ""
    package = root / file.relative_to(root).parts[0]
    for dots, directory in enumerate([file.parent, *file.parent.parents], start=1):
        source = next((one for one in (directory / f"{module}.py", directory / module) if one.exists()), None)
        if source is not None:
            instead = _relative(frame.line or "", module, "." * dots)
            return f"{source.name} is a source of the Solution, whose sources are one package: use `{instead}`"
        if directory == package:
            break
    return ""


def _relative(line: str, module: str, dots: str) -> str:
    """An import statement, made relative; a pattern of one if the line has another form."""
    if re.fullmatch(rf"from {module}[\w.]* import [\w, ]+", line):
        return f"from {dots}{line.removeprefix('from ')}"
    if re.fullmatch(rf"import {module}( as \w+)?", line):
        return f"from {dots} {line}"
    return f"from {dots}{module} import ..."
