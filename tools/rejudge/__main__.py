"""Shows on a CPU that a change of the code that judges changes no verdict, and records that nothing is stale.

python -m tools.rejudge --base REV [FAMILY ...]

The code of REV and that of this checkout judge each family at its small sizes: its reference, and for each kernel one
that answers as the reference does, mutants of its outputs, and faulty kernels. Where every verdict and every figure is
equal bit for bit, schema/equivalent_code.json gets the old digests and the new ones, and validation takes runs with the
old ones. Code that all families share counts as equivalent only when all were judged. The call of a kernel runs on a
GPU alone: where it changed, the runs of that kernel stay stale.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import find_root
from flashinfer_trace.dataset.evidence import EQUIVALENT_CODE
from flashinfer_trace.families import all_families
from flashinfer_trace.format.files import write_json
from flashinfer_trace.format.json_source import load_object
from tools.shared.command import end_with

SCHEMA = "equivalent_code.schema.json"
SCRIPT = Path(__file__).parent / "transcript.py"
#: Calls the script with the arguments after its path.
CALL = "import runpy, sys; runpy.run_path(sys.argv.pop(1))['main']()"
Transcript = Mapping[str, Any]


class RejudgeError(RuntimeError):
    """The code of one of the two checkouts cannot judge. The message has the end of what it printed."""


def transcripts(base: str, root: Path, families: Sequence[str]) -> tuple[Transcript, Transcript]:
    """The transcripts of a revision's code and of the checkout at `root`, made at the same time.

    Raises:
        RejudgeError: the revision does not exist, or its code cannot run the transcript.
    """
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "base"
        git = ["git", "-C", str(root), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(tree), base], capture_output=True, text=True)
        if added.returncode:
            raise RejudgeError(f"{base}: {added.stderr.strip()}")
        try:
            files = [Path(temporary) / name for name in ("base.json", "today.json")]
            started = [_judging(at, file, families) for at, file in zip((tree, root), files, strict=True)]
            for process, at in zip(started, (base, root), strict=True):
                _, errors = process.communicate()
                if process.returncode:
                    raise RejudgeError(f"the code of {at} cannot be judged with:\n{errors.strip()[-2000:]}")
            before, after = (json.loads(file.read_text(encoding="utf-8")) for file in files)
            return before, after
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True)


def _judging(at: Path, file: Path, families: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(at), "FLASHINFER_TRACE_ROOT": str(at), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", CALL, str(SCRIPT), str(file), *families]
    return subprocess.Popen(command, env=environment, cwd=at, stderr=subprocess.PIPE, text=True)


def compare(before: Transcript, after: Transcript, everything: bool) -> tuple[dict[str, str], list[str]]:
    """The old digests with the new ones that are equivalent, and a line for each kernel whose runs stay stale."""
    equivalent, shared, lines = dict[str, str](), dict[str, str](), list[str]()
    for family, old in before.items():
        new = after.get(family, {"said": {}, "code": {}})
        for label in old["code"].keys() & new["code"].keys():
            was, now = old["code"][label], new["code"][label]
            moved = was["family"] != now["family"]
            if was["harness"] != now["harness"]:
                shared[was["harness"]] = now["harness"]
            if any(old["said"][who] != new["said"].get(who) for who in ("reference", label)):
                lines.append(f"{family}: {label}: another verdict or figure")
                everything = False
            elif moved and old["adapters"][label] != new["adapters"][label]:
                lines.append(f"{family}: {label}: what calls it has changed, and runs on a GPU alone")
            elif moved:
                equivalent[was["family"]] = now["family"]
    if shared and not everything:
        lines.append("the code that all families share has changed; it is equivalent when all of them are judged alike")
    return {**equivalent, **(shared if everything else {})}, lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 1 if something is not equivalent."""
    parser = argparse.ArgumentParser(prog="python -m tools.rejudge", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", required=True, metavar="REV", help="the revision whose code judged the runs")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="judge these only [all]")
    given = parser.parse_args(argv)
    known = {family.name for family in all_families()}
    if unknown := sorted(set(given.families) - known):
        parser.error(f"no families {unknown}; `flashinfer-trace list` shows them")
    root = find_root()
    try:
        before, after = transcripts(given.base, root, given.families)
    except RejudgeError as error:
        print(error, file=sys.stderr)
        return 2
    equivalent, lines = compare(before, after, everything=not given.families)
    path = root / EQUIVALENT_CODE
    kept: dict[str, str] = load_object(path)["equivalent"] if path.exists() else {}
    if equivalent:
        write_json(path, {"$schema": SCHEMA, "equivalent": dict(sorted({**kept, **equivalent}.items()))})
    judged = sum(one["lines"] for one in after.values())
    print("\n".join([*lines, f"{judged} verdicts of {len(after)} families; {len(equivalent)} digests are equivalent"]))
    return 1 if lines else 0


if __name__ == "__main__":
    end_with(main)
