"""Finds the kernels that a model calls, by static analysis of the sources that `python -m tools.fetch_sources` fetches.

python -m tools.kernel_tracing --model deepseek                      # -> traces/kernel_traces.md and .json
python -m tools.kernel_tracing --model llama --out llama.md --json llama.json
python -m tools.kernel_tracing --model deepseek --kernel rmsnorm     # one kernel, to the terminal
python -m tools.kernel_tracing --config model=deepseek-v3,attention_backend=flashinfer   # what one configuration runs
python -m tools.kernel_tracing --verify traces/kernel_traces.json     # check a trace against the sources
python -m tools.kernel_tracing --diff old.json new.json              # what changed

Exit status: 0 success, 1 the trace has problems (wrong frames, no kernel, files that do not parse), 2 wrong usage or no
sources.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.kernel_tracing.configuration.requested import ConfigurationError, parse
from tools.kernel_tracing.evaluator.serving import Serving
from tools.kernel_tracing.graph.roots import RootsError
from tools.kernel_tracing.report.analysis import deep
from tools.kernel_tracing.report.arguments import model_arguments
from tools.kernel_tracing.report.diff import diff
from tools.kernel_tracing.report.messages import left_out, notice, progress
from tools.kernel_tracing.report.render import render
from tools.kernel_tracing.report.step import PHASES
from tools.kernel_tracing.report.step import document as step_document
from tools.kernel_tracing.report.step import text as step_text
from tools.kernel_tracing.report.trace import trace
from tools.kernel_tracing.report.trace_files import TRACES, check_writable, dumps, link_base, load, load_traces, write
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import SourcesError, find_sources
from tools.kernel_tracing.verify.check import check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.verify is not None:
            return _verify(options.verify, options.sources)
        if options.diff is not None:
            old, new = (load_traces(path) for path in options.diff)
            print(diff(old, new), end="")
            return 0
        with deep():
            return _trace(options) if options.config is None else _step(options)
    except (SourcesError, RootsError, ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_tracing", description=(__doc__ or "").split("\n")[0])
    model_arguments(parser, "kernel_traces")
    parser.add_argument(
        "--kernel", default="", metavar="NAME", help="trace only this kernel, and print it unless --out is given"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", type=Path, metavar="FILE", help="check every frame of a trace against the sources")
    action.add_argument(
        "--config",
        metavar="SETTINGS",
        help="print the kernels that one configuration runs in prefill and decode, each with its chain: "
        "model=NAME or config.json, gpu=sm90, tp=8, fields of ServerArgs, environment variables; separated by commas",
    )
    action.add_argument(
        "--diff", type=Path, nargs=2, metavar=("OLD", "NEW"), help="show what changed between two traces"
    )
    return parser


def _trace(options: argparse.Namespace) -> int:
    out, data = _targets(options)
    check_writable(out, data)
    sources = find_sources(options.sources)
    notice(options.sources, sources)
    with progress() as report:
        document = trace(sources, options.model, options.entry, options.platform, options.kernel, report)
    problems = document.pop("problems")
    left_out(problems)
    if not document["kernels"]:
        wanted = f"no call of a kernel named {options.kernel!r}" if options.kernel else "no call of any kernel"
        print(f"error: {wanted} was found from {options.model} on {options.platform}", file=sys.stderr)
        return 1
    if out is None and data is None:
        print(render(document, link_base(Path("report.md"), options.sources)), end="")
    if out is not None:
        write(out, render(document, link_base(out, options.sources)))
    if data is not None:
        write(data, dumps(document))
    chains = sum(len(kernel["chains"]) for kernel in document["kernels"])
    print(
        f"{len(document['kernels'])} kernels, {chains} chains, {len(document['unresolved'])} unresolved calls",
        file=sys.stderr,
    )
    return 1 if problems else 0


def _step(options: argparse.Namespace) -> int:
    check_writable(options.out, options.json)
    configuration = parse(options.config)
    sources = find_sources(options.sources)
    notice(options.sources, sources)
    step = Serving(Index(sources), configuration, options.platform).run()
    found = step_document(step, sources)
    if options.json is not None:
        write(options.json, json.dumps(found, indent=1) + "\n")
    if options.out is not None:
        write(options.out, step_text(found))
    if options.out is None and options.json is None:
        print(step_text(found), end="")
    for problem, count in step.problems.items():
        print(f"not evaluated ({count}): {problem}", file=sys.stderr)
    return 0 if any(found[phase] for phase in PHASES) else 1


def _targets(options: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The report and the data to write: as requested, by default both, or neither for a single kernel."""
    if options.kernel or options.out is not None or options.json is not None:
        return options.out, options.json
    return TRACES / "kernel_traces.md", TRACES / "kernel_traces.json"


def _verify(path: Path, sources: Path) -> int:
    find_sources(sources)  # report a missing tree as such, not as one problem per frame
    problems = check(load(path), sources)
    for problem in problems:
        print(problem)
    print(f"{path}: {len(problems)} problems" if problems else f"{path}: all frames are correct", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
