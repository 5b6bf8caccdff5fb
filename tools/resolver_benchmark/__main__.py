"""Precision and recall of call-edge resolvers on hand-labelled calls.

python -m tools.resolver_benchmark --sources DIR                            # the tracer's own resolver
python -m tools.resolver_benchmark --sources DIR --with jedi pycg pyan3     # and other tools, if installed

A label says which project functions one call can enter (tests/resolver_benchmark/labels/README.md). A resolver is asked
about the same calls. Precision is the share of its answers that are labelled, recall the share of labelled callees that
it found, both over all edges (micro-averaged). An answer for a call that enters nothing lowers precision.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashinfer_trace.files import write_json
from tools.resolver_benchmark import peers, tracer
from tools.resolver_benchmark.defined_names import DefinedNames
from tools.resolver_benchmark.labels import LABELS, Label, LabelError, Query, label_problems, read_labels
from tools.resolver_benchmark.scores import attribute, score, text

PEERS = ("jedi", "pycg", "pyan3")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 measured, 1 labels and sources do not match or nothing could be measured, 2 wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sources", type=Path, required=True, metavar="DIR", help="directory that contains sglang/, sgl_kernel/, ..."
    )
    parser.add_argument(
        "--labels", type=Path, default=LABELS, metavar="DIR", help="labels (default: those of the tests)"
    )
    parser.add_argument(
        "--with", dest="peers", nargs="+", choices=PEERS, default=[], help="other tools to measure as well"
    )
    parser.add_argument("--no-own", dest="own", action="store_false", help="do not measure the tracer's own resolver")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the other tools")
    parser.add_argument(
        "--limit", type=float, default=300, metavar="SECONDS", help="time limit for each other tool (default: 300)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        labels = read_labels(options.labels)
    except LabelError as error:
        print(error, file=sys.stderr)
        return 1
    if problems := label_problems(labels, options.sources):
        print("\n".join(problems), file=sys.stderr)
        print(
            f"{len(problems)} problems: is {options.sources} the release for which the labels were made?",
            file=sys.stderr,
        )
        return 1
    command = "python -m tools.resolver_benchmark --sources DIR"
    measured = []
    for tool in [*(["own"] if options.own else []), *options.peers]:
        try:
            entry = own_entry(labels, options.sources) if tool == "own" else peer_entry(tool, labels, options)
        except (peers.PeerError, ImportError) as error:
            entry = {"tool": tool, "failed": str(error)}
        if tool != "own":
            entry |= {"date": datetime.now(timezone.utc).date().isoformat(), "command": f"{command} --with {tool}"}
        measured.append(entry)
        print(text(entry))
    if options.json:
        write_json(options.json, measured)
    return 0 if any("failed" not in entry for entry in measured) else 1


def own_entry(labels: list[Label], sources: Path) -> dict[str, Any]:
    return {"tool": "own", **score(labels, tracer.edges(sources, [label.query for label in labels]))}


def peer_entry(tool: str, labels: list[Label], options: argparse.Namespace) -> dict[str, Any]:
    """Asks one other tool. If PyCG fails on the whole tree, which it may never finish, it is asked file by file."""
    known = DefinedNames(options.sources)

    def ask(name: str, asked: list[Label]) -> Any:
        return peers.ask(name, options.sources, [label.query for label in asked], options.python, options.limit)

    notes = []
    try:
        answers = [(ask(tool, labels), labels)]
    except peers.PeerError as error:
        if tool != "pycg" or "not installed" in str(error):
            raise
        notes.append(f"whole tree: {error}; analysed each labelled file separately instead")
        answers = []
        for file in sorted({label.file for label in labels}):
            asked = [label for label in labels if label.file == file]
            try:
                answers.append((ask("pycg-file", asked), asked))
            except peers.PeerError as failure:
                notes.append(f"{file}: {failure}")
        if not answers:
            raise peers.PeerError("; ".join(notes)) from error
    edges: dict[Query, set[str]] = {}
    for answer, asked in answers:
        if "edges" in answer:
            edges |= {(file, line, call): set(callees) for file, line, call, callees in answer["edges"]}
        else:
            graph = {caller: {known.locate(name) for name in names} for caller, names in answer["graph"].items()}
            edges |= attribute(asked, graph)
    entry = {"tool": tool, "version": answers[0][0]["version"], **score(labels, edges)}
    return entry | ({"notes": notes} if notes else {})


if __name__ == "__main__":
    sys.exit(main())
