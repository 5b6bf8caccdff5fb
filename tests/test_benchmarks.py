"""The benchmark's loops compute what the references compute, and its command runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from whole_dataset import DEFINITIONS, MEMBERS

import flashinfer_trace
from benchmarks import comparison, isolation, page, peers, references
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


@pytest.fixture
def theirs(tmp_path):
    """Writes a changed copy of one of our Definitions into a directory of another dataset."""

    def write(name, /, **change):
        other = json.loads(flashinfer_trace.load(name).path.read_text()) | change
        folder = tmp_path / "definitions" / other["op_type"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(other))

    return write


def test_a_directory_of_another_dataset_is_compared_in_one_run(capsys, theirs, tmp_path):
    """Same name and inputs, in another order; other inputs; a reference that may not run; a name that we lack."""
    norm = flashinfer_trace.load("rmsnorm_h512")
    inputs = json.loads(norm.path.read_text())["inputs"]
    assert list(inputs) == ["hidden_states", "weight"]
    reversed_run = "import torch\n\n\ndef run(weight, hidden_states):\n    return hidden_states * weight\n"
    theirs("rmsnorm_h512", inputs=dict(reversed(inputs.items())), reference=reversed_run)
    theirs("rmsnorm_h1536", inputs={**inputs, "eps": {"shape": None, "dtype": "float32"}})
    theirs("rmsnorm_h7168", reference="import os\n\n\ndef run(hidden_states, weight):\n    os.abort()\n")
    theirs("rmsnorm_h2048", name="rmsnorm_of_theirs")
    theirs("rmsnorm_h4096", reference="def run(hidden_states, weight) return\n")
    written = tmp_path / "ratios.json"
    common = ["--axes", "batch_size=4", "--repeat", "2", "--peer", str(tmp_path)]
    assert references.main([*common, "--json", str(written)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "x " in lines["rmsnorm_h512"]
    assert "other inputs: eps" in lines["rmsnorm_h1536"]
    assert "not compared: cannot be read" in lines["rmsnorm_h7168"]
    assert "not compared: cannot be read" in lines["rmsnorm_h4096"]
    assert "rmsnorm_of_theirs" in lines["rmsnorm_h2048"]
    assert lines["1"].startswith("1 compared on ") and "geometric mean" in lines["1"]
    found = json.loads(written.read_text())
    assert [(one["definition"], one["axes"]) for one in found["ratios"]] == [("rmsnorm_h512", {"batch_size": 4})]
    assert found["ratios"][0]["ratio"] > 0
    assert found["ratios"][0]["reference_sha256"] == norm.reference_sha256
    assert found["peer"].startswith("files with the SHA-256 ")
    assert found["environment"]["threads"] == 1 and found["environment"]["torch"] == torch.__version__
    assert found["not_compared"].keys() == lines.keys() & {f"rmsnorm_h{n}" for n in (1536, 7168, 2048, 4096)}
    assert references.main(["rmsnorm_h1536", *common]) == 1
    with pytest.raises(SystemExit, match="no file named after one of our Definitions"):
        references.main(["rmsnorm_h128", *common])


def test_each_definition_is_compared_at_two_sizes_within_the_budget(capsys, theirs, tmp_path, monkeypatch):
    """The file has what was compared until then, and why the rest was not."""
    for name in ("rmsnorm_h512", "rmsnorm_h1536", "rmsnorm_h2048"):
        theirs(name)
    clock = iter(range(100))
    monkeypatch.setattr(comparison, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(comparison, "shortest", lambda *given: (1.0, 2.0))
    written = tmp_path / "ratios.json"
    command = ["--peer", str(tmp_path), "--json", str(written), "--budget", "3", "--without", "rmsnorm_h15*: it is odd"]
    assert references.main(command) == 0
    found = json.loads(written.read_text())
    axes = [(one["definition"], one["axes"]["batch_size"], one["ratio"]) for one in found["ratios"]]
    assert axes == [("rmsnorm_h2048", 8, 2.0), ("rmsnorm_h2048", 64, 2.0), ("rmsnorm_h512", 8, 2.0)]
    late = "no time was left of 3 s"
    assert found["not_compared"] == {"rmsnorm_h1536": "it is odd", "rmsnorm_h512 batch_size=64": late}
    assert late in capsys.readouterr().out
    with pytest.raises(SystemExit, match="GLOB: WHY"):
        references.main(["--peer", str(tmp_path), "--without", "rmsnorm_h1536"])


def test_a_faster_peer_is_judged_for_a_limited_time(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "shortest", lambda *given: (2.0, 1.0))
    monkeypatch.setattr(comparison, "JUDGED", -1.0)
    theirs("rmsnorm_h512", reference=flashinfer_trace.load("rmsnorm_h512").reference.replace("EPS = 1e-6", "EPS = 0.0"))
    assert references.main(["--axes", "batch_size=4", "--peer", str(tmp_path)]) == 1


def test_a_faster_peer_is_judged(capsys, theirs, tmp_path, monkeypatch):
    """Ours may be slower than a wrong reference, and not than a right one; times are measured twice before that."""
    measured = []
    monkeypatch.setattr(comparison, "shortest", lambda *given: measured.append(given) or (2.0, 1.0))
    theirs("rmsnorm_h512")
    command = ["--axes", "batch_size=4", "--peer", str(tmp_path)]
    assert references.main(command) == 1
    assert len(measured) == 2
    assert "0.50x  SLOWER" in capsys.readouterr().out
    # Wrong only for rows of zeros, which a corner has.
    without_epsilon = flashinfer_trace.load("rmsnorm_h512").reference.replace("EPS = 1e-6", "EPS = 0.0")
    theirs("rmsnorm_h512", reference=without_epsilon)
    assert references.main(command) == 0
    told = capsys.readouterr().out
    assert "0.50x  slower; theirs fails {" in told
    assert "ours is slower in 1, in 0 of them than a reference that passes" in told


def test_runs_alternate_and_the_shortest_counts(monkeypatch):
    called, durations = [], iter([1.0, 5.0, 3.0, 2.0, 4.0, 4.0])
    monkeypatch.setattr(comparison, "taken", lambda run, device: run() or next(durations))
    monkeypatch.setattr(comparison, "LEAST", 0.0)
    runs = (lambda: called.append("ours"), lambda: called.append("theirs"))
    assert comparison.shortest(runs, 3, "cpu") == (1000.0, 3000.0)
    assert called == ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_fast_functions_run_more_often(monkeypatch):
    clock, called = iter(range(100)), []
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: next(clock) * comparison.LEAST / 4)
    monkeypatch.setattr(comparison, "taken", lambda run, device: run() or 1.0)
    comparison.shortest((lambda: called.append("ours"), lambda: called.append("theirs")), 2, "cpu")
    assert called.count("ours") == called.count("theirs") == 1 + 5


def test_references_of_peers_may_leave_ties_and_begin_with_undefined_memory(theirs, tmp_path):
    """The results show whether they should; what may not run at all is refused as everywhere."""
    source = "import torch\n\n\ndef run(hidden_states, weight):\n    x = torch.empty_like(hidden_states)\n"
    theirs("rmsnorm_h512", reference=source + "    x[:] = hidden_states.sort(dim=0)[0]\n    return x\n")
    theirs("rmsnorm_h1536", reference=source + "    return torch.load(x)\n")
    allowed, refused = sorted(peers.peers(tmp_path, {"rmsnorm_h512", "rmsnorm_h1536"}), key=lambda one: one.reason)
    rows = torch.tensor([[2.0], [1.0]])
    assert allowed.run({"hidden_states": rows, "weight": rows[0]}).tolist() == [[1.0], [2.0]]
    assert refused.run is None and "torch.load" in refused.reason


def recorded(**change):
    """A file with one ratio of ours, changed."""
    name = "rmsnorm_h512"
    row = {"definition": name, "reference_sha256": flashinfer_trace.load(name).reference_sha256, "failure": ""}
    row |= {"axes": {"batch_size": 8}, "ours": 2.0, "theirs": 3.0, "ratio": 1.5}
    environment = {"processor": "a processor", "torch": "2.0"}
    return {"peer": "a peer", "environment": environment, "ratios": [row | change], "not_compared": {"gemm": "why"}}


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, "Ours is slower nowhere."),
        ({"ratio": 0.996}, "0.996 | no more than 5%, which is noise |"),
        ({"ratio": 0.996}, "Theirs takes less time in 1 of these ratios; in none of them by more than 5%, the noise"),
        ({"ratio": 0.7}, "Theirs takes less time in 1 of these ratios; in 1 of them by more than 5%, the noise"),
        ({"ratio": 0.7}, "0.700 | not explained |"),
        ({"ratio": 0.7, "failure": "{}: zeros"}, "0.700 | theirs is wrong: it fails `{}: zeros` |"),
        ({"reference_sha256": "0"}, "1 of 1 ratios are of older references of ours and left out."),
    ],
)
def test_the_page_says_why_ours_is_slower(change, shown):
    text = page.speed_page({"cpu": recorded(**change)}, list(MEMBERS["rmsnorm"]))
    assert shown in text and "| `gemm` | why |" in text
    assert ("geometric mean" in text) == ("reference_sha256" not in change)
    assert "## NVIDIA H200\n\nNot recorded yet." in text and "--device cuda" in text


def test_a_reason_is_of_one_file(monkeypatch):
    monkeypatch.setattr(page, "REASONS", {("cpu", "rmsnorm_*"): "It rounds twice."})
    (row,) = recorded(ratio=0.5)["ratios"]
    assert page.explanation("cpu", row) == "It rounds twice." and page.explanation("gpu", row) == ""


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / page.RECORDED / "cpu.json"
    path.parent.mkdir(parents=True)
    for text, said in (("{", "cpu.json"), (json.dumps(recorded() | {"ratios": [{}]}), "lacks axes")):
        path.write_text(text)
        with pytest.raises(flashinfer_trace.DatasetError, match=said):
            page.read(tmp_path)


def test_ours_are_at_least_as_fast_as_flashinfer_bench_has_them():
    """A recorded reference that is still ours has a reason if it is slower by more than noise."""
    files = page.read(flashinfer_trace.find_root())
    current = {one.name: one.reference_sha256 for one in DEFINITIONS.values()}
    rows = [
        (file, row)
        for file, found in files.items()
        for row in found["ratios"]
        if current.get(row["definition"]) == row["reference_sha256"]
    ]
    assert "cpu" in files and {found["peer"] for found in files.values()} == {"flashinfer-bench 0.1.2"}
    assert len([row for file, row in rows if file == "cpu"]) > 60, "record it again: see docs/reference_speed.md"
    assert [row for file, row in rows if row["ratio"] < 1 and not page.explanation(file, row)] == []
    assert all(row["ratio"] == pytest.approx(row["theirs"] / row["ours"], rel=0.002) for _, row in rows)


def test_a_missed_target_is_exit_1(capsys, monkeypatch):
    workload = references.Workload("rmsnorm_h512", {"batch_size": 4}, seconds=1e-9)
    monkeypatch.setattr(references, "TARGETS", (workload,))
    assert references.main(["--repeat", "1"]) == 1
    assert "MISSED: 1e-09 s" in capsys.readouterr().out


def test_the_overhead_is_that_of_pairs_of_runs(capsys, monkeypatch):
    seconds = {isolation.CONFINED: 11.0, isolation.INSIDE: 10.0}
    ran = []

    def cost(code, arguments):
        ran.append((code, tuple(arguments)))
        return isolation.Cost(seconds[code], 2 * seconds[code])

    monkeypatch.setattr(isolation, "cost", cost)
    assert isolation.main(["-n", "2"]) == 0
    assert ran[2:] == 2 * [(code, ("verify", *isolation.one_of_each_family())) for code in seconds]
    told = capsys.readouterr().out
    assert told.count("overhead      of the minima +10.0%   median of the pairs +10.0%") == 2


def test_a_run_that_fails_is_not_measured():
    with pytest.raises(RuntimeError, match="exit status 3"):
        isolation.cost("import sys; sys.exit(3)", ["rmsnorm_h512"])
