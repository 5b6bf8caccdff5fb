"""Runs models with few layers and random weights in an installed SGLang, and records which kernels ran, from where.

- `python -m tools.runtime_tracing --model deepseek_v3 --config quantization=fp8,attention_backend=flashinfer`: one run
- `python -m tools.runtime_tracing --configuration NAME`: one of configurations.json
- `python -m tools.runtime_tracing --all --out DIR`: all of them, several at a time
- `python -m tools.runtime_tracing --all --today --devices 4`: those of today's release, spread over four GPUs

Recording needs a CUDA GPU, SGLang and its kernel libraries. Exit status: 0 recorded, 1 a run failed, 2 wrong input, or
a machine that cannot record.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from flashinfer_trace import DatasetError, find_root
from flashinfer_trace.kernels.stacks import TODAY
from tools.runtime_tracing.configurations import ConfigurationError, configurations, listed, made, named
from tools.runtime_tracing.recording import RecordingError
from tools.shared.command import end_with


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
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
    parser.add_argument("--config", type=_settings, default={}, metavar="KEY=VALUE,...", help="server arguments")
    parser.add_argument("--out", type=Path, help="the trace to write; with --all, a directory")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="with --all: names that contain a text")
    parser.add_argument("--gpus", type=int, default=1, help="with --all: the configurations for so many GPUs")
    parser.add_argument("--today", action="store_true", help="with --all: the runs of today's release of SGLang")
    parser.add_argument("--devices", type=int, default=1, help="with --all: GPUs that runs for one are spread over")
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

    name = options.configuration
    chosen = made(options.model, options.config) if name is None else listed(name)
    check_packages()
    dump_stacks_when_terminated()
    status = record(chosen, options.out or Path(f"{chosen.name}.json"), options.rank, options.port)
    end(status)
    return status


def _drive(options: argparse.Namespace) -> int:
    from tools.runtime_tracing.drive import Machine, drive, recorder
    from tools.runtime_tracing.record import check_packages

    recorded = [listed(name) for name in named("gpu")] if options.today else configurations().values()
    chosen = [one for one in recorded if one.gpus == options.gpus and (one.recorded or options.today)]
    if options.only:
        chosen = [one for one in chosen if any(text in one.name for text in options.only)]
    check_packages()
    machine = Machine(options.jobs, options.memory, options.budget, options.devices)
    out = find_root() / "traces" / "runtime"
    if options.today:
        out /= TODAY["sglang"]
    lines = drive(chosen, options.out or out, machine, recorder())
    print("\n".join(line.partition("\n")[0] for line in lines))
    return int(any(": recorded" not in line for line in lines))


if __name__ == "__main__":
    end_with(main)
