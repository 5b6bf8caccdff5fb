"""Two samples of 200 and 100 chains, each labelled possible or impossible: by a recorded run, or by reading the code.

`sampled_chains.json` and `sampled_chains_default.json` say how. A chain that enters a sample because the trace changed
needs a label: read the calls that no recorded run shows, with the tests around them, in the sources of the release, for
a configuration of the chain.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from release import ROOT, SOURCES, needs_sources
from samples import SECOND_SIZE, SIZE, Sampled, calls, is_default, sampled, second_sampled

from tools.kernel_tracing.report.trace_files import load_traces

LABELS: dict[str, Any] = json.loads((ROOT / "tests/kernel_tracing/sampled_chains.json").read_text())
SECOND: dict[str, Any] = json.loads((ROOT / "tests/kernel_tracing/sampled_chains_default.json").read_text())
#: The largest share of impossible chains.
IMPOSSIBLE = 0.02


@cache
def trace() -> dict[str, Any]:
    return load_traces(ROOT / "traces" / "kernel_traces.json")


@pytest.fixture(scope="module")
def sample() -> list[Sampled]:
    return sampled(trace())


@pytest.fixture(scope="module")
def second() -> list[Sampled]:
    return second_sampled(trace())


def test_each_chain_of_the_samples_has_a_label(sample: list[Sampled], second: list[Sampled]) -> None:
    assert (len(sample), len(second)) == (SIZE, SECOND_SIZE)
    for drawn, labels in ((sample, LABELS["chains"]), (second, SECOND["chains"])):
        unlabelled = [(one.key, one.kernel, calls(one.chain)[0]) for one in drawn if one.key not in labels]
        assert unlabelled == []
        assert set(labels) == {one.key for one in drawn}, "remove the labels of chains that left the sample"


def test_few_chains_are_impossible_and_none_comes_first(sample: list[Sampled], second: list[Sampled]) -> None:
    labels = LABELS["chains"] | SECOND["chains"]
    impossible = [one for one in [*sample, *second] if labels[one.key]["label"] != "possible"]
    assert len(impossible) <= IMPOSSIBLE * (SIZE + SECOND_SIZE)
    assert [one.kernel for one in impossible if one.first] == []


def test_a_label_by_a_run_is_that_of_a_run_that_showed_the_chain(sample: list[Sampled], second: list[Sampled]) -> None:
    for one in [*sample, *second]:
        if run := (LABELS["chains"] | SECOND["chains"])[one.key].get("run"):
            assert run in one.chain["seen"], one


def _seen_calls() -> set[tuple[str, ...]]:
    """Each call that a recorded run shows, with the function that it enters; a kernel's call with the kernel."""
    found: set[tuple[str, ...]] = set()
    for kernel in trace()["kernels"]:
        for chain in kernel["chains"]:
            if chain["seen"]:
                found |= set(links(kernel["name"], chain))
    return found


def links(kernel: str, chain: dict[str, Any]) -> list[tuple[str, ...]]:
    every = calls(chain)
    return [(kernel, every[0]), *((inner.rpartition(":")[2], outer) for inner, outer in pairwise(every))]


def test_a_label_by_reading_covers_each_call_that_no_run_shows(sample: list[Sampled]) -> None:
    seen = _seen_calls()
    read = set(LABELS["calls"])
    for one in sample:
        label = LABELS["chains"][one.key]
        if "run" in label:
            continue
        unseen = {
            outer.rpartition(":")[0] for inner, outer in links(one.kernel, one.chain) if (inner, outer) not in seen
        }
        assert unseen <= read, (one.kernel, sorted(unseen - read))
        assert label["configuration"] in one.chain["configurations"]


def test_a_label_of_the_second_sample_names_what_decides_it(second: list[Sampled]) -> None:
    default = {one["name"] for one in trace()["configurations"] if is_default(one)}
    decided: set[str] = set()
    for one in second:
        label = SECOND["chains"][one.key]
        if "run" not in label:
            assert label["configuration"] in default & set(one.chain["configurations"]), one.key
            assert label["decided"], one.key
            decided |= set(label["decided"])
    assert decided == set(SECOND["facts"])


@needs_sources
def test_the_lines_that_were_read_are_in_the_code() -> None:
    for place, (text, _) in {**LABELS["calls"], **LABELS["facts"], **SECOND["facts"]}.items():
        file, _, line = place.rpartition(":")
        assert (SOURCES / file).read_text(encoding="utf-8").splitlines()[int(line) - 1].strip() == text, place
