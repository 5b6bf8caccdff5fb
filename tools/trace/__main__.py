"""Which kernels a model calls, from where, in execution order: read from records of runs.

- `python -m tools.trace --model deepseek_v3`: the model's runs in traces/, the default server first
- `python -m tools.trace --model llama --out llama.md --json llama.json`: to files
- `python -m tools.trace --model qwen3 --kernel rmsnorm`: only the chains of one kernel
- `python -m tools.trace --record traces/runtime/FILE.json`: one run, or several
- `python -m tools.trace --model my/config.json --server tp_size=8`: a dry run, without a record

Exit status: 0 success, 1 nothing was called, 2 wrong usage, or a record that cannot be read or made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashinfer_trace import definitions, find_root
from flashinfer_trace.cli.options import counted
from flashinfer_trace.dataset.coverage import definitions_with_kernel
from flashinfer_trace.dataset.store import closest
from flashinfer_trace.format.files import write_text
from tools.runtime_tracing.recording import Recording, read
from tools.shared.command import end_with, names_its_cause
from tools.trace.calls import keys_of
from tools.trace.document import dumps, trace
from tools.trace.records import committed, default_first, of_model, of_release, run_dry
from tools.trace.render import Definitions, Kernel, backtraces, render


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        runs = selected(options)
        name = options.model or ", ".join(dict.fromkeys(str(run.document["model"]) for run in runs))
        found = trace(runs, Path(name).parent.name if name.endswith(".json") else name)
        if options.out is not None:
            write_text(options.out, render(found, defined(find_root())))
        if options.json is not None:
            write_text(options.json, dumps(found))
    except Exception as error:
        if not names_its_cause(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = {kernel["name"] for kernel in found["kernels"]} | {kernel["path"] for kernel in found["kernels"]}
    if options.kernel is not None and options.kernel not in known:
        print(f"error: no kernel {options.kernel!r} in these runs{closest(options.kernel, known)}", file=sys.stderr)
        return 2
    if options.out is options.json is None:
        for group in found["sequence"]:
            calls = [call for call in group["calls"] if options.kernel in (None, call["name"], call["path"])]
            if calls:
                title = group["needs"] or f"default: {group['configurations'][0]}"
                print(f"# {title} (in {', '.join(group['configurations'])})", *backtraces(calls), "", sep="\n")
    kernels, chains = len(found["kernels"]), sum(len(kernel["chains"]) for kernel in found["kernels"])
    print(
        f"{counted(len(runs), 'run')} of SGLang {found['sources']['sglang']}: {kernels} kernels, {chains} chains",
        file=sys.stderr,
    )
    return int(not kernels)


def selected(options: argparse.Namespace) -> list[Recording]:
    """The runs that a command line asks for, the default first.

    Raises:
        RecordingError: there are none, or one cannot be read or made.
    """
    if options.record:
        return of_release(default_first([read(path) for path in options.record]), options.release)
    runs = [] if options.server or options.model.endswith(".json") else of_model(committed(find_root()), options.model)
    return of_release(runs or [run_dry(options.model, options.server, options.release)], options.release)


def defined(root: Path) -> Definitions:
    """The Definitions of each kernel of a dataset."""
    known = definitions_with_kernel(root, definitions(root=root))

    def names(kernel: Kernel) -> Sequence[str]:
        return next((known[key] for key in keys_of(kernel) if key in known), ())

    return names


def arguments_of_runs(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose runs."""
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--model", metavar="NAME", help="a model of traces/, `all`, or a config.json, which is run dry")
    chosen.add_argument("--record", type=Path, nargs="+", metavar="FILE", help="records of runs")
    parser.add_argument(
        "--server", default="", metavar="SETTINGS", help="a dry run with these settings: name=value,..."
    )
    parser.add_argument("--release", metavar="VERSION", help="of SGLang (default: the newest that was run)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments_of_runs(parser)
    parser.add_argument("--kernel", metavar="NAME", help="print only the chains of this kernel")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the trace as JSON")
    return parser


if __name__ == "__main__":
    end_with(main)
