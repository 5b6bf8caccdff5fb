"""Writes schema/flashinfer_bench.json: the facts about flashinfer-bench's Definitions, from a clone of its repository.

python -m tools.compatibility PATH_OF_THE_CLONE [--commit COMMIT]

Names, op_types, axes, dtypes, shapes and the constants that decide what a reference computes are taken over; neither
code nor descriptions are. The semantics that people wrote stay; tests/compatibility/test_meanings.py checks them.
Without --commit the commit of the present table is read again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flashinfer_trace import find_root
from flashinfer_trace.dataset.flashinfer_bench import constants_of, load_compatibility, table_path
from flashinfer_trace.format.files import Lines, laid_out, write_text
from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load_object
from tools.shared.command import end_with

REPOSITORY = "https://github.com/flashinfer-ai/flashinfer-bench"
FOLDER = "flashinfer_trace/definitions"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compatibility", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, help="a clone of flashinfer-bench's repository, bare or not")
    parser.add_argument("--commit", help="the commit to read, by default that of the present table")
    options = parser.parse_args(arguments)
    root = find_root()
    present = load_compatibility(root)
    commit = options.commit or (present.source["commit"] if present else None)
    if commit is None:
        parser.error("there is no table yet: give --commit")
    try:
        text = document(options.clone, commit)
    except (OSError, JsonSourceError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        print(f"{options.clone}: cannot read {FOLDER} at {commit}: {reason.strip()}", file=sys.stderr)
        return 2
    write_text(table_path(root), text)
    print(f"{table_path(root)}: written")
    return 0


def document(clone: Path, commit: str) -> str:
    """The text of the table."""
    full, date = git(clone, "log", "-1", "--format=%H %cs", commit).split()
    paths = git(clone, "ls-tree", "-r", "--name-only", full, FOLDER).split()
    found = [json.loads(git(clone, "show", f"{full}:{path}")) for path in paths if path.endswith(".json")]
    table = {
        "$schema": "flashinfer_bench.schema.json",
        "source": {"repository": REPOSITORY, "folder": FOLDER, "commit": full, "date": date},
        "semantics": load_object(table_path(find_root()), TRACES)["semantics"],
        "definitions": {one["name"]: facts(one) for one in sorted(found, key=lambda one: str(one["name"]))},
    }
    return laid_out(table, layout)


def facts(data: dict[str, Any]) -> dict[str, Any]:
    """The table's facts about one Definition."""
    tensors = {
        section: {name: {"shape": one["shape"], "dtype": one["dtype"]} for name, one in data[section].items()}
        for section in ("inputs", "outputs")
    }
    return {
        "op_type": data["op_type"],
        "axes": {name: axis.get("value", "var") for name, axis in data["axes"].items()},
        **tensors,
        "constants": dict(sorted(constants_of(data["reference"]).items())),
    }


def layout(path: tuple[str, ...], value: Any) -> Lines | None:
    """One line per section of a Definition."""
    if len(path) == 0:
        return Lines(2, closing=0)
    if path == ("semantics",):
        return Lines(4, closing=2)
    if path[0] == "definitions" and len(path) <= 2:
        return Lines(2 * len(path) + 2, closing=2 * len(path))
    return None


def git(clone: Path, *arguments: str) -> str:
    """The output of one git command in the clone."""
    command = ["git", "-C", str(clone), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    end_with(main)
