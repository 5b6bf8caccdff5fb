"""The part of docs/harness_power.md about faulty kernels."""

from __future__ import annotations

import json

from flashinfer_trace import definitions, find_root
from flashinfer_trace.families import family_of
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.harness.power import faults_of
from flashinfer_trace.judging.costs.work import load_gpus
from tools.mutate.kernel_power import COLUMNS, load_power, render_power

EVIDENCE = find_root() / "evidence"
RECORD = {
    "family": "toy",
    "kernel": "library.toy",
    "gpu": "NVIDIA H200",
    "faults": {
        "y: a stale row": {"applied": 3, "cases": 2},
        "z: a stale row": {"applied": 3, "cases": 5},
        "y: last column zero": {"applied": 0, "cases": None},
        "y: two rows exchanged": {"applied": 9, "cases": None},
        "k - 1": {"applied": 1, "cases": 4},
    },
}


def test_the_tables_show_the_slowest_rejection_and_what_is_not_rejected():
    kernels = [("toy", "library.toy"), ("toy", "library.other")]
    text = render_power([RECORD], {"toy": {"y: two rows exchanged": "Rows are in any order."}}, kernels)
    row = next(line for line in text.splitlines() if line.startswith("| `toy` | –"))
    cells = dict(zip(COLUMNS.values(), [cell.strip() for cell in row.split("|")[2:]], strict=False))
    assert (cells["Stale row"], cells["Zero column"], cells["Rows exchanged"]) == ("5", "–", "no")
    assert "| `toy` | k - 1 | 4 |" in text
    assert "Rows are in any order.\n\n- `toy`, y: two rows exchanged: `library.toy`" in text
    assert "Not explained yet" not in text
    assert "for 1 of 2 kernels.\n\nThese have no record yet:\n\n- `toy`: `library.other`\n\n|" in text
    assert "for 1 of 1 kernels.\n\n|" in render_power([RECORD], {}, kernels[:1])
    assert "Not explained yet" in render_power([RECORD], {}, kernels)
    assert "No GPU run is recorded yet." in render_power([], {}, kernels)


def test_records_are_read_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**RECORD, "family": name}))
    assert [record["family"] for record in load_power(tmp_path)] == ["a", "b"]


def test_committed_records_are_of_todays_kernels_and_faults():
    families = {family_of(definition).name: (definition, family_of(definition)) for definition in definitions()}
    for record in load_power():
        definition, family = families[record["family"]]
        assert record["kernel"] in {kernel.label for kernel in family.kernels}
        assert list(record["faults"]) == [fault.name for fault in faults_of(definition, family)]
        unexplained = [
            fault
            for fault, power in record["faults"].items()
            if power["applied"] and power["cases"] is None and not family.why_unseen(fault)
        ]
        assert not unexplained, f"{record['kernel']}: {unexplained}"


def test_committed_records_are_of_a_definition_and_a_machine_that_there_are():
    """The GPU is a known one, with the torch of the evidence; what was rejected, was applied."""
    kernels = {one.name: {kernel.label for kernel in family_of(one).kernels_of(one)} for one in definitions()}
    versions = {load_object(path)["torch"] for path in EVIDENCE.glob("runs/*.json")}
    gpus = {name for gpu in load_gpus(find_root()).values() for name in gpu.driver_names}
    for record in load_power():
        assert record["kernel"] in kernels.get(record["definition"], ()), record["definition"]
        assert record["gpu"] in gpus and record["torch"] in versions, (record["kernel"], record["gpu"])
        rejected = [power for power in record["faults"].values() if power["cases"] is not None]
        assert all(power["cases"] >= 1 and power["applied"] >= 1 for power in rejected), record["kernel"]


def test_every_generic_fault_has_a_column():
    definition = next(iter(definitions()))
    names = {fault.name.split(": ")[-1] for fault in faults_of(definition, family_of(definition))}
    own = {fault.name for fault in family_of(definition).faults}
    assert names - own <= set(COLUMNS)
