"""Whether every model file of a release is evaluated, and its chains pass the check against the sources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.kernel_tracing.configuration.listed import Configuration
from tools.kernel_tracing.configuration.model_files import model_files
from tools.kernel_tracing.report.evaluation import Evaluation, Progress, evaluate
from tools.kernel_tracing.report.merge import PLATFORM, merged
from tools.kernel_tracing.report.ops import in_model
from tools.kernel_tracing.report.trace_files import dumps
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import SourceTree, find_sources
from tools.kernel_tracing.verify.check import check


class Tried(NamedTuple):
    """What came of the model files of a release.

    Attributes:
        files: files that serve a model.
        kernels, chains: of their merged trace.
        silent: files without a chain through their own code, each with the reason.
        problems: files that could not be evaluated, and what the check found, one line each.
    """

    files: int
    kernels: int
    chains: int
    silent: dict[str, str]
    problems: list[str]


def tried(sources: Path, names: Sequence[str] = (), progress: Progress | None = None) -> Tried:
    """Evaluates each model file with made-up sizes, and checks the chains.

    Args:
        sources: the directory of the sources.
        names: the model files, without suffix; all if there are none.

    Raises:
        SourcesError: there are no sources.
        ConfigurationError: the sizes are malformed, or no file serves a model.
    """
    tree = find_sources(sources)
    chosen = [one for one in model_files(tree) if not names or one.name in names]
    failed: list[str] = []
    evaluations = list(_evaluations(chosen, tree, failed, progress))
    document = merged(evaluations, tree, PLATFORM, "all")
    chains = sum(len(kernel["chains"]) for kernel in document["kernels"])
    found = check(json.loads(dumps(document)), sources)
    silent = {one.configuration.name: _reason(one) for one in evaluations if _file(one) not in _model_files(one)}
    return Tried(len(chosen), len(document["kernels"]), chains, silent, failed + found)


def _evaluations(
    chosen: Sequence[Configuration], tree: SourceTree, failed: list[str], progress: Progress | None
) -> Iterator[Evaluation]:
    index = Index(tree)
    for number, one in enumerate(chosen, 1):
        try:
            yield from evaluate([one], index)
        except Exception as error:  # whatever stops one file, the others are tried
            failed.append(f"{serving_steps.MODEL_FILES}{one.name}.py: not evaluated ({error!r})")
        if progress is not None:
            progress("evaluating model files", number, len(chosen))


def _file(evaluation: Evaluation) -> str:
    return f"{serving_steps.MODEL_FILES}{evaluation.configuration.name}.py"


def _model_files(evaluation: Evaluation) -> list[str]:
    """The model files that the chains pass."""
    return sorted({frame.file for call in evaluation.kernels for frame in call.frames if in_model(frame.file)})


def _reason(evaluation: Evaluation) -> str:
    """Why no chain passes the model's own file: what was met there, or whose code runs instead."""
    file, files = _file(evaluation), _model_files(evaluation)
    met = [text for text in evaluation.problems if text.startswith(file)]
    raised = [text for text in met if ": raises " in text]
    if raised:
        return f"not evaluated further: {raised[0]}"
    if files:
        return f"its kernels are called in {', '.join(Path(one).name for one in files)}"
    if met:
        return f"not evaluated: {met[0]}"
    return "what it calls is in no file of the sources"
