"""Recorded runs and the static trace: what ran and is not in the trace, and which of its chains a run has shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.recording import PREPARING, RecordedCall, Recording
from tools.runtime_tracing.static import StaticTrace, entering, static


@dataclass(frozen=True)
class Launched:
    """A kernel that a run launched.

    Attributes:
        kernel: its dotted path.
        names: the names under which a static trace may know it: its last one or two parts, and those of what it calls.
        chain: from the call to the entry of the static trace.
    """

    kernel: str
    names: frozenset[str]
    chain: tuple[Frame, ...]


@dataclass(frozen=True)
class Share:
    """Of what ran, what the static trace has (`found`) and lacks (`missing`)."""

    found: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.found)} of {len(self.found) + len(self.missing)}"


@dataclass(frozen=True)
class Comparison:
    """One run and a static trace.

    Attributes:
        run: the name of its configuration.
        unrelated: why the two cannot be compared; "" if they can.
        kernels, lines, chains: what ran below the entries of the static trace.
        elsewhere: kernels that ran outside of these entries.
        extra: kernels that the static trace lists for this configuration and that did not run.
    """

    run: str
    unrelated: str
    kernels: Share = Share((), ())
    lines: Share = Share((), ())
    chains: Share = Share((), ())
    elsewhere: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        """Whether something ran that the static trace lacks."""
        return any(share.missing for share in (self.kernels, self.lines, self.chains))


def compare(run: Recording, static: StaticTrace) -> Comparison:
    """What a run launched, looked up in a static trace."""
    version = run.document["versions"]["sglang"]
    if version != static.version:
        return Comparison(run.name, f"the run is of SGLang {version}, the static trace of {static.version}")
    if run.name not in static.configurations:
        return Comparison(run.name, "the static trace lacks this configuration")
    inside, elsewhere = launched(run, static)
    chains = static.chains(run.name)
    known = {name for name, _ in chains}
    lines = {(name, chain[0]) for name, chain in chains}
    ran = {name for one in inside for name in one.names}
    return Comparison(
        run.name,
        "",
        _share((one.kernel, not one.names.isdisjoint(known)) for one in inside),
        _share((f"{one.kernel} at {_place(one.chain[0])}", _has(one, one.chain[0], lines)) for one in inside),
        _share((f"{one.kernel}: {_text(one.chain)}", _has(one, one.chain, chains)) for one in inside),
        tuple(dict.fromkeys(elsewhere)),
        tuple(sorted({name for name, _ in static.chains(run.name, _phases(run))} - ran)),
    )


def _phases(run: Recording) -> frozenset[str]:
    """The phases of a run, as the static trace calls them."""
    return frozenset("load" if call.phase == "capture" else call.phase for call in run.calls)


def seen(runs: Iterable[Recording], static: StaticTrace) -> list[list[list[str]]]:
    """For each kernel of the static trace and each of its chains, the names of the runs in which that chain ran."""
    found: list[list[list[str]]] = [[[] for _ in kernel.chains] for kernel in static.kernels]
    places: dict[tuple[Any, ...], list[list[str]]] = {}
    for kernel, chains in zip(static.kernels, found, strict=True):
        for chain, names in zip(kernel.chains, chains, strict=True):
            places.setdefault((kernel.name, chain), []).append(names)
    for run in runs:
        if run.document["versions"]["sglang"] != static.version:
            continue
        for one in launched(run, static)[0]:
            for name in one.names:
                for names in places.get((name, one.chain), ()):
                    if run.name not in names:
                        names.append(run.name)
    return found


def marked(document: dict[str, Any], runs: Iterable[Recording]) -> dict[str, Any]:
    """A document of a static trace, with the runs in which each chain was seen."""
    shown = seen(runs, static(document, Path("kernel_traces.json")))
    for kernel, chains in zip(document["kernels"], shown, strict=True):
        for chain, names in zip(kernel["chains"], chains, strict=True):
            chain["seen"] = names
    return document


def launched(run: Recording, static: StaticTrace) -> tuple[list[Launched], list[str]]:
    """The distinct kernels and chains of a run below the entries of a static trace, and the kernels outside of them."""
    entries = static.entries()
    inside: dict[tuple[Any, ...], Launched] = {}
    elsewhere = []
    for call in run.calls:
        if not is_kernel(call, run.stand_ins):
            continue
        end = next((index for index, frame in enumerate(call.stack) if (frame.file, frame.function) in entries), None)
        if end is None:
            elsewhere.append(call.kernel)
            continue
        chain = entering(call.stack[: end + 1])
        inside.setdefault((call.kernel, chain), Launched(call.kernel, _names(call), chain))
    return list(inside.values()), elsewhere


def is_kernel(call: RecordedCall, stand_ins: Sequence[str]) -> bool:
    """Whether a recorded call is one of a kernel: not PyTorch's, no preparation, and it launched something.

    What a CUDA graph captures is launched when it is replayed, so a captured call counts. So does a stand-in.
    """
    if call.library in ("", "torch") or call.kernel.rpartition(".")[2] in PREPARING:
        return False
    if call.kernel.startswith("torch.ops.sglang."):  # an operator in Python: what it calls is recorded by itself
        return False
    return bool(call.launches) or call.phase == "capture" or call.kernel in stand_ins


def _names(call: RecordedCall) -> frozenset[str]:
    parts = [path.split(".") for path in (call.kernel, *call.through)]
    inside = {frame.function for frame in call.stack if not frame.file.startswith("sglang/")}
    return frozenset(".".join(part[-length:]) for part in parts for length in (1, 2)) | inside


def _has(one: Launched, what: object, known: set[tuple[str, Any]]) -> bool:
    return any((name, what) in known for name in one.names)


def _share(items: Iterable[tuple[str, bool]]) -> Share:
    """Each text once; found if any of those that it stands for was."""
    merged: dict[str, bool] = {}
    for text, found in items:
        merged[text] = merged.get(text, False) or found
    return Share(*(tuple(text for text, found in merged.items() if found is wanted) for wanted in (True, False)))


def _place(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}"


def _text(chain: Sequence[Frame]) -> str:
    return " < ".join(f"{frame.function} ({_place(frame)})" for frame in chain)


def report(comparisons: Sequence[Comparison], static: StaticTrace, shown: Sequence[Sequence[Sequence[str]]]) -> str:
    """The comparisons as text: a line for each run, then what is missing, each once, then what was seen."""
    lines = []
    width = max((len(one.run) for one in comparisons), default=0)
    for one in comparisons:
        figures = f"kernels {one.kernels}, call lines {one.lines}, chains {one.chains}"
        figures += f"; elsewhere {len(one.elsewhere)}, not launched {', '.join(one.extra) or 'none'}"
        lines.append(f"{one.run:{width}}  {one.unrelated or figures}")
    for title, shares in (
        ("Kernels", [one.kernels for one in comparisons]),
        ("Call lines", [one.lines for one in comparisons]),
        ("Chains", [one.chains for one in comparisons]),
    ):
        missing = list(dict.fromkeys(text for share in shares for text in share.missing))
        if missing:
            lines += ["", f"{title} that ran and are not in {static.path.name}:", *(f"  {text}" for text in missing)]
    chains = [names for kernel in shown for names in kernel]
    kernels = sum(any(kernel) for kernel in shown)
    lines += ["", f"Seen in a run: {sum(map(bool, chains))} of {len(chains)} chains, {kernels} of {len(shown)} kernels"]
    return "\n".join(lines)
