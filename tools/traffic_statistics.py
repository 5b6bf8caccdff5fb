"""Computes the length statistics in workloads/traffic.json from published traces, which are not kept here.

python -m tools.traffic_statistics AzureLLMInferenceTrace_conv.csv     # or Mooncake's conversation_trace.jsonl

It finds the profile whose trace_sha256 is that of the file, and prints it with the statistics and their digest. Exit
status: 0 they are those of workloads/traffic.json, 1 they are others, 2 no profile is of this file, or a file is
unusable.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from flashinfer_trace import find_root
from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from tools.shared.command import end_with

#: Quantiles at 0, 1/64, 2/64, ..., 1.
INTERVALS = 64


def requests(path: Path) -> list[tuple[int, int]]:
    """Tokens of the prompt, and of the answer, of each request of a trace."""
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".csv":
            return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
        rows = [json.loads(line) for line in file]
        return [(row["input_length"], row["output_length"]) for row in rows]


def quantiles(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Quantiles of all integers in some ranges [first, end), each integer of each range counted once."""
    steps: dict[int, int] = {}
    for first, end in runs:
        steps[first] = steps.get(first, 0) + 1
        steps[end] = steps.get(end, 0) - 1
    edges = sorted(steps)
    total = sum(-steps[edge] * edge for edge in edges)
    found, height, below, wanted = [], 0, 0, 0
    for first, end in itertools.pairwise(edges):
        height += steps[first]
        above = below + height * (end - first)
        while wanted <= INTERVALS and height and above * INTERVALS >= wanted * total:
            # The smallest integer up to which there are at least wanted / INTERVALS of all.
            missing = max(1, -(-wanted * total // INTERVALS) - below)
            found.append(first + -(-missing // height) - 1)
            wanted += 1
        below = above
    return found


def profile(pairs: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """The statistics of one trace.

    ``prompts``: tokens of a prompt. ``running``: tokens of a request that is in a batch of decode; it is there for as
    many steps as its answer has tokens, so it is drawn in proportion to that. ``positions``: where in its prompt a
    token of prefill is; prompts are drawn in proportion to their length.
    """
    return {
        "prompts": quantiles((prompt, prompt + 1) for prompt, _ in pairs),
        "running": quantiles((prompt + 1, prompt + answer + 1) for prompt, answer in pairs if answer),
        "positions": quantiles((0, prompt) for prompt, _ in pairs if prompt),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace of Azure (.csv) or Mooncake (.jsonl)")
    trace = parser.parse_args(arguments).trace
    path = find_root() / "workloads" / "traffic.json"
    try:
        sha256 = hashlib.sha256(trace.read_bytes()).hexdigest()
        pairs = requests(trace)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{trace}: is not a readable trace of Azure or Mooncake ({error!r})", file=sys.stderr)
        return 2
    try:
        profiles = load_object(path)["profiles"].values()
        recorded = next((one for one in profiles if one.get("trace_sha256") == sha256), None)
    except (JsonSourceError, KeyError, AttributeError) as error:
        print(f"{path}: {error}; schema/traffic.schema.json describes it", file=sys.stderr)
        return 2
    if recorded is None:
        print(f"{path}: no profile has the trace_sha256 {sha256} of {trace}; write it there first", file=sys.stderr)
        return 2
    found = {**recorded, **profile(pairs)}
    found["lengths_sha256"] = lengths_sha256(found)
    print(json.dumps(found))
    return int(found != recorded)


if __name__ == "__main__":
    end_with(main)
