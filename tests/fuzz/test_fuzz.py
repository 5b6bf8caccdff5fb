"""A fixed sample of hostile files, and the parts of `python -m tools.fuzz` itself."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections import Counter

import pytest

from tools.extract_definitions import traces
from tools.fuzz import run as fuzz
from tools.fuzz.__main__ import FILES, OTHERS, SEED, main
from tools.fuzz.mutations import hostile_json, hostile_python
from tools.fuzz.run import Case, kind_of, run_case, start_worker
from tools.fuzz.sandbox import KINDS
from tools.fuzz.summary import RESULTS, summarise


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory):
    before, committed = dict(os.environ), traces.COMMITTED
    with warnings.catch_warnings():
        start_worker(str(tmp_path_factory.mktemp("fuzz")), limited=False)
        yield
    traces.COMMITTED = committed
    os.environ.clear()
    os.environ.update(before)


#: Files of each group: one or more of every kind.
SAMPLE = {"definitions": 20, "others": 20}


@pytest.mark.parametrize("group", KINDS)
def test_no_hostile_file_of_the_sample_does_harm(group):
    outcomes = [run_case(Case(group, SEED, number)) for number in range(SAMPLE[group])]
    assert {outcome.kind for outcome in outcomes} == {kind.name for kind in KINDS[group]}
    assert [finding for outcome in outcomes for finding in outcome.findings] == []
    assert sum(outcome.refused for outcome in outcomes) > len(outcomes) / 2
    assert max(outcome.megabytes for outcome in outcomes) < fuzz.MEGABYTES


def test_what_must_not_happen_is_found(monkeypatch):
    def fail(command, sandbox, path):
        raise AttributeError("planted")

    monkeypatch.setattr(fuzz, "run_command", fail)
    (finding, *_) = run_case(Case("others", SEED, 0)).findings
    assert "traceback: AttributeError at test_fuzz.py" in finding
    monkeypatch.setattr(fuzz, "run_command", lambda *_: (1, "x" * 6000))
    assert "prints a line of 6000 characters" in run_case(Case("others", SEED, 0)).findings[0]
    monkeypatch.setattr(fuzz, "run_command", lambda *_: (1, "Traceback (most recent call last):"))
    assert "prints a traceback" in run_case(Case("others", SEED, 0)).findings[0]
    monkeypatch.setattr(fuzz, "SECONDS", -1.0)
    monkeypatch.setattr(fuzz, "run_command", lambda *_: (0, ""))
    assert "took" in run_case(Case("others", SEED, 0)).findings[0]


def test_a_case_is_the_same_again():
    for group in KINDS:
        first, again = (run_case(Case(group, SEED, 5)) for _ in range(2))
        assert (first.kind, first.change, first.commands, first.refused) == (
            again.kind,
            again.change,
            again.commands,
            again.refused,
        )
    content = json.dumps({"a": [1, {"b": "c"}], "d": None}).encode()
    for made in (hostile_json, hostile_python):
        assert made(random.Random(3), content) == made(random.Random(3), content)


@pytest.mark.parametrize("group", KINDS)
def test_each_kind_has_its_share(group):
    counts = Counter(kind_of(Case(group, SEED, number)).name for number in range(1000))
    assert counts == {kind.name: kind.share for kind in KINDS[group]}


def test_replaying_needs_a_group_and_a_number(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--replay", "nothing:1"])
    assert error.value.code == 2
    assert "--replay takes" in capsys.readouterr().err


def test_the_committed_figures_are_of_the_whole_run_and_found_nothing():
    results = json.loads(RESULTS.read_text())
    assert results["seed"] == SEED
    assert sum(row["files"] for row in results["kinds"].values()) == FILES + OTHERS
    assert sum(row["findings"] for row in results["kinds"].values()) == 0
    assert results["kinds"].keys() == {kind.name for kinds in KINDS.values() for kind in kinds}
    assert summarise(0, []) == {"seed": 0, "kinds": {}}
