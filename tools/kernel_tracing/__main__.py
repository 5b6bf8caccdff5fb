"""Finds the kernels that SGLang calls, by evaluating the sources that `python -m tools.fetch_sources` fetches.

python -m tools.kernel_tracing                                       # all that are listed -> traces/kernel_traces.json
python -m tools.kernel_tracing --model llama --out llama.md --json llama.json   # those of some models
python -m tools.kernel_tracing --kernel rmsnorm                      # one kernel of the committed trace
python -m tools.kernel_tracing --config model=deepseek-v3,attention_backend=flashinfer   # what one configuration runs
python -m tools.kernel_tracing --verify traces/kernel_traces.json    # check a trace against the sources
python -m tools.kernel_tracing --model-files                         # check what every model file runs
python -m tools.kernel_tracing --diff old.json new.json              # what changed

Exit status: 0 success, 1 the trace has problems (wrong frames, no kernel), 2 wrong usage, a configuration that SGLang
does not serve, or no sources.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flashinfer_trace.dataset.store import closest
from tools.kernel_tracing.configuration.checks import check_model
from tools.kernel_tracing.configuration.limits import check_server
from tools.kernel_tracing.configuration.requested import ConfigurationError, parse
from tools.kernel_tracing.evaluator.serving import Serving
from tools.kernel_tracing.report.again import differences
from tools.kernel_tracing.report.arguments import ALL, check_given, chosen, model_arguments
from tools.kernel_tracing.report.diff import diff
from tools.kernel_tracing.report.evaluation import evaluate_all
from tools.kernel_tracing.report.merge import PLATFORM, merged
from tools.kernel_tracing.report.messages import notice, progress
from tools.kernel_tracing.report.model_files import tried
from tools.kernel_tracing.report.refusals import failure, refusal
from tools.kernel_tracing.report.render import kernel_text, trace_text
from tools.kernel_tracing.report.step import PHASES
from tools.kernel_tracing.report.step import document as step_document
from tools.kernel_tracing.report.step import problems as step_problems
from tools.kernel_tracing.report.step import text as step_text
from tools.kernel_tracing.report.trace_files import (
    TRACES,
    check_writable,
    completed,
    dumps,
    load,
    load_traces,
    unpacked,
    write,
)
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import SourcesError, find_sources
from tools.kernel_tracing.verify.check import check
from tools.shared.command import end_with

#: What is done -> the options that it reads; "" for a trace.
READS: dict[str, tuple[str, ...]] = {
    "kernel": ("traces",),
    "verify": ("sources", "list", "jobs"),
    "model_files": ("sources",),
    "config": ("sources", "out", "json"),
    "diff": (),
    "": ("model", "sources", "list", "jobs", "out", "json"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        check_given(parser, options, READS)
        if options.verify is not None:
            return _verify(options)
        if options.diff is not None:
            old, new = (load_traces(path) for path in options.diff)
            print(diff(old, new), end="")
            return 0
        if options.kernel is not None:
            return _kernel(options)
        if options.model_files:
            return _model_files(options)
        return _trace(options) if options.config is None else _step(options)
    except (SourcesError, ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_tracing", description=(__doc__ or "").split("\n")[0])
    model_arguments(parser, f"{TRACES}/kernel_traces.json", ALL)
    parser.add_argument("--traces", type=Path, default=TRACES / "kernel_traces.json", help="what --kernel reads")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--kernel", metavar="NAME", help="print the chains of one kernel of a trace")
    action.add_argument("--verify", type=Path, metavar="FILE", help="check a trace against the sources")
    action.add_argument(
        "--model-files", action="store_true", help="evaluate every model file with made-up sizes, and check its chains"
    )
    action.add_argument(
        "--config",
        metavar="SETTINGS",
        help="print the kernels that one configuration runs in prefill and decode, each with its chain: "
        "model=NAME, config.json or its directory, gpu=sm90, tp=8, fields of ServerArgs, environment variables; "
        "separated by commas",
    )
    action.add_argument(
        "--diff", type=Path, nargs=2, metavar=("OLD", "NEW"), help="show what changed between two traces"
    )
    return parser


def _trace(options: argparse.Namespace) -> int:
    out, data = options.out, options.json
    if out is data is None:
        data = TRACES / "kernel_traces.json"
    check_writable(out, data)
    configurations = chosen(options.model, options.list)
    sources = find_sources(options.sources)
    notice(options.sources, sources)
    with progress() as report:
        evaluations = evaluate_all(configurations, options.sources, options.jobs, report)
    document = merged(evaluations, sources, PLATFORM, options.model)
    if not document["kernels"]:
        print(f"error: no call of any kernel was found for {options.model}", file=sys.stderr)
        return 1
    if data is not None:
        write(data, dumps(document))
    if out is not None:
        write(out, trace_text(completed(document)))
    chains = sum(len(kernel["chains"]) for kernel in document["kernels"])
    counts = f"{len(document['kernels'])} kernels, {chains} chains, {len(configurations)} configurations"
    mark = f"; mark what was seen: python -m tools.runtime_tracing --mark {data}" if data is not None else ""
    print(f"{counts}{mark}", file=sys.stderr)
    return 0


def _kernel(options: argparse.Namespace) -> int:
    document = load_traces(options.traces)
    text = kernel_text(document, options.kernel)
    if not text:
        names = sorted({one["name"] for one in document["kernels"]})
        hint = closest(options.kernel, names) or "the report of the trace lists its kernels"
        print(f"error: {options.traces} has no kernel named {options.kernel!r}; {hint}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


def _step(options: argparse.Namespace) -> int:
    check_writable(options.out, options.json)
    configuration = parse(options.config)
    sources = find_sources(options.sources)
    notice(options.sources, sources)
    check_server(configuration.settings, configuration.environment, sources)
    check_model(configuration.model, configuration.settings, sources)
    try:
        step = Serving(Index(sources), configuration, PLATFORM).run()
    except Exception as error:  # no input should do this, but a user needs to know which setting does
        raise ConfigurationError(failure(options.config, error)) from error
    if said := refusal(step.problems, sources):
        raise ConfigurationError(f"SGLang does not serve {options.config}: {said}")
    found = step_document(step, sources)
    if options.json is not None:
        write(options.json, json.dumps(found, indent=1) + "\n")
    if options.out is not None:
        write(options.out, step_text(found))
    if options.out is None and options.json is None:
        print(step_text(found), end="")
    else:
        print("".join(f"{line}\n" for line in step_problems(found)), end="", file=sys.stderr)
    return 0 if any(found[phase] for phase in PHASES) else 1


def _verify(options: argparse.Namespace) -> int:
    find_sources(options.sources)  # report a missing tree as such, not as one problem per frame
    trace = load(options.verify)
    problems = check(trace, options.sources)
    if not problems:  # so the trace follows its schema
        problems = differences(unpacked(trace), options.sources, options.list, options.jobs)
    for problem in problems:
        print(problem)
    found = f"{len(problems)} problems" if problems else "every frame and every condition is correct"
    print(f"{options.verify}: {found}", file=sys.stderr)
    return 1 if problems else 0


def _model_files(options: argparse.Namespace) -> int:
    with progress() as report:
        found = tried(options.sources, progress=report)
    for problem in found.problems:
        print(problem)
    for name, reason in found.silent.items():
        print(f"{name}.py: no chain passes its own code: {reason}")
    counts = f"{found.files} model files, {found.kernels} kernels, {found.chains} chains"
    print(f"{counts}: {len(found.problems) or 'no'} problems", file=sys.stderr)
    return 1 if found.problems else 0


if __name__ == "__main__":
    end_with(main)
