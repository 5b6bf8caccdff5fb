"""Extracts the Definitions that a model needs and the dataset lacks.

python -m tools.extract_definitions --model-name deepseek_v3                 # write what is missing, tag what exists
python -m tools.extract_definitions --model-name llama-3.1-8b qwen3-8b --dry-run
python -m tools.extract_definitions --all-models
python -m tools.extract_definitions --model-name my-llama --config config.json --tp 1 2
python -m tools.extract_definitions --model-name qwen3-8b --server attention_backend=flashinfer,gpu=sm90,tp=2

The kernels come from the trace of the model's code, the sizes from models/<name>.json or --config. No existing
Definition is replaced. If it describes the same kernel, it only gains tags; if it describes another kernel under the
same name, the new Definition is written to <name>_v2.json.review.

Exit status: 0 success, 1 a file could not be written or would be invalid, 2 wrong usage, 3 conflicts to review,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flashinfer_trace.dataset.evidence import EvidenceError
from flashinfer_trace.dataset.model_claims import ModelClaimsError
from flashinfer_trace.dataset.store import DatasetError, find_root
from flashinfer_trace.format.naming import NamingError
from flashinfer_trace.format.reference import ReferenceSourceError
from flashinfer_trace.kernels.private import PrivateKernelsError
from tools.extract_definitions import apply, report
from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.model_files import check_file
from tools.extract_definitions.models import Model, available, load_config, load_model
from tools.extract_definitions.needs import Options, Request
from tools.extract_definitions.plan import CONFLICT, CREATED, TAGGED, Plan, Planner
from tools.extract_definitions.traces import RELEASE, SOURCES, STAGES, TRACING, Usage, usage_of, usage_of_server
from tools.kernel_tracing.configuration.requested import ConfigurationError, Server, parse_server
from tools.kernel_tracing.report.messages import progress
from tools.kernel_tracing.source.sources import fetching
from tools.shared.command import end_with

#: What a model, a dataset or its records may raise; each message names the file.
UNUSABLE = (
    ExtractionError,
    DatasetError,
    EvidenceError,
    ModelClaimsError,
    NamingError,
    PrivateKernelsError,
    ReferenceSourceError,
)
#: Server arguments that change the sizes or numbers of a model in ways that no recipe follows -> what to do instead.
NOT_OF_A_SERVER = {
    "quantization": "say how the weights are stored in the config.json that --config names",
    "dp_size": "no recipe knows how ranks share attention; leave it out and give --tp",
    "enable_dp_attention": "no recipe knows how ranks share attention; leave it out and give --tp",
    "pp_size": "no size depends on it; leave it out",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: cannot print the report: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted; no Definition is half-written, run again to write the rest", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    try:
        root = find_root()
        definitions = options.definitions or root / "definitions"
        if definitions.exists() and not definitions.is_dir():
            raise ExtractionError(
                f"{definitions}: not a directory; --definitions takes a directory, which need not exist"
            )
        planner = Planner(root, definitions, options.deduplicate, options.refresh)
        plan = planner.plan(requests(root, options))
    except UNUSABLE as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = apply.problems_of(plan, root)
    if problems:
        print(*report.invalid(plan, problems), sep="\n", file=sys.stderr)
        print(
            "error: these Definitions would be invalid; nothing was written. Correct the constants of the model, or "
            "the reference or recipe that does not take them",
            file=sys.stderr,
        )
        return 1
    return _carry_out(plan, definitions, options)


def requests(root: Path, options: argparse.Namespace) -> list[Request]:
    """One request per model, in the order given.

    Raises:
        ExtractionError: a model is unknown, its configuration is unusable, or its kernels are not known.
    """
    sources = options.sources or SOURCES
    if options.server is None and options.sources is not None and not sources.is_dir():
        raise ExtractionError(
            f"--sources {sources}: no such directory; leave it out to use the committed traces, or fetch them with "
            f"`{fetching(sources, RELEASE)}`"
        )
    names = available(root) if options.all_models else options.model_name
    if options.config is None:
        models = [load_model(root, name) for name in names]
        for one in models:
            check_file(root, one.path)
    elif len(names) == 1:
        models = [load_config(root, options.config, names[0])]
    else:
        raise ExtractionError("--config gives the constants of one model; name it with --model-name NAME")
    models = list({one.name: one for one in models}.values())
    chosen = Options(
        stages=tuple(stage for stage in STAGES if stage in options.execution_modes),
        tensor_parallel=_distinct(options.tp),
        expert_parallel=_distinct(options.ep),
        page_sizes=_distinct(options.page_sizes) or Options.page_sizes,
        quantized=options.include_quantized,
    )
    if options.server is not None:
        return [_served(model, options, sources, chosen) for model in models]
    usages = _usages(models, sources)
    return [
        Request(model, usages[model.architecture], chosen, left_out=_without_effect(model, chosen)) for model in models
    ]


def _served(model: Model, options: argparse.Namespace, sources: Path, chosen: Options) -> Request:
    """The request for a model that is served in one way, which also decides the sizes that no option gives."""
    usage, evaluation = usage_of_server(model.architecture, sources, model.config, options.server)
    for problem in evaluation.problems:
        print(f"not evaluated: {problem}", file=sys.stderr)
    resolved = evaluation.resolved
    ranks = resolved.get("tp_size", 1), resolved.get("ep_size", 1)
    return Request(
        model,
        usage,
        replace(
            chosen,
            tensor_parallel=chosen.tensor_parallel or ranks[:1],
            expert_parallel=chosen.expert_parallel or ranks[1:],
            page_sizes=_distinct(options.page_sizes) or (resolved.get("page_size", 1),),
            ranks=ranks,
        ),
        left_out=_without_effect(model, chosen),
    )


def _without_effect(model: Model, chosen: Options) -> dict[str, None]:
    """A note on sizes that the user gave and that no kernel of the model depends on."""
    if chosen.expert_parallel is None or model.experts is not None:
        return {}
    return {f"--ep {' '.join(map(str, chosen.expert_parallel))} for {model.name}, which has no experts": None}


def _usages(models: Sequence[Model], sources: Path) -> dict[str, Usage]:
    with progress() as bar:

        def told(phase: str, done: int, total: int) -> None:
            if phase.startswith(TRACING) and not sys.stderr.isatty():  # the bar is for terminals
                print(f"{phase}, which takes some seconds", file=sys.stderr, flush=True)
            bar(phase, done, total)

        configs = {model.architecture: model.config for model in models}
        return {name: usage_of(name, sources, told, config) for name, config in configs.items()}


def _carry_out(plan: Plan, definitions: Path, options: argparse.Namespace) -> int:
    conflicts = plan.of(CONFLICT)
    if options.dry_run:
        print(report.table(plan, options.verbose))
        return 3 if conflicts else 0
    try:
        apply.write(plan, definitions)
    except OSError as error:
        where = error.filename2 or error.filename or definitions
        print(
            f"error: {where}: {error.strerror or error}; no Definition is half-written, run again to write the rest",
            file=sys.stderr,
        )
        return 1
    for row in (*plan.of(CREATED), *plan.of(TAGGED)):
        print(f"{row.path}: {row.state}{f', {row.detail}' if row.detail else ''}")
    if plan.lists.changed and apply.lists_belong_to(plan, definitions):
        print(f"{plan.lists.path}: lists {', '.join(plan.lists.changed)}")
    for line in (*report.gaps(plan, options.verbose), *(f"left out: {note}" for note in plan.notes)):
        print(line, file=sys.stderr)
    print(report.totals(plan), flush=True)
    for line in report.conflicts(plan):
        print(line, file=sys.stderr)
    return 3 if conflicts else 0


def _distinct(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(sorted(set(values)))


def _server(text: str) -> Server:
    try:
        server = parse_server(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for name, instead in NOT_OF_A_SERVER.items():
        if name in server.settings:
            raise argparse.ArgumentTypeError(f"{name}: {instead}")
    return server


def _size(text: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= value <= 9999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size between 1 and 9999")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.extract_definitions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument(
        "--model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="one or more models under models/; with --config, the name for the model: tag",
    )
    named.add_argument("--all-models", action="store_true", help="every model under models/")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a Hugging Face config.json, instead of models/")
    parser.add_argument(
        "--execution-modes", nargs="+", choices=STAGES, default=list(STAGES), help="serving stages (default: both)"
    )
    for option, text in (
        ("--tp", "tensor-parallel sizes (default: those that each family documents)"),
        ("--ep", "expert-parallel sizes (default: those that each family documents)"),
        ("--page-sizes", "tokens per page (default: 1 64)"),
    ):
        parser.add_argument(option, nargs="+", type=_size, metavar="N", help=text)
    parser.add_argument(
        "--server",
        type=_server,
        metavar="SETTINGS",
        help="only the kernels of one way to serve the model: fields of ServerArgs, tp, ep, gpu=sm90, environment "
        "variables; separated by commas (default: the kernels of all listed ways)",
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--include-quantized", action=flag, default=True, help="extract kernels with quantised weights")
    parser.add_argument(
        "--deduplicate",
        action=flag,
        default=True,
        help="reuse existing Definitions; otherwise write them again, for review",
    )
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="also give existing Definitions the recipes' texts of axes, inputs and outputs",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan as a table and write nothing")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="list every kernel that no family covers, and ops outside the forward pass",
    )
    parser.add_argument("--sources", type=Path, metavar="DIR", help="sources to trace (default: .sources-0.5.8)")
    parser.add_argument(
        "--definitions", type=Path, metavar="DIR", help="where to write (default: definitions/ of the dataset)"
    )
    return parser


if __name__ == "__main__":
    end_with(main)
