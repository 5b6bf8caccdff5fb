"""The calls of recorded runs in execution order, each with the Definitions that describe it, or what is missing."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashinfer_trace import Definition
from flashinfer_trace.dataset.evidence import kernels_today, proofs
from flashinfer_trace.format.naming import family_name, load_naming
from tools.extract.sizes import new_sizes
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.matching import Evidence, Standing
from tools.runtime_tracing.recording import RecordedCall, Recording
from tools.trace.calls import TORCH, TracedCall, in_model, traced

#: Phase -> the mode that it counts as.
MODES = {"prefill": "prefill", "extend": "prefill", "verify": "prefill", "decode": "decode", "capture": "decode"}


#: Name of a Definition -> its family and its const axes.
Sizes = Mapping[str, tuple[str, Mapping[str, int]]]
#: State, names, sizes and detail of a call.
Found = tuple["State", tuple[str, ...], Sizes, str]


class State(enum.Enum):
    """How the dataset covers a call."""

    VERIFIED = "verified here"
    EXISTS = "exists, not by this kernel"
    NEW_SIZE = "new size"
    NO_FAMILY = "no family"
    PYTORCH = "PyTorch"


@dataclass(frozen=True)
class Row:
    """One call of a model, with all calls that are like it.

    Attributes:
        model: the model of the run.
        op: the op, or what the work belongs to.
        kernel: its dotted path.
        state: what the dataset says.
        definitions: names of the Definitions that describe it; of a new size, the names they would have.
        sizes: of a new size: name -> family and const axes.
        detail: why nothing describes it, with the kernel's own signature.
        site: the line of the model, or else of SGLang, that calls it.
        modes: prefill, decode, or both.
        runs: the runs that make it.
    """

    model: str
    op: str
    kernel: str
    state: State
    definitions: tuple[str, ...]
    site: str
    sizes: Sizes = field(default_factory=dict)
    detail: str = ""
    modes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


class Dataset:
    """The Definitions of the dataset: by any kernel of a family, and by kernels that ran."""

    def __init__(self, root: Path, definitions: Iterable[Definition]) -> None:
        self.naming = load_naming(root)
        self.definitions = {one.name: one for one in definitions}
        every = self.definitions.values()
        ran = {one.name: [entry.path for entry in proofs(root, one)] for one in every}
        known = {one.name: [kernel.path for kernel in kernels_today(root, one).values()] for one in every}
        self._ran, self._known = Evidence(every, ran), Evidence(every, known)
        self._families: dict[str, list[Definition]] = defaultdict(list)
        for one in every:
            if (family := family_name(one, self.naming)) is not None:
                self._families[family].append(one)
        self._found: dict[tuple[object, ...], Found] = {}

    def of(self, call: RecordedCall, window: int | None) -> Found:
        """How the dataset covers a call; `window` is as `matching.computes` takes it."""
        like = call.library, call.kernel, call.arguments, call.through, window
        if like not in self._found:
            self._found[like] = self._of(call, window)
        return self._found[like]

    def _of(self, call: RecordedCall, window: int | None) -> Found:
        standing, names = self._ran.of(call, window)
        if standing is Standing.VERIFIED:
            return State.VERIFIED, names, {}, ""
        standing, names = self._known.of(call, window)
        if standing is Standing.VERIFIED:
            return State.EXISTS, names, {}, ""
        none = State.PYTORCH if call.library == TORCH else State.NO_FAMILY
        if standing is Standing.UNKNOWN:
            return none, (), {}, _signature(call)
        families = self._families_of(call)
        by_family = {
            name: new_sizes(call, self.naming.families[name], self._families[name], window) for name in families
        }
        sizes: dict[str, tuple[str, Mapping[str, int]]] = {}
        first = [*self.naming.families].index
        for family, of_it in by_family.items():
            for name, axes in of_it.items():  # two families have one name for a size; it is that of the first
                if name not in sizes or first(family) < first(sizes[name][0]):
                    sizes[name] = family, axes
        certain = all(len(of_it) <= 1 for of_it in by_family.values())
        if sizes and certain and not sizes.keys() & self.definitions.keys():
            return State.NEW_SIZE, tuple(sizes), sizes, ""
        which = f"; it could be {' or '.join(sizes)}" if sizes else ""
        detail = f"other sizes or settings than {', '.join(families)} have{which}: {_signature(call)}"
        return none, (), {}, detail

    def _families_of(self, call: RecordedCall) -> list[str]:
        names = (family_name(one, self.naming) for one in self._known.definitions_of(call))
        return list(dict.fromkeys(name for name in names if name is not None))


def rows_of(runs: Sequence[Recording], dataset: Dataset, modes: Sequence[str], merged: bool = True) -> list[Row]:
    """The calls of runs in execution order: those of the first run, then what the others add.

    Args:
        runs: the default first.
        dataset: what they are compared with.
        modes: prefill, decode, or both.
        merged: whether calls of one op and kernel with one state are one row; otherwise each run has its own.
    """
    found: dict[tuple[object, ...], Row] = {}
    for run in runs:
        for row in _rows(run, dataset):
            key = (row.model, row.op, row.kernel, row.state, row.definitions, row.site, merged or row.runs)
            if set(row.modes) <= set(modes):
                known = found.get(key, row)
                modes_of, runs_of = dict.fromkeys((*known.modes, *row.modes)), dict.fromkeys((*known.runs, *row.runs))
                found[key] = dataclasses.replace(known, modes=tuple(modes_of), runs=tuple(runs_of))
    return list(found.values())


def _rows(run: Recording, dataset: Dataset) -> Iterator[Row]:
    window = run.document["model_config"].get("sliding_window")
    for call in traced(dataclasses.replace(run, calls=tuple(composed(run.calls)))):
        state, names, sizes, detail = dataset.of(call.recorded, window)
        mode = MODES.get(call.phase, "decode")
        about = (call.op, call.kernel.path, state, names, _site(call), sizes, detail)
        yield Row(str(run.document["model"]), *about, modes=(mode,), runs=(run.name,))


def _site(call: TracedCall) -> str:
    frame = next((frame for frame in call.frames if in_model(frame.file)), call.frames[0])
    return f"{frame.file}:{frame.line}"


def _signature(call: RecordedCall) -> str:
    return f"{call.kernel.rpartition('.')[2]}({call.arguments})"
