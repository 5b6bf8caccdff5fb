"""A fixed sample of mutants of every family, judged anew: the harness rejects at least what the last whole run says."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from flashinfer_trace.harness.family import Family
from tools.mutate import __main__ as command
from tools.mutate import campaign
from tools.mutate.__main__ import other_families, other_mutants, out_of_date
from tools.mutate.cases import SEED, Bench, Case, bench_of, drawn, known_families, representative
from tools.mutate.judge import judge
from tools.mutate.mutants import mutants, sample
from tools.mutate.reasons import EQUIVALENTS, KEPT, Reason, ReasonError, read_reasons, reason_of, unmatched
from tools.mutate.runner import judge_all
from tools.mutate.summary import FLOOR_FAMILY, FLOOR_OVERALL, RESULTS, below_floor, overall, render, score

#: One mutant in so many: about 1,200 of all families.
SHARE = 24
#: Drawn cases of the small twin that judge first. They and its corners reject nearly all; what they accept, all cases
#: judge, which include these.
FEW_EXAMPLES = 4

FAMILIES = known_families()
SUMMARIES = json.loads(RESULTS.read_text())


def few_cases(family: Family) -> tuple[Case, ...]:
    """The corners and a few cases of the small twin, the cheap ones first."""
    return tuple(sorted(drawn(family, representative(family), FEW_EXAMPLES, SEED), key=lambda case: case.elements))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sample_is_rejected_as_in_the_last_whole_run(name):
    family = FAMILIES[name]
    definition = representative(family)
    found = mutants(definition, family)
    chosen = sample(found, SHARE)
    equivalents = read_reasons(EQUIVALENTS)
    survivors = {survivor["content"] for survivor in SUMMARIES[name]["survivors"]}
    relevant = [mutant for mutant in chosen if reason_of(mutant, equivalents) is None]
    # Survivors of the whole run may survive here.
    accepted = [mutant for mutant in relevant if mutant.content not in survivors]
    for draw in (lambda: Bench(definition, family, few_cases(family)), lambda: bench_of(family, definition)):
        bench = draw() if accepted else None
        accepted = [mutant for mutant in accepted if bench and not judge(bench, mutant.source).rejected]
    new = [f"{m.id}: {m.before}  ->  {m.after}" for m in accepted]
    assert not new, "the harness accepts mutants that it rejected:\n" + "\n".join(new)
    assert other_mutants(name, found, SUMMARIES) == []


def test_the_committed_scores_are_above_their_floors():
    assert not below_floor(SUMMARIES)
    assert score(overall(SUMMARIES)) >= score(overall(SUMMARIES), answering=True) >= FLOOR_OVERALL
    assert min(score(summary, answering=True) for summary in SUMMARIES.values()) >= FLOOR_FAMILY
    total = overall(SUMMARIES)
    answering = total["mutants"] - total["counts"]["raised"] - total["counts"]["equivalent"]
    assert answering >= 3500  # those that raise an error on valid inputs are easily rejected


def test_the_committed_results_add_up():
    for family, summary in SUMMARIES.items():
        counts = summary["counts"]
        assert sum(counts.values()) == summary["mutants"], family
        assert counts.get("survived", 0) == len(summary["survivors"]), family


def test_every_family_has_results():
    """That the results are for today's mutants, the sample of each family shows."""
    assert other_families(FAMILIES, SUMMARIES) == []


def test_the_results_are_for_a_new_representative_too():
    """A new Definition may become the one whose reference is changed. The sample looks at all families."""
    for name, family in FAMILIES.items():
        definition = representative(family)
        if definition.name != SUMMARIES[name]["definition"]:
            assert other_mutants(name, mutants(definition, family), SUMMARIES) == []


def test_results_that_are_out_of_date_are_named(tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"gemm": {**SUMMARIES["gemm"], "digest": "another"}, "gone": SUMMARIES["rmsnorm"]}))
    monkeypatch.setattr(command, "RESULTS", results)
    monkeypatch.setattr(command, "known_families", lambda: {name: FAMILIES[name] for name in ("gemm", "rmsnorm")})
    found = [line.partition(";")[0] for line in out_of_date()]
    assert found == [
        "rmsnorm: has no results",
        "gone: has results but no record",
        "gemm: the results are for other mutants",
    ]


