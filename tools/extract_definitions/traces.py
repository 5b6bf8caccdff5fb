"""Which kernels the code of a model calls, by op and serving stage: a digest of its op trace.

The op trace is that of the listed configurations of the architecture, each decided by the evaluator. A configuration
that the list lacks is evaluated with a few settings of the server (`VARIANTS`).

Digests of the models under `models/` are committed in `traces/digests/`, so that extraction needs no sources. If
the given sources differ from those of the digest, or if an architecture has no digest, the tracer runs again.

The digests are of sglang 0.5.8, whose code the recipes understand. Beside each digest lies what the code passes
(`traces/model_code/`, see model_code.py).

python -m tools.fetch_sources --release 0.5.8 --dest .sources-0.5.8      # the sources, if they are not there yet
python -m tools.extract_definitions.traces [ARCHITECTURE ...]     # write both from .sources-0.5.8 (default: all)
python -m tools.extract_definitions.traces --code                 # only traces/model_code/, which needs no tracing
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.format.files import Lines, laid_out, write_text
from flashinfer_trace.format.json_source import TRACES, load_object
from tools.extract_definitions import model_code
from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.model_code import MODELS, ModelCode, code_from, read_code
from tools.kernel_tracing.configuration.checks import check_experts
from tools.kernel_tracing.configuration.limits import check_server
from tools.kernel_tracing.configuration.listed import Configuration, configurations
from tools.kernel_tracing.configuration.listed import Model as ListedModel
from tools.kernel_tracing.configuration.requested import ConfigurationError, Server, check_parts, shortened
from tools.kernel_tracing.report.evaluation import Evaluation, Progress, evaluate
from tools.kernel_tracing.report.merge import PLATFORM
from tools.kernel_tracing.report.refusals import failure, refusal
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import SourcesError, SourceTree, fetching, find_sources
from tools.op_tracing.trace import trace
from tools.shared.command import end_with

STAGES = ("prefill", "decode")
#: Stands among the kernels of an op for PyTorch itself.
TORCH = "torch:matmul"
#: The release of the digests, and where its sources are.
RELEASE = "0.5.8"
SOURCES = Path(f".sources-{RELEASE}")
#: How the phase of a trace begins, in calls of `Progress`.
TRACING = "tracing"
COMMITTED = Path(__file__).resolve().parents[2] / "traces" / "digests"
CODE = COMMITTED.parent / "model_code"
#: Server arguments and GPU with which a model that no configuration has is evaluated.
VARIANTS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({}, "sm90"),
    ({"attention_backend": "flashinfer"}, "sm90"),
    ({"attention_backend": "triton"}, "sm90"),
    ({}, "sm100"),
)
#: Phases of a trace -> stages. An extend step is a prefill of which a part is cached; both stages may sample by min-p.
_STAGES = {"prefill": ("prefill",), "extend": ("prefill",), "decode": ("decode",), "min_p": STAGES}
#: The same for the forward of a model: what a CUDA graph captures while the server starts, each decode replays.
_FORWARD_STAGES = {**_STAGES, "load": ("decode",)}

Kernels = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Op:
    """One op of a model.

    Attributes:
        name: what the model's code calls it.
        group: "" for an op of the forward pass; for others, what the work belongs to, such as `sampling`.
        kernels: `<source>:<name>` of each kernel that can implement it -> the stages that call it. Empty if torch
            alone computes it.
    """

    name: str
    group: str
    kernels: Kernels


@dataclass(frozen=True)
class Usage:
    """The ops of one architecture, and what its code passes to them."""

    architecture: str
    sources: Mapping[str, Mapping[str, str]]
    ops: tuple[Op, ...]
    code: ModelCode

    def op(self, name: str) -> Op | None:
        """The op of that name in the forward pass or the sampler, None if the model has none."""
        return next((op for op in self.ops if op.name == name and op.group in ("", "sampling")), None)


def usage_of(
    architecture: str,
    sources: Path | None,
    progress: Progress | None = None,
    config: Mapping[str, Any] | None = None,
) -> Usage:
    """What a model of this architecture calls.

    Args:
        sources: the directory of the sources; if it is None or missing, only committed digests are used.
        config: the model's configuration, which is evaluated if no listed one has the architecture.

    Raises:
        ExtractionError: no digest is committed and there are no sources, or the sources do not define the architecture.
    """
    path = COMMITTED / f"{architecture}.json"
    committed = _read(architecture) if path.is_file() else None
    if sources is None or not sources.is_dir():
        if committed is None:
            known = ", ".join(sorted(one.stem for one in COMMITTED.glob("*.json")))
            raise ExtractionError(
                f"no trace of the architecture {architecture}; there are {known}. To trace it, get the sources: "
                f"{fetching(SOURCES, RELEASE)}"
            )
        return committed
    try:
        tree = find_sources(sources, release=RELEASE)
    except SourcesError as error:
        raise ExtractionError(str(error)) from error
    if committed is not None and committed.sources == tree.describe():
        return committed
    if progress is not None:
        progress(f"{TRACING} {architecture}", 0, 1)
    code = code_of(architecture, tree)
    return usage_from(digest(architecture, Index(tree), config), code)


def usage_of_server(
    architecture: str, sources: Path, config: Mapping[str, Any], server: Server
) -> tuple[Usage, Evaluation]:
    """What a model calls where it is served in one way, and the evaluation from which that follows.

    Args:
        sources: the directory of the sources, without which nothing can be evaluated.
        config: the model's configuration.

    Raises:
        ExtractionError: the sources are missing, lack the architecture, or do not have these server arguments; or the
            model cannot be served so.
    """
    try:
        tree = find_sources(sources, release=RELEASE)
        check_server(server.settings, server.environment, tree)
        check_parts({"architectures": [architecture], **config}, "config.json")
        check_experts(config, server.settings, architecture)
    except (SourcesError, ConfigurationError) as error:
        raise ExtractionError(str(error)) from error
    code = code_of(architecture, tree)
    model = ListedModel(architecture, shortened({"architectures": [architecture], **config}), (1, 1))
    one = Configuration(architecture, model, server.settings, server.environment, server.gpu)
    try:
        (evaluation,) = evaluate([one], Index(tree))
    except Exception as error:  # no input should do this
        raise ExtractionError(failure(architecture, error)) from error
    stop = refusal(evaluation.problems, tree)
    if stop or not evaluation.kernels:
        raise ExtractionError(f"SGLang does not serve {architecture} so: {stop or '; '.join(evaluation.problems)}")
    data = condense(architecture, trace([evaluation], tree, PLATFORM, architecture))
    return usage_from(data, code), evaluation


def code_of(architecture: str, tree: SourceTree) -> ModelCode:
    """What the code of an architecture passes.

    Raises:
        ExtractionError: no model file defines the class.
    """
    return read_code(architecture, _module(architecture, tree), tree)


def digest(architecture: str, index: Index, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Traces one architecture and keeps what extraction reads.

    Raises:
        ExtractionError: no model file defines the class, or nothing says how it is configured.
    """
    _module(architecture, index.sources)
    return condense(architecture, traced(architecture, index, config))


