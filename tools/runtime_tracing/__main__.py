"""Runs models with few layers and random weights in an installed SGLang, and records which kernels ran, from where.

python -m tools.runtime_tracing --model deepseek_v3 --config quantization=fp8,attention_backend=flashinfer
python -m tools.runtime_tracing --configuration NAME        # one of configurations.json
python -m tools.runtime_tracing --all --out DIR             # all of them, several at a time
python -m tools.runtime_tracing --compare [TRACE]           # recorded runs with the static trace; needs no SGLang

Recording needs a CUDA GPU, SGLang and its kernel libraries. Exit status: 0 recorded, or nothing is missing; 1 a run
failed, or something is missing; 2 wrong input, or a machine that cannot record; 3 nothing could be compared.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from flashinfer_trace import DatasetError, find_root
from flashinfer_trace.format import files
from tools.kernel_tracing.configuration.listed import configurations, made
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.runtime_tracing.recording import RecordingError
from tools.shared.command import end_with


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        if options.compare is not None:
            return _compare(options)
        if options.mark is not None:
            return _mark(options)
        return _drive(options) if options.all else _record(options)
    except (ConfigurationError, DatasetError, RecordingError) as error:
        print(error, file=sys.stderr)
        return 2


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.runtime_tracing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="record this model of the list, with the settings of --config")
    what.add_argument("--configuration", metavar="NAME", help="record this configuration of the list")
    what.add_argument("--all", action="store_true", help="record every configuration that --only does not exclude")
    what.add_argument("--compare", nargs="?", const="", metavar="TRACE", help="compare with traces/kernel_traces.json")
    what.add_argument("--mark", type=Path, metavar="TRACE", help="write into a trace in which runs each chain was seen")
    parser.add_argument("--config", type=_settings, default={}, metavar="KEY=VALUE,...", help="server arguments")
    parser.add_argument("--out", type=Path, help="the trace to write; with --all, a directory")
    parser.add_argument("--runs", type=Path, help="where the recorded runs are (default: traces/runtime)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --compare: each chain's runs, as JSON")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="with --all: names that contain a text")
    parser.add_argument("--gpus", type=int, default=1, help="with --all: the configurations for so many GPUs")
    parser.add_argument("--jobs", type=int, default=4, help="with --all: most processes at a time")
    parser.add_argument("--memory", type=int, default=100, metavar="GIB", help="with --all: GPU memory to use")
    parser.add_argument("--budget", type=float, default=3600, metavar="SECONDS", help="with --all: time for everything")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _settings(text: str) -> dict[str, Any]:
    found = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not KEY=VALUE")
        try:
            found[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[key] = value
    return found


def _record(options: argparse.Namespace) -> int:
    from tools.runtime_tracing.record import check_packages, dump_stacks_when_terminated, end, record

    if options.configuration is not None:
        known = configurations()
        if options.configuration not in known:
            raise ConfigurationError(f"no configuration {options.configuration!r}; there are {', '.join(known)}")
        chosen = known[options.configuration]
    else:
        chosen = made(options.model, options.config)
    check_packages()
    dump_stacks_when_terminated()
    status = record(chosen, options.out or Path(f"{chosen.name}.json"), options.rank, options.port)
    end(status)
    return status


def _drive(options: argparse.Namespace) -> int:
    from tools.runtime_tracing.drive import Machine, drive, recorder
    from tools.runtime_tracing.record import check_packages

    chosen = [one for one in configurations().values() if one.gpus == options.gpus]
    if options.only:
        chosen = [one for one in chosen if any(text in one.name for text in options.only)]
    check_packages()
    machine = Machine(options.jobs, options.memory, options.budget)
    lines = drive(chosen, options.out or find_root() / "traces" / "runtime", machine, recorder())
    print("\n".join(line.partition("\n")[0] for line in lines))
    return int(any(": recorded" not in line for line in lines))


def _compare(options: argparse.Namespace) -> int:
    from tools.runtime_tracing.compare import compare, report, seen
    from tools.runtime_tracing.recording import read_all
    from tools.runtime_tracing.static import read_static

    root = find_root()
    static = read_static(Path(options.compare) if options.compare else root / "traces" / "kernel_traces.json")
    runs = read_all(options.runs or root / "traces" / "runtime")
    comparisons, shown = [compare(run, static) for run in runs], seen(runs, static)
    print(report(comparisons, static, shown))
    if options.json:
        kernels = [{"name": one.name, "chains": of_it} for one, of_it in zip(static.kernels, shown, strict=True)]
        files.write_json(options.json, {"trace": static.path.name, "sglang": static.version, "kernels": kernels})
    if all(one.unrelated for one in comparisons):
        return 3  # nothing was compared
    return int(any(one.missing for one in comparisons))


def _mark(options: argparse.Namespace) -> int:
    from tools.kernel_tracing.report.trace_files import dumps  # reads JSON schemas, which recording does without
    from tools.runtime_tracing.compare import marked
    from tools.runtime_tracing.recording import read_all
    from tools.runtime_tracing.static import read_document

    document = marked(read_document(options.mark), read_all(options.runs or find_root() / "traces" / "runtime"))
    files.write_text(options.mark, dumps(document))
    return 0


if __name__ == "__main__":
    end_with(main)
