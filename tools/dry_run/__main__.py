"""Runs a model in SGLang's own code without a GPU, and records which kernels it calls, from where.

- `python -m tools.dry_run --model llama_3.1_8b --out record.json`: a model of the list, today's release
- `python -m tools.dry_run --model config.json --server tp_size=8 --out record.json`: a config.json, over 8 GPUs
- `python -m tools.dry_run --model deepseek_v3 --gpu sm100 --release 0.5.23 --out record.json`: another GPU and release
- `python -m tools.dry_run --compare [NAME ...]`: repeats runs that a GPU recorded (names, files), and compares
- `python -m tools.dry_run --all`: writes traces/dry again
- `python -m tools.dry_run --check --release 0.5.24`: how another release's calls differ from traces/dry

SGLang must be installed: python -m tools.fetch_sources --install --release 0.5.23. Exit status: 0 done, or nothing
differs; 1 SGLang refuses the model, something differs, or the run found what it cannot know; 2 wrong input.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from flashinfer_trace import DatasetError
from tools.dry_run import plans, release
from tools.dry_run.many import run_many
from tools.runtime_tracing import recording
from tools.runtime_tracing.configurations import PROMPTS
from tools.shared.command import end_with


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        if options.compare is not None:
            return plans.compare_all(options.compare, options.jobs)
        if options.all or options.check:
            return plans.run_all(options.all, options.release or release.DEFAULT, options.jobs)
        return _one(options)
    except (plans.PlanError, release.ReleaseError, recording.RecordingError, DatasetError) as error:
        print(error, file=sys.stderr)
        return 2


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.dry_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a model of the list, or a config.json")
    what.add_argument("--repeat", type=Path, metavar="RECORD", help="what a recorded run did")
    what.add_argument("--configuration", metavar="NAME", help="a run of the list of configurations")
    what.add_argument("--compare", nargs="*", metavar="NAME", help="repeat recorded runs, all or some, and compare")
    what.add_argument("--all", action="store_true", help="write traces/dry: every run of tools/dry_run/set.json")
    what.add_argument("--check", action="store_true", help="what a release calls otherwise than traces/dry says")
    parser.add_argument("--jobs", type=int, default=2, help="with --all, --check and --compare: runs at a time")
    parser.add_argument("--release", help=f"of SGLang (default: {release.DEFAULT})")
    parser.add_argument("--server", nargs="*", default=[], metavar="KEY=VALUE", help="SGLang's server arguments")
    parser.add_argument("--environment", nargs="*", default=[], metavar="KEY=VALUE", help="environment variables")
    parser.add_argument("--gpu", choices=("sm90", "h200", "sm100"), default="sm90", help="H100, H200 or B200")
    parser.add_argument("--phases", nargs="+", default=["prefill", "decode", "extend"], help="what is recorded")
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), help="lengths of the prompts")
    parser.add_argument("--name", help="of the configuration (default: the model, and its settings)")
    parser.add_argument("--out", type=Path, help="the record to write (default: its name, .json)")
    return parser.parse_args(arguments)


def _settings(items: list[str]) -> dict[str, Any]:
    """``key=value`` items; several may stand in one, separated by commas."""
    found = {}
    for part in [part for item in items for part in _parts(item)]:
        key, equals, value = part.partition("=")
        if not equals:
            raise plans.PlanError(f"{part!r} is not KEY=VALUE")
        try:
            found[key.strip()] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[key.strip()] = value
    return found


def _parts(item: str) -> list[str]:
    """The settings of an item: a comma separates them where what follows it is a new ``key=``."""
    found: list[str] = []
    for part in item.split(","):
        if found and "=" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return [part for part in found if part]


def _one(options: argparse.Namespace) -> int:
    if options.repeat is not None:
        plan, version = plans.of_record(options.repeat)
    elif options.configuration is not None:
        plan, version = plans.of_configuration(options.configuration), options.release or release.DEFAULT
    else:
        server, environment = _settings(options.server), _settings(options.environment)
        plan = plans.of_model(options.model, server, options.gpu, tuple(options.phases), tuple(options.prompts))
        plan = plans.renamed(plan, options.name, {key: str(value) for key, value in environment.items()})
        version = options.release or release.DEFAULT
    (outcome,) = run_many({plan.name: (plan, version)})
    print(outcome.output.rstrip(), file=sys.stderr)
    print(outcome.line.partition("\n")[0])
    if outcome.record is None:
        return 1
    (options.out or Path(f"{plan.name}.json")).write_bytes(outcome.content)
    return 0


if __name__ == "__main__":
    end_with(main)
