"""Evaluations of several configurations, as plain data that processes can exchange."""

from __future__ import annotations

import ast
import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tools.kernel_tracing.configuration.listed import Configuration, evaluated
from tools.kernel_tracing.evaluator.core import Event, Hop
from tools.kernel_tracing.evaluator.serving import Serving, Step
from tools.kernel_tracing.report.ops import called_name, use
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import SourceTree, find_sources

#: The longest text of a call or a test.
MAX_CALL = 70
#: Configurations that a process evaluates before it takes the next ones: those of one model share parsed files.
CHUNK = 2
Progress = Callable[[str, int, int], None]
#: Line and column, in bytes.
Place = tuple[int, int]


class Frame(NamedTuple):
    """One frame of a chain: the call that it makes, and where."""

    file: str
    line: int
    function: str
    call: str


@dataclass(frozen=True)
class Call:
    """A kernel, or a module of the model, that a configuration calls, with one chain.

    Attributes:
        phase: load, prefill, decode or extend.
        name, source, file, line: the kernel and its definition; for a module, its class and the source "torch".
        frames: the chain, the kernel's call first.
        op, position, group, when: see `ops.Use`.
        undecided: the tests along the chain that the configuration does not decide.
        called: for each frame, the last name of what it calls.
        places: for each frame, where its call ends: line and column. Python evaluates the calls of a function's text in
            the order of their ends, because a call follows its arguments.
        order: grows with time.
    """

    phase: str
    name: str
    source: str
    file: str
    line: int
    frames: tuple[Frame, ...]
    op: str
    position: int
    group: str
    when: str
    undecided: tuple[str, ...]
    called: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    order: int = 0


@dataclass
class Evaluation:
    """What one configuration runs; `resolved` and `problems` are those of `Step`."""

    configuration: Configuration
    kernels: list[Call]
    modules: list[Call]
    resolved: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)


def evaluate(configurations: Sequence[Configuration], index: Index) -> Iterator[Evaluation]:
    """Evaluates configurations in this process.

    Python's search for garbage would take a quarter of the time. It runs once after each configuration, and leaves out
    what was known before, such as syntax trees.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        for one in configurations:
            gc.freeze()
            trees = index.sources.parsed
            step = Serving(index, evaluated(one)).run()
            found = _evaluation(one, step, index.sources)
            del step
            if index.sources.parsed == trees:
                gc.collect()
            yield found
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()


def evaluate_all(
    configurations: Sequence[Configuration], sources: Path, jobs: int = 1, progress: Progress | None = None
) -> list[Evaluation]:
    """Evaluates configurations in `jobs` processes; the result is in their order, whatever their number."""
    found: list[Evaluation] = []
    for one in _evaluations(configurations, sources, jobs):
        found.append(one)
        if progress is not None:
            progress("evaluating configurations", len(found), len(configurations))
    return found


def _evaluations(configurations: Sequence[Configuration], sources: Path, jobs: int) -> Iterable[Evaluation]:
    if jobs <= 1 or len(configurations) <= CHUNK:
        yield from evaluate(configurations, index_of(sources))
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(configurations)), gc.disable) as pool:
        yield from pool.imap(_work, [(one, sources) for one in configurations], chunksize=CHUNK)


def _work(task: tuple[Configuration, Path]) -> Evaluation:
    configuration, sources = task
    return next(evaluate([configuration], index_of(sources)))


@lru_cache(maxsize=2)
def index_of(sources: Path) -> Index:
    """The index of a directory of sources, which all evaluations of this process share."""
    return Index(find_sources(sources))


def _evaluation(configuration: Configuration, step: Step, sources: SourceTree) -> Evaluation:
    texts = Texts(sources)
    kernels = [call for event in step.events if (call := _call(event, texts)) and _is_shown(call)]
    steps = [event for event in step.modules if event.phase not in ("load", *serving_steps.PARTIAL)]
    modules = [call for event in steps if (call := _call(event, texts))]
    return Evaluation(configuration, kernels, modules, step.resolved, step.problems)


def _is_shown(call: Call) -> bool:
    return serving_steps.PARTIAL.get(call.phase, call.group) == call.group


def _call(event: Event, texts: Texts) -> Call | None:
    chain = [hop for hop in event.chain if not hop.file.startswith(serving_steps.STARTS)]
    if not chain:
        return None  # what starts a step calls it itself
    found = use(chain, event.name)
    undecided = [test_text(test.node, test.negated) for hop in chain for test in hop.tests if test.open]
    frames = tuple(texts.frame(hop) for hop in chain)
    where = (event.phase, event.name, event.source, event.file, event.line)
    called = tuple(called_name(hop.call) if hop.call is not None else hop.function for hop in chain)
    use_of = (found.op, found.position, found.group, found.when)
    places = tuple(_place(hop) for hop in chain)
    return Call(*where, frames, *use_of, tuple(dict.fromkeys(undecided)), called, places, event.order)


def _place(hop: Hop) -> Place:
    node = hop.call
    return (getattr(node, "end_lineno", None) or hop.line, getattr(node, "end_col_offset", None) or 0)


def test_text(test: ast.expr, negated: bool) -> str:
    """A test as one line."""
    text = " ".join(ast.unparse(test).split())
    return f"not ({text})" if negated else text


class Texts:
    """The frames of hops, with the calls as the sources write them."""

    def __init__(self, sources: SourceTree) -> None:
        self.sources = sources
        self._modules = {file: module for module, file in sources.files.items()}
        self._texts: dict[ast.AST, str] = {}

    def frame(self, hop: Hop) -> Frame:
        """The frame of a hop."""
        return Frame(hop.file, hop.line, hop.function, self._text(hop))

    def _text(self, hop: Hop) -> str:
        if hop.call is None:
            return ""
        known = self._texts.get(hop.call)
        if known is None:
            known = " ".join(_segment(self.sources.lines(self._modules[hop.file]), hop.call).split())
            if len(known) > MAX_CALL:
                known = known[: MAX_CALL - 3].rstrip() + "..."
            self._texts[hop.call] = known
        return known


def _segment(lines: list[bytes], node: ast.AST) -> str:
    """The source of a node; columns count UTF-8 bytes."""
    first, last = getattr(node, "lineno", 1) - 1, getattr(node, "end_lineno", 1) - 1
    chosen = list(lines[first : last + 1])
    chosen[-1] = chosen[-1][: getattr(node, "end_col_offset", 0)]
    chosen[0] = chosen[0][getattr(node, "col_offset", 0) :]
    return b" ".join(chosen).decode(errors="replace")
