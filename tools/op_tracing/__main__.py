"""Lists a model's ops in execution order, each with the kernels that can implement it.

python -m tools.op_tracing --traces traces/kernel_traces.json     # DeepSeek -> traces/op_traces.json
python -m tools.op_tracing --model llama --out llama.md --json llama.json
python -m tools.op_tracing --model deepseek --html deepseek.html  # only a page for the browser

Exit status: 0 success, 1 the op trace and the kernel traces disagree (nothing is written), 2 wrong usage or no sources.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import definitions
from flashinfer_trace.format.files import COMPACT, Lines, laid_out
from tools.kernel_tracing.configuration.listed import Configuration
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.report.arguments import chosen, model_arguments
from tools.kernel_tracing.report.evaluation import evaluate_all
from tools.kernel_tracing.report.merge import PLATFORM, merged
from tools.kernel_tracing.report.messages import notice, progress
from tools.kernel_tracing.report.trace_files import (
    TRACES,
    check_writable,
    completed,
    load_traces,
    restricted,
    write,
)
from tools.kernel_tracing.source.sources import SourcesError, find_sources
from tools.op_tracing import page
from tools.op_tracing.check import check
from tools.op_tracing.definitions import covered, definitions_of
from tools.op_tracing.render import CHAINS, render
from tools.op_tracing.trace import trace
from tools.shared.command import end_with

#: The model whose op trace is committed.
MODEL = "deepseek"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _trace(options)
    except (SourcesError, ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.op_tracing", description=(__doc__ or "").split("\n")[0])
    model_arguments(parser, f"{TRACES}/op_traces.json", MODEL)
    parser.add_argument(
        "--traces", type=Path, metavar="FILE", help="kernel traces of the model to check against (default: trace again)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="the trace as an HTML page that needs no network")
    return parser


def _trace(options: argparse.Namespace) -> int:
    out, data = options.out, options.json
    if out is data is options.html is None:
        data = TRACES / "op_traces.json"
    check_writable(out, data, options.html)
    configurations = chosen(options.model, options.list)
    given = None if options.traces is None else _traces(options.traces, options.model, configurations)
    sources = find_sources(options.sources)
    notice(options.sources, sources)
    with progress() as report:
        evaluations = evaluate_all(configurations, options.sources, options.jobs, report)
    ops = trace(evaluations, sources, PLATFORM, options.model)
    kernels = given or completed(merged(evaluations, sources, PLATFORM, options.model))
    violations = check(ops, kernels, evaluations)
    for violation in violations:
        print(violation, file=sys.stderr)
    if violations:
        print(f"error: the op trace and the kernel traces disagree in {len(violations)} places", file=sys.stderr)
        return 1
    known = covered(definitions())
    if out is not None:
        write(out, render(ops, kernels, known, _chains(out, options.model)))
    if data is not None:
        write(data, dumps(ops))
    if options.html:
        cover = {page.kernel_id(kernel): definitions_of(kernel, known) for kernel in kernels["kernels"]}
        write(options.html, page.render(ops, kernels, cover))
    used = len(kernels["kernels"])
    print(f"{len(ops['ops'])} ops, {len(ops['non_model_ops'])} outside the model, {used} kernels", file=sys.stderr)
    return 0


def _chains(out: Path, model: str) -> str:
    """What the report names as the place of the call chains."""
    return CHAINS if out.parent.resolve() == TRACES.resolve() else f"`python -m tools.kernel_tracing --model {model}`"


def _traces(path: Path, model: str, configurations: Sequence[Configuration]) -> dict[str, Any]:
    """What the given kernel traces have of the chosen configurations."""
    traces = load_traces(path)
    names = [one.name for one in configurations]
    known = {one["name"] for one in traces["configurations"]}
    if missing := [name for name in names if name not in known]:
        raise OSError(
            f"{path}: kernel traces without the configuration {missing[0]}; omit --traces, or write them again: "
            f"python -m tools.kernel_tracing --model {model} --json FILE"
        )
    return restricted(traces, names, model)


def dumps(trace: dict[str, Any]) -> str:
    """The document as JSON: one line per element of the outer lists, one line per node of the graph."""
    return laid_out(trace, _lines, COMPACT)


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    match path:
        case ():
            return Lines(0, closing=0)
        case ("ops" | "direct_kernels" | "non_model_ops",):
            return Lines(1)
        case ("graph", *_, "children"):
            return Lines(path.count("children"))
        case ("graph",) | ("graph", *_, "children", "*"):
            return Lines(None)
    return None


if __name__ == "__main__":
    end_with(main)
