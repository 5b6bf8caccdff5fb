"""Judges the references of a FlashInfer's templates by the oracles here.

python -m tools.templates [--flashinfer DIR]    # import FlashInfer, record what its templates write, and judge it
python -m tools.templates --judge               # judge the committed record again; FlashInfer is not needed
python -m tools.templates --judge --all         # also what is as it was when it was judged
python -m tools.templates --page                # print the page, which `python -m tools.site` builds as well

DIR holds the package `flashinfer` (default: the installed one). No GPU is needed: kernels and what else is missing have
stand-ins. Record, verdicts and page are the same each time, byte for byte. Exit status: 0 done, 2 nothing was written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.format.files import json_text, write_text
from flashinfer_trace.format.json_source import load_object
from tools.shared.command import end_with, names_its_cause
from tools.templates.record import RECORD, packed, read_record


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.templates", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flashinfer", type=Path, metavar="DIR", help="directory with flashinfer [installed one]")
    parser.add_argument("--judge", action="store_true", help="judge the committed record")
    parser.add_argument("--all", action="store_true", help="judge all of it, not only what has changed since")
    parser.add_argument("--page", action="store_true", help="print the page of the committed verdicts")
    options = parser.parse_args(arguments)
    try:
        _run(options, find_root())
    except Exception as error:
        if not names_its_cause(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace, root: Path) -> None:
    if options.page:
        from tools.templates.page import templates_document

        sys.stdout.write("".join(templates_document(root).values()))
        return
    from tools.templates.verdicts import VERDICTS, judged

    if not options.judge:
        from tools.templates.installed import recorded

        (root / RECORD).write_bytes(packed(recorded(options.flashinfer)))
    before = None if options.all or not options.judge else load_object(root / VERDICTS)
    write_text(root / VERDICTS, json_text(judged(read_record(root / RECORD), before)))


if __name__ == "__main__":
    end_with(main)
