"""A fixed sample of hostile files, and the parts of `python -m tools.fuzz` itself."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections import Counter

import pytest

from flashinfer_trace.dataset.digests import content_sha256, lengths_sha256
from flashinfer_trace.dataset.validation.data_rules import DATA
from tools.fuzz import run as fuzz
from tools.fuzz.__main__ import FILES, OTHERS, SEED, main
from tools.fuzz.mutations import hostile_json, hostile_python, sealed
from tools.fuzz.run import Case, Outcome, kind_of, run_case, start_worker
from tools.fuzz.sandbox import KINDS, SYNC, VALIDATE
from tools.fuzz.summary import RESULTS, document, summarize


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory):
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            start_worker(str(tmp_path_factory.mktemp("fuzz")), limited=False)
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


#: Files of each group; the first of every kind comes in addition.
SAMPLE = 20


def sample(group):
    first = {kind_of(Case(group, SEED, number)).name: number for number in reversed(range(1000))}
    return sorted({*range(SAMPLE), *first.values()})


@pytest.mark.parametrize("group", KINDS)
def test_no_hostile_file_of_the_sample_does_harm(group):
    outcomes = [run_case(Case(group, SEED, number)) for number in sample(group)]
    assert {outcome.kind for outcome in outcomes} == {kind.name for kind in KINDS[group]}
    assert [finding for outcome in outcomes for finding in outcome.findings] == []
    assert sum(outcome.refused for outcome in outcomes) > len(outcomes) / 2
    assert max(outcome.megabytes for outcome in outcomes) < fuzz.MEGABYTES


def test_each_file_of_the_sandbox_has_a_kind():
    sandbox = fuzz._sandbox
    covered = {path for kinds in KINDS.values() for kind in kinds for path in sandbox.bases(kind.name)}
    left = {path.relative_to(sandbox.root) for path in {*sandbox.root.rglob("*.json")} - covered}
    assert {str(path) for path in left if path.parts[0] != "models"} == set()
    others = {*sandbox.root.glob("models/*.json"), *sandbox.root.glob("models/needs/*.json")}
    assert {sandbox.root / path for path in left if path.parts[0] == "models"} < others  # of the same form


@pytest.mark.parametrize("pattern", DATA)
def test_each_data_file_that_validate_checks_is_given_to_validate_and_embed(pattern):
    sandbox = fuzz._sandbox
    found = {*sandbox.root.glob(pattern)}
    kinds = [kind for kind in KINDS["others"] if {*sandbox.bases(kind.name)} <= found]
    assert len(kinds) == 1
    assert {VALIDATE, SYNC} <= {*kinds[0].commands}


def test_digests_are_right_again():
    profile = {"prompts": [1, 2], "lengths_sha256": "0"}
    found = json.loads(sealed(json.dumps({"profiles": {"one": profile}}).encode()))["profiles"]["one"]
    assert found["lengths_sha256"] == lengths_sha256(profile)
    found = json.loads(sealed(b'{"$schema": "x", "sha256": "0", "calls": []}'))
    assert found["sha256"] == content_sha256({"calls": []})
    for content in (b"{", b"[]", b'{"profiles": 5}', b'{"profiles": {"one": 5}}'):
        assert sealed(content) == content


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
    counts = Counter(
        kind_of(Case(group, SEED, number)).name for number in range(sum(kind.share for kind in KINDS[group]))
    )
    assert counts == {kind.name: kind.share for kind in KINDS[group]}


def test_replaying_needs_a_group_and_a_number(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--replay", "nothing:1"])
    assert error.value.code == 2
    assert "--replay takes" in capsys.readouterr().err


def test_one_group_can_be_run_anew(tmp_path, monkeypatch):
    committed = json.loads(RESULTS.read_text())
    results = tmp_path / "results.json"
    results.write_text(RESULTS.read_text())
    monkeypatch.setattr("tools.fuzz.summary.RESULTS", results)
    monkeypatch.setattr("tools.fuzz.__main__.RESULTS", results)
    monkeypatch.setattr("tools.fuzz.__main__.run", lambda cases, _: [Outcome(kind_of(one).name, "") for one in cases])
    assert main(["--group", "others", "--others", "5"]) == 0
    assert json.loads(results.read_text()) == committed
    assert main(["--group", "others"]) == 0
    found = json.loads(results.read_text())["kinds"]
    assert found["reference"] == committed["kinds"]["reference"]
    assert found["traffic"] == {"files": 100, "commands": 0, "refused": 0, "findings": 0}
    assert sum(row["files"] for row in found.values()) == FILES + OTHERS


def test_the_document_says_which_commands_got_one_file_in_a_hundred():
    rows = {line.split("|")[1].strip(): line for line in document(json.loads(RESULTS.read_text())).splitlines()[25:]}
    (every, sometimes) = rows["reference"].split("|")[2:4]
    assert (every.strip(), sometimes.strip()) == ("`validate`, `sync --check`", "`verify NAME --examples 1`")
    assert "`tools.trace`, `tools.extract`" in rows["runtime"]


def test_the_committed_figures_are_of_the_whole_run_and_found_nothing():
    results = json.loads(RESULTS.read_text())
    assert results["seed"] == SEED
    assert sum(row["files"] for row in results["kinds"].values()) == FILES + OTHERS
    assert sum(row["findings"] for row in results["kinds"].values()) == 0
    assert results["kinds"].keys() == {kind.name for kinds in KINDS.values() for kind in kinds}
    assert summarize(0, []) == {"seed": 0, "kinds": {}}
