"""Compares the kernels of today's stack of releases with those of another stack; needs no GPU.

python -m tools.follow --sglang 0.5.24                   # with a newer SGLang and its libraries
python -m tools.follow --sglang 0.5.24 --flashinfer-python 0.7.3 --out .follow     # follow.md and follow.json there
python -m tools.follow --sglang newest --models          # and the models of traces/dry: which call other kernels
python -m tools.follow                                   # the stack before with today's: how the pin moved last

It reads sources and imports none of them: those in .sources-stacks/, to which it fetches what a stack lacks. Every
kernel path of the table is unchanged, has another signature, moved, or is gone. Public kernels that are new and that no
family names follow, and in the JSON the pairs of Definition and kernel to run again. Compiled code is not compared, so
these are all pairs whose distribution has another version.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import definitions, find_root
from flashinfer_trace.dataset.evidence import kernels_today
from flashinfer_trace.format.files import write_json, write_text
from flashinfer_trace.kernels.stacks import BEFORE, TODAY
from flashinfer_trace.kernels.table import place_in
from tools.dry_run.install import InstallError, install_release
from tools.dry_run.plans import of_the_set
from tools.follow.compare import GONE, MOVED, OTHER, SIGNATURE, STATES, UNCHANGED, compare, package_of
from tools.follow.public import public_kernels
from tools.follow.stacks import READ, Stack, bring_stack
from tools.shared.command import end_with
from tools.shared.markdown import code, escape, table
from tools.source_archives import FetchError

#: Kernel path -> the Definitions that it computes, each with the kernel's label.
Pairs = Mapping[str, Sequence[tuple[str, str]]]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 compared, 1 the sources could not be fetched or read, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.follow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in READ:
        parser.add_argument(f"--{name}", dest=name, metavar="VERSION", help=f"the version of {name} to compare with")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write follow.md and follow.json here, print no table")
    parser.add_argument("--models", action="store_true", help="install that SGLang and run the models of traces/dry")
    parser.add_argument("--offline", action="store_true", help="fetch nothing")
    options = parser.parse_args(arguments)
    root = find_root()
    try:
        given = {name: version for name in READ if (version := getattr(options, name))}
        if options.models:
            given["sglang"] = install_release(given.get("sglang", TODAY["sglang"]))[0].version
        base, wanted = (TODAY, {**(TODAY if "sglang" not in given else {}), **given}) if given else (BEFORE, TODAY)
        old = bring_stack(base, root, not options.offline)
        new = bring_stack(wanted, root, not options.offline)
    except (FetchError, InstallError, OSError) as error:
        print(f"follow: {error}", file=sys.stderr)
        return 1
    found = report(old, new, kernel_pairs(root, base))
    if options.models:
        found["models"] = model_changes(given["sglang"])
    if options.out is None:
        print(markdown(found), end="")
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "follow.json", found)
        write_text(options.out / "follow.md", markdown(found))
        print(f"{options.out / 'follow.md'}, {options.out / 'follow.json'}: {summary(found)}")
    return 0


def kernel_pairs(root: Path, versions: Mapping[str, str]) -> Pairs:
    """Every kernel path that releases with these versions have of the table, with the Definitions that it computes."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    for definition in definitions(root=root):
        for label, kernel in kernels_today(root, definition).items():
            if (place := place_in(kernel.places, versions)) is not None:
                pairs.setdefault(place.path, []).append((definition.name, label))
    return {path: sorted(pairs[path]) for path in sorted(pairs)}


def report(old: Stack, new: Stack, pairs: Pairs) -> dict[str, Any]:
    """The comparison as JSON: the two stacks, an entry for each path, new kernels, and pairs to run again."""
    outcomes = compare(old, new, list(pairs))
    before, _ = public_kernels(old)
    after, unread = public_kernels(new)
    names = {path for one in outcomes for path in (one.path, one.now) if path}
    names |= {path.rpartition(".")[2] for path in names}
    fresh = {
        kernel: sorted(set(paths))
        for kernel, paths in sorted(after.items())
        if kernel not in before and not names & {*paths, kernel.rpartition(".")[2], *(_last(path) for path in paths)}
    }
    again = [
        {"definition": definition, "kernel": label, "now": one.now, "state": one.state}
        for one in outcomes
        if one.now and version_of(old, one.path) != version_of(new, one.now)
        for definition, label in pairs[one.path]
    ]
    return {
        "old": dict(old.versions),
        "new": dict(new.versions),
        "kernels": {
            one.path: {
                "state": one.state,
                "now": one.now,
                "changes": list(one.changes),
                "definitions": len({name for name, _ in pairs[one.path]}),
            }
            for one in outcomes
        },
        "new_kernels": fresh,
        "unread": sorted(set(unread)),
        "run_again": again,
    }


def model_changes(sglang: str) -> dict[str, list[str]]:
    """Each run of traces/dry that a release of SGLang changes or fails -> its other kernels, or the error."""
    found = {}
    for outcome, lines in of_the_set(sglang, 2):
        changed = [line.strip() for line in lines] if outcome.record else outcome.output.splitlines()[-1:]
        if changed:
            found[outcome.name] = changed
    return found


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def version_of(stack: Stack, path: str) -> str | None:
    """The distribution and version that a stack has a path from; None if it does not have the package."""
    owner = stack.owners.get(package_of(path))
    return f"{owner} {stack.versions[owner]}" if owner else None


def summary(found: Mapping[str, Any]) -> str:
    """The counts in one line."""
    counts = Counter(kernel["state"] for kernel in found["kernels"].values())
    states = ", ".join(f"{counts[state]} {state}" for state in STATES)
    pairs, fresh = len(found["run_again"]), len(found["new_kernels"])
    models = f"; {len(found['models'])} models call other kernels" if "models" in found else ""
    return f"{len(found['kernels'])} kernel paths: {states}; {fresh} new kernels, {pairs} pairs to run again{models}"


def markdown(found: Mapping[str, Any]) -> str:
    """The comparison as a page."""
    old, new = (", ".join(f"{name} {version}" for name, version in found[side].items()) for side in ("old", "new"))
    lines = ["# Kernels from one stack to another", "", f"From {escape(old)}", "", f"to {escape(new)}", ""]
    lines += [f"{escape(summary(found))}.", ""]
    for state in (SIGNATURE, MOVED, GONE, OTHER, UNCHANGED):
        rows = [
            [
                code(path),
                str(one["definitions"]),
                code(one["now"]),
                escape("; ".join(one["changes"])),
            ]
            for path, one in found["kernels"].items()
            if one["state"] == state
        ]
        if rows:
            title = f"## {state.capitalize()}"
            lines += [title, "", *table(("kernel", "Definitions", "now", "changes"), rows, "lrll"), ""]
    for name, changed in found.get("models", {}).items():
        lines += [f"## Other calls of {name}", "", *(f"- {code(line)}" for line in changed), ""]
    lines += ["## New kernels that no family names", ""]
    rows = [[code(kernel), ", ".join(map(code, paths))] for kernel, paths in found["new_kernels"].items()]
    lines += [*table(("kernel", "paths"), rows), ""]
    if found["unread"]:
        lines += ["## Registrations that cannot be read", "", *(f"- {code(place)}" for place in found["unread"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    end_with(main)
