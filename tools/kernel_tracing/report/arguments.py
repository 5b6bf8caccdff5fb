"""The arguments that the tracers' command lines share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.kernel_tracing.configuration.listed import PATH, Configuration, configurations, select
from tools.kernel_tracing.configuration.requested import ConfigurationError

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
        "--model", default=model, help="trace the configurations of this model, of those that begin like this, or `all`"
    )
    parser.add_argument("--sources", type=Path, default=Path(".sources"), metavar="DIR", help="where the sources are")
    parser.add_argument("--list", type=Path, default=PATH, metavar="FILE", help="the list of configurations")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help="processes that evaluate configurations")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the data; with neither file, {name}")


def check_given(
    parser: argparse.ArgumentParser, options: argparse.Namespace, reads: Mapping[str, Sequence[str]]
) -> None:
    """Checks that what is done reads every option that is given.

    Args:
        reads: for each option that says what is done, by name, the others that it reads. That of "" holds if none is
            given.

    Raises:
        ConfigurationError: an option would be ignored.
    """
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    done = next((name for name in reads if name in given), "")
    for name in given:
        if name not in (done, *reads[done]):
            option = f"--{name.replace('_', '-')}"
            action = f"--{done.replace('_', '-')}" if done else "a trace"
            read = ", ".join(f"--{one.replace('_', '-')}" for one in reads[done]) or "no other option"
            raise ConfigurationError(f"{option}: {action} does not use it; leave it out ({action} uses {read})")


def chosen(model: str, path: Path = PATH) -> list[Configuration]:
    """The configurations of a model, in the order of the list.

    Raises:
        listed.ConfigurationError: the list is malformed, or has none for it.
    """
    return select(configurations(path).values(), model)
