"""The program of a worker process: it confines itself, then answers requests with what the reference returns.

Once a reference was loaded, nothing here can be trusted any more: a hostile one may replace it all. The parent judges
the outputs, whoever sent them; what is found here about writes, state and random numbers is for honest mistakes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashinfer_trace.format.reference import load_run
from flashinfer_trace.sandbox import protocol, state
from flashinfer_trace.sandbox.confine import confine
from flashinfer_trace.sandbox.limits import MAX_MESSAGE, Failed
from flashinfer_trace.sandbox.ownership import not_owned

_PIPE = 3

#: Settings and functions as they were before any reference was loaded.
Baseline = tuple[dict[str, object], dict[str, tuple[tuple[str, ...], tuple[object, ...]]]]


def prepare(_: object) -> tuple[int, Callable[[socket.socket], None]]:
    """Gets the server of references ready (see `fork_server.Service`): a process opens no files, so all is loaded."""
    _warm_up()
    baseline = state.settings(), state.functions()
    _keep_freed_memory()
    gc.freeze()  # a collection in a process would touch, and so copy, all memory that it shares
    return 1, functools.partial(_serve, baseline=baseline)


def _keep_freed_memory() -> None:
    """Has glibc reuse large blocks: the kernel need not map and clear them for each call."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def _warm_up() -> None:
    """Loads what torch loads when first used."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(4, 4, dtype=dtype)
        torch.einsum("ij,jk->ik", a, a @ a).softmax(-1).sum().item()
    torch.linalg.vector_norm(torch.ones(4))
    repr(torch.ones(1))
    torch.get_default_device()


def _serve(pipe: socket.socket, baseline: Baseline) -> None:
    """Confines this process within the limits of the first request, then answers the others until the pipe closes."""
    try:
        descriptor = pipe.detach()
        limits = protocol.read_header(functools.partial(_read, descriptor=descriptor))
        level = confine(limits["memory_bytes"], descriptor)
        torch.set_num_threads(limits["threads"])
        torch.set_float32_matmul_precision("highest")
        _write(protocol.pack_header({"level": level}))
        request = protocol.read_header(_read)
        run = _load(request)
        baseline[0]["the number of threads"] = limits["threads"]
        while True:
            request = protocol.read_header(_read)
            if "source" in request:  # the same reference at other sizes
                run = _load(request)
                continue
            values = protocol.read_values(request["values"], _read, 1 << 62, strided=True)
            inputs = dict(zip(request["names"], values, strict=False))
            uniform = values[len(inputs)] if len(values) > len(inputs) else None
            _answer(functools.partial(_run, run, inputs, uniform, request, baseline, limits["output_bytes"]))
    except EOFError:
        os._exit(0)
    except BaseException:
        os._exit(1)


def _load(request: Mapping[str, Any]) -> Callable[..., Any]:
    """The reference of the first request; one that cannot be loaded answers every request with the reason."""
    try:
        return load_run(request["source"], request["label"])
    except BaseException as error:
        message = _describe(error)

        def fail(*_: Any) -> None:
            raise Failed("not-loaded", message)

        return fail


def _run(
    run: Callable[..., Any],
    inputs: Mapping[str, Any],
    uniform: torch.Tensor | None,
    request: Mapping[str, Any],
    baseline: Baseline,
    output_bytes: int,
) -> list[Any]:
    """The outputs of one call, or a `Failed` that names what the reference did."""
    guard = state.InputGuard(inputs)
    torch.default_generator.manual_seed(request["seed"])
    before = state.random_state()
    with state.numbers_drawn(uniform), torch.no_grad():
        result = run(*inputs.values())
        if torch.is_grad_enabled():
            raise Failed("state", "it changed grad mode")
    outputs = list(result) if isinstance(result, tuple) else [result]
    if isinstance(result, (list, dict)):
        raise Failed("outputs", f"run() returned a {type(result).__name__}; it must return a tensor or a tuple")
    # The guard compares with torch's functions: whether they are still the same comes first.
    if replaced := state.changed_functions(baseline[1]):
        raise Failed("state", f"it replaced {', '.join(replaced[:5])}")
    if changed := guard.changed():
        raise Failed("inputs", f"it changed its inputs {changed}; it must not write to them")
    if written := guard.written():
        raise Failed("inputs", f"it wrote to its inputs {written} and restored them; it must not write to them")
    if settings := state.changed_settings(baseline[0]):
        raise Failed("state", f"it changed {', '.join(settings)}")
    if not request["draws"] and state.random_state() != before:
        raise Failed("random", "it draws random numbers; only sampling operations may")
    named = {name: value for name, value in zip(request["outputs"], outputs, strict=False) if _is_dense(value)}
    if shared := not_owned(named, inputs):
        raise Failed("memory-shared", "; ".join(shared))
    size = sum(value.numel() * value.element_size() for value in outputs if isinstance(value, torch.Tensor))
    if size > output_bytes:
        raise Failed("output", f"its outputs take {size} bytes; at most {output_bytes} are read")
    return outputs


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _answer(compute: Callable[[], list[Any]]) -> None:
    try:
        described = [protocol.describe_value(value, strided=False) for value in compute()]
    except Failed as failure:
        _write(protocol.pack_header({"failed": [failure.kind, failure.message]}))
        return
    except BaseException as error:
        kind = "memory" if isinstance(error, MemoryError) or "can't allocate memory" in str(error) else "raised"
        _write(protocol.pack_header({"failed": [kind, _describe(error)]}))
        return
    header = protocol.pack_header({"values": [header for header, _ in described]})
    for piece in protocol.in_few_pieces([header, *(data for _, data in described)]):
        _write(piece)


def _describe(error: BaseException) -> str:
    """Type and message of an error, with the line of the reference that it comes from."""
    line = 0
    with contextlib.suppress(Exception):
        frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename.startswith("<reference")]
        line = frames[-1].f_lineno if frames else 0
    where = f" (reference line {line})" if line else ""
    refused = "; a worker opens no files" if isinstance(error, (OSError, ImportError)) else ""
    return f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]}{refused}{where}"


def _read(target: memoryview, descriptor: int = _PIPE) -> None:
    while target:
        count = os.readv(descriptor, [target])
        if count == 0:
            raise EOFError
        target = target[count:]


def _write(data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(_PIPE, view) :]
