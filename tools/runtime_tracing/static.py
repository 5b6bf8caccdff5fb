"""The static trace, as far as recorded runs are compared with it. Only this module knows the form of its file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.kernel_tracing.report.trace_files import load_traces
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.recording import RecordingError

_JIT = "sglang/jit_kernel/"


@dataclass(frozen=True)
class StaticKernel:
    """A kernel of the static trace.

    Attributes:
        name: as the trace has it: a function, or ``Class.method``.
        chains: from the line of SGLang that calls it to the entry. See `entering`.
        configurations: for each chain, the configurations that take it, each with the phases in which it does.
    """

    name: str
    chains: tuple[tuple[Frame, ...], ...]
    configurations: tuple[Mapping[str, Sequence[str]], ...]


@dataclass(frozen=True)
class StaticTrace:
    """A static trace.

    Attributes:
        path: its file.
        version: of the SGLang that was read.
        kernels: in the order of the file.
        configurations: names of what it was made from.
    """

    path: Path
    version: str
    kernels: tuple[StaticKernel, ...]
    configurations: frozenset[str]

    def chains(self, configuration: str, phases: Collection[str] | None = None) -> set[tuple[str, tuple[Frame, ...]]]:
        """Kernel and chain of all that a configuration takes, or of what it takes in some phases."""
        return {
            (kernel.name, chain)
            for kernel in self.kernels
            for chain, names in zip(kernel.chains, kernel.configurations, strict=True)
            if configuration in names and (phases is None or not set(phases).isdisjoint(names[configuration]))
        }

    def entries(self) -> set[tuple[str, str]]:
        """File and function of every entry: where its chains end."""
        return {(chain[-1].file, chain[-1].function) for kernel in self.kernels for chain in kernel.chains}


def entering(chain: Sequence[Frame]) -> tuple[Frame, ...]:
    """The chain from the line on which SGLang enters a kernel library, as recordings have it.

    ``sglang.jit_kernel`` is one of these libraries: its Python functions are kernels like those of sgl-kernel.
    """
    inside = 0
    while inside < len(chain) - 1 and (
        chain[inside].file.startswith(_JIT) or not chain[inside].file.startswith("sglang/")
    ):
        inside += 1
    return tuple(chain[inside:])


def read_static(path: Path) -> StaticTrace:
    """Reads ``kernel_traces.json``.

    Raises:
        RecordingError: it cannot be read, or has another form.
    """
    return static(read_document(path), path)


def read_document(path: Path) -> dict[str, Any]:
    """The document of a static trace.

    Raises:
        RecordingError: it cannot be read, or has another form.
    """
    try:
        return load_traces(path)
    except OSError as error:
        fix = "write it again: python -m tools.kernel_tracing --json FILE"
        raise RecordingError(f"{path}: is no static trace ({error}); {fix}") from None


def static(document: Mapping[str, Any], path: Path) -> StaticTrace:
    """A document, as far as runs are compared with it."""
    names = frozenset(one["name"] for one in document["configurations"])
    kernels = tuple(map(_kernel, document["kernels"]))
    return StaticTrace(path, document["sources"]["sglang"]["version"], kernels, names)


def _kernel(kernel: Mapping[str, Any]) -> StaticKernel:
    chains = kernel["chains"]
    frames = tuple(_chain(chain["frames"]) for chain in chains)
    return StaticKernel(kernel["name"], frames, tuple(chain["configurations"] for chain in chains))


def _chain(frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return entering([Frame(one["file"], one["line"], one["function"]) for one in frames])
