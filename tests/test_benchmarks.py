"""The benchmark's loops compute what the references compute, and its command runs."""

from __future__ import annotations

import json

import pytest
import torch
from whole_dataset import MEMBERS

import flashinfer_trace
from benchmarks import isolation, references
from benchmarks.loops import LOOPS
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import evaluate
from flashinfer_trace.harness.verify import prepare

#: One Definition of each family.
CHOSEN = {name: members[-1] for name, members in MEMBERS.items()}


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_meets_the_oracle_of_the_family(name):
    family = family_of(CHOSEN[name])
    definition = prepare(CHOSEN[name], family, "cpu", full=False)
    inputs = family.inputs_for_axes(definition, {}, seed=3, device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        outputs = definition.name_outputs(LOOPS[name](*inputs.values()))
    comparisons = evaluate(family.policies(), outputs, family.oracle(definition, inputs))
    assert all(comparison.passed for comparison in comparisons.values()), str(comparisons)


def test_a_family_without_a_loop_is_timed_alone(capsys, monkeypatch):
    monkeypatch.delitem(LOOPS, "rmsnorm")
    assert references.main(["rmsnorm_h512", "--axes", "batch_size=4", "--repeat", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "rmsnorm_h512  batch_size=4" in line and "x " not in line


def test_the_command_prints_a_ratio_and_takes_an_older_reference(capsys, tmp_path):
    definition = flashinfer_trace.load("rmsnorm_h512")
    older = tmp_path / "older.py"
    older.write_text(definition.reference)
    common = ["rmsnorm_h512", "--axes", "batch_size=4", "--repeat", "2"]
    for extra in ([], ["--baseline", str(older)], ["--baseline", str(definition.path)], ["--no-baseline"]):
        assert references.main([*common, *extra]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert "rmsnorm_h512  batch_size=4" in line
        assert ("x " in line) == (extra != ["--no-baseline"])


def test_a_directory_of_another_dataset_is_compared_in_one_run(capsys, tmp_path):
    """Same name and inputs, in another order; other inputs; a reference that may not run; a name that we lack."""

    def write(name, change):
        theirs = json.loads(flashinfer_trace.load(name).path.read_text())
        change(theirs)
        folder = tmp_path / "definitions" / theirs["op_type"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{theirs['name']}.json").write_text(json.dumps(theirs))

    reversed_run = "import torch\n\n\ndef run(weight, hidden_states):\n    return hidden_states * weight\n"
    norm = flashinfer_trace.load("rmsnorm_h512")
    assert list(norm.inputs) == ["hidden_states", "weight"]
    write("rmsnorm_h512", lambda d: d.update(inputs=dict(reversed(d["inputs"].items())), reference=reversed_run))
    write("rmsnorm_h1536", lambda d: d["inputs"].update(eps={"shape": None, "dtype": "float32"}))
    write(
        "rmsnorm_h7168",
        lambda d: d.update(reference="import os\n\n\ndef run(hidden_states, weight):\n    os.abort()\n"),
    )
    write("rmsnorm_h2048", lambda d: d.update(name="rmsnorm_of_theirs"))
    common = ["--axes", "batch_size=4", "--repeat", "2", "--peer", str(tmp_path)]
    assert references.main(common) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "x " in lines["rmsnorm_h512"]
    assert "other inputs: eps" in lines["rmsnorm_h1536"]
    assert "not compared: cannot be read" in lines["rmsnorm_h7168"]
    assert "rmsnorm_of_theirs" not in lines
    assert lines["1"].startswith("1 compared: ours is slower in ")
    assert references.main(["rmsnorm_h1536", *common]) == 1
    with pytest.raises(SystemExit, match="no file named after one of our Definitions"):
        references.main(["rmsnorm_h128", *common])


def test_a_missed_target_is_exit_1(capsys, monkeypatch):
    workload = references.Workload("rmsnorm_h512", {"batch_size": 4}, seconds=1e-9)
    monkeypatch.setattr(references, "TARGETS", (workload,))
    assert references.main(["--repeat", "1"]) == 1
    assert "MISSED: 1e-09 s" in capsys.readouterr().out


def test_the_overhead_is_that_of_pairs_of_runs(capsys, monkeypatch):
    seconds = {isolation.CONFINED: 11.0, isolation.INSIDE: 10.0}
    ran = []

    def cost(code, names):
        ran.append((code, tuple(names)))
        return isolation.Cost(seconds[code], 2 * seconds[code])

    monkeypatch.setattr(isolation, "cost", cost)
    assert isolation.main(["-n", "2"]) == 0
    assert ran[2:] == 2 * [(code, tuple(isolation.one_of_each_family())) for code in seconds]
    told = capsys.readouterr().out
    assert told.count("overhead      of the minima +10.0%   median of the pairs +10.0%") == 2


def test_a_run_that_fails_is_not_measured():
    with pytest.raises(RuntimeError, match="exit status 3"):
        isolation.cost("import sys; sys.exit(3)", ["rmsnorm_h512"])