def traced(architecture: str, index: Index, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The op trace of one architecture; arguments and errors are those of `digest`."""
    chosen = [one for one in configurations().values() if one.model.architecture == architecture]
    if not chosen and config is not None:
        model = ListedModel(architecture, shortened({"architectures": [architecture], **config}), (1, 1))
        chosen = [Configuration(f"{architecture}-{n}", model, *one) for n, one in enumerate(_variants())]
    if not chosen:
        raise ExtractionError(f"no listed configuration has the architecture {architecture}; give its config.json")
    return trace(list(evaluate(chosen, index)), index.sources, PLATFORM, architecture)


def _variants() -> list[tuple[Mapping[str, Any], Mapping[str, str], str]]:
    return [(server, {}, gpu) for server, gpu in VARIANTS]


def _module(architecture: str, tree: SourceTree) -> str:
    """The model file that defines the class."""
    declared = re.compile(rf"^class {re.escape(architecture)}\b", re.M)
    modules = [name for name in sorted(tree.modules) if name.startswith(f"{MODELS}.")]
    module = next((name for name in modules if declared.search(tree.text(name))), None)
    if module is None:
        raise ExtractionError(f"no file in sglang/srt/models defines the class {architecture}; correct 'architectures'")
    return module


def condense(architecture: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The digest of an op trace (schema/op_traces.schema.json)."""
    ops = {op["name"]: _kernels(op["kernels"], _FORWARD_STAGES) for op in document["ops"]}
    plain: dict[str, set[str]] = {}
    for node in _nodes(document["graph"]):
        if node["kind"] == "torch":
            plain.setdefault(node["name"], set()).update(_stages(node["phases"], _FORWARD_STAGES))
    for name, stages in plain.items():
        if ops.setdefault(name, {}):  # kernels compute it, but not always
            ops[name][TORCH] = [stage for stage in STAGES if stage in stages]
    outside: dict[str, dict[str, Any]] = {}
    for op in document["non_model_ops"]:
        outside.setdefault(op["group"], {}).setdefault(op["name"], {}).update(_kernels(op["kernels"], _STAGES))
    return {
        "architecture": architecture,
        "sources": document["sources"],
        "ops": dict(sorted(ops.items())),
        "outside": {group: dict(sorted(found.items())) for group, found in sorted(outside.items())},
    }


def usage_from(data: Mapping[str, Any], code: ModelCode) -> Usage:
    """The ops of a digest, and what the code passes.

    Raises:
        KeyError, AttributeError, TypeError, ValueError: it is none.
    """
    groups = {"": data["ops"], **data["outside"]}
    return Usage(
        data["architecture"],
        data["sources"],
        tuple(
            Op(name, group, {kernel: _known_stages(stages) for kernel, stages in kernels.items()})
            for group, ops in groups.items()
            for name, kernels in ops.items()
        ),
        code,
    )


def _known_stages(stages: Sequence[Any]) -> tuple[str, ...]:
    for stage in stages:
        if stage not in STAGES:
            raise ValueError(f"{str(stage)[:40]!r} is no stage")
    return tuple(stages)


def dumps(data: Mapping[str, Any]) -> str:
    """The digest as JSON, one line per op."""
    return laid_out(data, _lines)


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    match path:
        case ():
            return Lines(1, closing=0)
        case ("ops",) | ("outside",):
            return Lines(2)
        case ("outside", _):
            return Lines(3)
    return None


def _kernels(listed: Sequence[Mapping[str, Any]], meaning: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kernel in listed:
        key = f"{kernel['source']}:{kernel['name']}"
        stages = {*found.get(key, ()), *_stages(kernel["phases"], meaning)}
        found[key] = [stage for stage in STAGES if stage in stages]
    return dict(sorted((key, stages) for key, stages in found.items() if stages))


def _stages(phases: Sequence[str], meaning: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {stage for phase in phases for stage in meaning.get(phase, ())}


def _nodes(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield node
    for child in node["children"]:
        yield from _nodes(child)


def _read(architecture: str) -> Usage:
    path = COMMITTED / f"{architecture}.json"
    try:
        data = load_object(path, TRACES)
        path = CODE / f"{architecture}.json"
        return usage_from(data, code_from(load_object(path)))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ExtractionError(f"{path}: not a digest ({error!r}); restore it from version control") from error


def main(arguments: Sequence[str]) -> int:
    """Writes the digests of the given architectures, by default of all that have one."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.extract_definitions.traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="a model class of SGLang")
    parser.add_argument("--code", action="store_true", help="write only traces/model_code/")
    options = parser.parse_args(arguments)
    names = options.architectures or sorted(path.stem for path in COMMITTED.glob("*.json"))
    try:
        tree = find_sources(SOURCES, release=RELEASE)
        index = Index(tree)
        for name in names:
            if not options.code:
                write_text(COMMITTED / f"{name}.json", dumps(digest(name, index)))
                print(f"{COMMITTED / name}.json written", file=sys.stderr)
            write_text(CODE / f"{name}.json", model_code.dumps(code_of(name, tree)))
            print(f"{CODE / name}.json written", file=sys.stderr)
    except (SourcesError, ExtractionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
