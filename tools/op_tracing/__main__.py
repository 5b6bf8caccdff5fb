"""Lists a model's ops in execution order, each with the kernels that can implement it, by static analysis.

python -m tools.op_tracing --model deepseek --traces traces/kernel_traces.json   # -> traces/op_traces.md and .json
python -m tools.op_tracing --model llama --out llama.md --json llama.json
python -m tools.op_tracing --model deepseek --html deepseek.html                # only a page for the browser

Exit status: 0 success, 1 the op trace and the kernel traces disagree (nothing is written) or files do not parse,
2 wrong usage or no sources.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import definitions
from flashinfer_trace.files import COMPACT, Lines, laid_out
from tools.kernel_tracing.graph.roots import RootsError
from tools.kernel_tracing.report.analysis import analyse, deep
from tools.kernel_tracing.report.arguments import model_arguments
from tools.kernel_tracing.report.messages import left_out, notice, progress
from tools.kernel_tracing.report.trace import document
from tools.kernel_tracing.report.trace_files import TRACES, check_writable, link_base, load_traces, write
from tools.kernel_tracing.source.sources import SourcesError, find_sources
from tools.op_tracing import page
from tools.op_tracing.check import check
from tools.op_tracing.definitions import covered, definitions_of
from tools.op_tracing.render import CHAINS, render
from tools.op_tracing.trace import trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with deep():
            return _trace(options)
    except (SourcesError, RootsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.op_tracing", description=(__doc__ or "").split("\n")[0])
    model_arguments(parser, "op_traces")
    parser.add_argument(
        "--traces", type=Path, metavar="FILE", help="kernel traces of the model to check against (default: trace again)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="the trace as an HTML page that needs no network")
    return parser


def _trace(options: argparse.Namespace) -> int:
    out, data = options.out, options.json
    if out is data is options.html is None:
        out, data = TRACES / "op_traces.md", TRACES / "op_traces.json"
    check_writable(out, data, options.html)
    given = None if options.traces is None else _traces(options.traces, options)
    sources = find_sources(options.sources)
    notice(options.sources, sources)
    with progress() as report:
        analysis = analyse(sources, options.model, options.entry, options.platform, report)
        ops = trace(analysis, report)
        kernels = given or document(analysis, progress=report)
    problems = kernels.pop("problems", [])
    left_out(problems)
    violations = check(ops, kernels)
    for violation in violations:
        print(violation, file=sys.stderr)
    if violations:
        print(f"error: the op trace and the kernel traces disagree in {len(violations)} places", file=sys.stderr)
        return 1
    known = covered(definitions())
    if out is not None:
        write(out, render(ops, kernels, known, link_base(out, options.sources), _chains(out, options.model)))
    if data is not None:
        write(data, dumps(ops))
    if options.html:
        cover = {page.kernel_id(kernel): definitions_of(kernel, known) for kernel in kernels["kernels"]}
        write(options.html, page.render(ops, kernels, cover))
    used = len(kernels["kernels"])
    print(f"{len(ops['ops'])} ops, {len(ops['non_model_ops'])} outside the model, {used} kernels", file=sys.stderr)
    return 1 if problems else 0


def _chains(out: Path, model: str) -> str:
    """What the report names as the place of the call chains."""
    return CHAINS if out.parent.resolve() == TRACES.resolve() else f"`python -m tools.kernel_tracing --model {model}`"


def _traces(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The given kernel traces, which must be of the same model."""
    traces = load_traces(path)
    if (traces["model"], traces["platform"]) != (options.model, options.platform):
        raise OSError(
            f"{path}: kernel traces of {traces['model']} on {traces['platform']}, not of {options.model} on "
            f"{options.platform}; omit --traces, or write the right ones: "
            f"python -m tools.kernel_tracing --model {options.model} --json FILE"
        )
    return traces


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
    sys.exit(main())
