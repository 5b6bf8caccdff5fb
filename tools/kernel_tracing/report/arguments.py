"""The arguments that the tracers' command lines share."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.kernel_tracing.report.trace_files import TRACES
from tools.kernel_tracing.rules.platforms import PLATFORMS


def model_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds arguments for what to trace and where to write it; `name` is the default file name, without suffix."""
    parser.add_argument(
        "--model", default="deepseek", help="the name of the model's file in sglang/srt/models, without .py"
    )
    parser.add_argument("--sources", type=Path, default=Path(".sources"), metavar="DIR", help="where the sources are")
    parser.add_argument(
        "--entry",
        action="extend",
        nargs="+",
        default=[],
        metavar="MODULE:CLASS",
        help="entry classes to use instead of EntryClass",
    )
    parser.add_argument(
        "--platform", choices=PLATFORMS, default="cuda", help="platform to trace; branches for others are ignored"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the report (default: {TRACES}/{name}.md)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"the data (default: {TRACES}/{name}.json)")
