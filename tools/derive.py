"""Writes the files that are derived and committed besides the Definitions; `flashinfer-trace sync` starts with it.

python -m tools.derive [--check]

In this order, because each follows from those before it:

1. models/needs/<model>.json: the kernels that a model's code calls, and its ops that no Definition describes,
2. models/recorded/: the recorded runs that call each Definition.

Prints a JSON list of the files that changed, each with what was done. With --check, nothing is written, and the files
that follow from an outdated one are not judged. Exit status: 0 done, 2 a file or a record cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flashinfer_trace import definitions, find_root
from flashinfer_trace.dataset.model_claims import load_model_claims
from flashinfer_trace.format.files import read_text, write_text
from flashinfer_trace.format.json_source import TRACES
from tools.extract import model_needs
from tools.runtime_tracing import model_calls
from tools.runtime_tracing.consistency import consistent
from tools.shared.command import end_with, names_its_cause
from tools.shared.family_records import usable_families

Documents = Mapping[Path, str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    root = find_root()
    changed: list[tuple[Path, str]] = []
    try:
        # Data that nobody can use is an error before anything is written.
        usable_families()
        load_model_claims(root)
        for stage in STAGES:
            changed += bring_up_to_date(root, stage(root), write=not options.check)
            if options.check and changed:
                break
    except Exception as error:
        if not names_its_cause(error):
            raise
        print(error, file=sys.stderr)
        return 2
    print(json.dumps([{"file": path.relative_to(root).as_posix(), "change": what} for path, what in changed]))
    return 0


def bring_up_to_date(root: Path, texts: Documents, write: bool) -> list[tuple[Path, str]]:
    """The files that differ from these texts, which are written unless `write` is false, and what is done to each."""
    changed = []
    for path, text in texts.items():
        if not path.exists() or read_text(path, TRACES.bytes) != text:
            changed.append((path, "derived data"))
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
    for path in (path for folder in {path.parent for path in texts} for path in sorted(folder.glob("*.json"))):
        if path not in texts:
            changed.append((path, "of a model or a Definition that is gone"))
            if write:
                path.unlink()
    return changed


def recorded_calls(root: Path) -> Documents:
    """models/recorded/."""
    return model_calls.documents(root, consistent(root / "traces" / "runtime", root), list(definitions(root=root)))


STAGES: tuple[Callable[[Path], Documents], ...] = (model_needs.documents, recorded_calls)


if __name__ == "__main__":
    end_with(main)
