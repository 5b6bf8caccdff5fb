"""The arguments that the tracers' command lines share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tools.kernel_tracing.configuration.listed import PATH, Configuration, configurations, select

#: Stands for the models of all configurations.
ALL = "all"
#: Processes that evaluate, unless --jobs says otherwise.
JOBS = min(2, os.cpu_count() or 1)


def model_arguments(parser: argparse.ArgumentParser, name: str, model: str) -> None:
    """Adds arguments for what to trace and where to write it.

    Args:
        name: what is written if neither file is given.
        model: the default of --model.
    """
    parser.add_argument(
        "--model", default=model, help="trace the configurations whose model's name begins like this, or `all`"
    )
    parser.add_argument("--sources", type=Path, default=Path(".sources"), metavar="DIR", help="where the sources are")
    parser.add_argument("--list", type=Path, default=PATH, metavar="FILE", help="the list of configurations")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help="processes that evaluate configurations")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the data; with neither file, {name}")


def chosen(model: str, path: Path = PATH) -> list[Configuration]:
    """The configurations of a model, in the order of the list.

    Raises:
        listed.ConfigurationError: the list is malformed, or has none for it.
    """
    return select(configurations(path).values(), model)