def test_a_run_of_one_family_keeps_the_results_of_the_others(tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    results.write_text(json.dumps(SUMMARIES))
    changed = {**SUMMARIES["gemm"], "digest": "another"}
    monkeypatch.setattr(command, "RESULTS", results)
    monkeypatch.setattr(command, "run_campaign", lambda *_: campaign.Campaign({"gemm": changed}))
    assert command.measure(["gemm"], judge_all, [], read_reasons(KEPT)) == 0
    written = json.loads(results.read_text())
    assert written == {**SUMMARIES, "gemm": changed} and list(written) == list(SUMMARIES)


@pytest.mark.parametrize(("names", "judged", "written"), [([], 1, True), ([], 0, False), (["gemm"], 1, False)])
def test_only_a_run_that_judged_every_mutant_writes_down_its_time(tmp_path, monkeypatch, names, judged, written):
    mutant = mutants(representative(FAMILIES["gemm"]), FAMILIES["gemm"])[0]
    times = tmp_path / "times.json"
    (tmp_path / "results.json").write_text(json.dumps(SUMMARIES))
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "TIMES", times)
    monkeypatch.setattr(command, "run_campaign", lambda *_: campaign.Campaign(dict(SUMMARIES), [mutant], judged=judged))
    command.measure(names, judge_all, [], read_reasons(KEPT), processes=3)
    assert times.exists() == written
    assert not written or "in 3 processes on" in command.harness_power()


def test_every_survivor_is_explained():
    text = render(SUMMARIES, read_reasons(KEPT))
    assert "Not explained yet" not in text
    for summary in SUMMARIES.values():
        for survivor in summary["survivors"]:
            assert survivor["id"] in text


def test_scores_below_the_floor_are_named():
    weak = {"family": {"mutants": 100, "counts": {"survived": 3, "equivalent": 0}, "survivors": []}}
    lines = below_floor(weak)
    assert len(lines) == 2 and "family" in lines[0] and "97.00%" in lines[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('[{"reason": "", "mutants": {"a": "b"}}]', "no reason"),
        ('[{"reason": "r", "mutants": {}}]', "no reason or no mutants"),
        ('[{"reason": "r", "check": "hope", "mutants": {"a": "b"}}]', "check 'hope'"),
    ],
)
def test_files_of_reasons_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "reasons.json"
    path.write_text(text)
    with pytest.raises(ReasonError, match=message):
        read_reasons(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("results.json", "{", "line 1"),
        ("results.json", "null", "is not a JSON object"),
        ("results.json", "[" * 100_000, "nested deeper than"),
        ("results.json", '{"gemm": 1}', "gemm: must be an object with definition, "),
        ("results.json", '{"gemm": {"definition": 1}}', "gemm: definition: is missing or of another kind"),
        ("results.json", None, "is not a regular file"),
        ("power/a.json", "{", "line 1"),
        ("power/a.json", "{}", "family: is missing or of another kind"),
        ("power/a.json", '{"family": "a", "kernel": "b", "gpu": "c", "faults": {"d": 1}}', "each must have 'applied'"),
        ("power/a.json", None, "is not a regular file"),
        ("kept.json", '[{"reason": 1, "mutants": {"a": "b"}}]', "reason and families are texts"),
        ("kept.json", '[{"reason": "r", "families": 1, "mutants": {"a": "b"}}]', "families are texts"),
        ("kept.json", None, "is not a regular file"),
    ],
)
def test_recorded_files_that_cannot_be_used_are_one_line(tmp_path, monkeypatch, capsys, name, text, message):
    """Without a text, a FIFO takes the place of the file: whoever opens it to read waits forever."""
    (tmp_path / "power").mkdir()
    (tmp_path / "results.json").write_text(RESULTS.read_text())
    (tmp_path / "kept.json").write_text(KEPT.read_text())
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.write_text(text) if text is not None else os.mkfifo(path)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(command, "load_power", partial(command.load_power, tmp_path / "power"))
    monkeypatch.setattr(command, "mutants", lambda *_: [])
    try:
        assert command.main(["--check"]) == 1
    except SystemExit as end:  # of argparse, for reasons
        assert end.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1 and message in lines[0] and str(path) in lines[0]


def test_a_reason_is_for_the_families_that_it_names_and_must_match_a_mutant():
    gemm = FAMILIES["gemm"]
    mutant = mutants(representative(gemm), gemm)[0]
    here = Reason("r", mutants={mutant.content: ""}, families=("ge*",))
    elsewhere = Reason("r", mutants={mutant.content: ""}, families=("rmsnorm",))
    assert reason_of(mutant, [elsewhere, here]) is here
    assert reason_of(mutant, [elsewhere]) is None
    assert unmatched([here, elsewhere], [mutant]) == [mutant.content]
