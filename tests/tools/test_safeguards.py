"""docs/safeguards.md counts what the tests hold."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from gpu_times import TimesRecorder

from benchmarks import times
from flashinfer_trace import DatasetError, find_root
from tools.site import safeguards


def test_what_is_counted_is_what_is_tested():
    from sandbox.conftest import ESCAPES  # of the tests
    from test_forgeries import FORGERIES

    fuzz = {"kinds": {"a": {"files": 3, "commands": 5, "refused": 4, "findings": 0}}}
    mutants = {"gemm": {"mutants": 10, "counts": {"compared": 9, "survived": 1}}}
    rows = {row[0]: row[1] for row in safeguards.counted(find_root(), fuzz, mutants)}
    assert rows["References that escape or deceive"].startswith(f"{len(ESCAPES)}, ")
    assert rows["Forged evidence"] == f"{len(FORGERIES)} forgeries, all refused"
    assert rows["Hostile files"].startswith("3 files, 5 runs of commands, [0 findings]")
    assert "90.00% of those that answer rejected" in rows["A wrong reference"]


def test_a_table_of_forgeries_that_is_gone_is_named(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_forgeries.py").write_text("FORGERIES = []\n")
    with pytest.raises(DatasetError, match=r"test_forgeries\.py: has no dictionary FORGERIES"):
        safeguards.forgeries(tmp_path)


def test_times_are_shown_once_they_are_measured(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(times.isolation, "cost", lambda *_: times.isolation.Cost(150.0, 82.4))
    assert "not recorded yet" in safeguards.timed(tmp_path)[0][1]
    assert times.main(["dataset"]) == 0
    row = safeguards.timed(tmp_path)[0][1]
    assert row.startswith("82 s on ") and "150 s of processors" in row
    monkeypatch.setattr(
        times.isolation, "pairs", lambda *_: [(times.isolation.Cost(10.5, 1), times.isolation.Cost(10, 1))]
    )
    assert times.main(["overhead"]) == 0
    assert safeguards.timed(tmp_path)[-1][1].startswith("+5.0% of a processor's time")
    assert set(times.read_times(tmp_path)) == {"dataset", "overhead"}


@pytest.mark.parametrize(
    ("processors", "limits"),
    [(2, ["180 s on 2 processors", "180 s", "-"]), (4, ["-", "180 s", "1500 s on 4 processors"])],
)
def test_a_limit_is_shown_only_beside_a_run_that_it_is_for(tmp_path, monkeypatch, processors, limits):
    """Not one of other processors, of another GPU, of several, or of a part of the dataset."""
    figures = {"seconds": 9, "processor_seconds": 9, "processes": 2, "processors": processors, "date": "2026-11-26"}
    gpus = [
        (name, count, 1234) for name, count in (("NVIDIA H200", 1), ("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 1))
    ]
    gpus.append(("NVIDIA H200", 1, 9))
    runs = [
        {"gpu": gpu, "gpus": count, "definitions": definitions, "passed": 9, "failed": 0, **figures}
        for gpu, count, definitions in gpus
    ]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / times.MEASURED_ON_GPUS).write_text(json.dumps({"runs": runs}))
    measured = {"dataset": figures, "sample": figures, "overhead": {**figures, "overhead": -0.0144}}
    (tmp_path / times.MEASURED).write_text(json.dumps(measured))
    monkeypatch.setattr(safeguards, "read_times", lambda: figures)
    rows = safeguards.timed(tmp_path)
    assert [row[2] for row in rows] == [*limits, "10 %", "900 s on one NVIDIA H200", "-", "-", "-"]
    assert rows[3][1] == "-1.4% of a processor's time (below 0 is noise; 2026-11-26)"


@pytest.mark.parametrize("text", ["{", "null", '{"dataset": 1}', '{"overhead": {"date": "x"}}'])
def test_measured_times_that_cannot_be_used_are_named(tmp_path, text):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / times.MEASURED).write_text(text)
    with pytest.raises(times.TimesError, match=r"times\.json: unusable .*measure again"):
        times.read_times(tmp_path)


def test_how_long_pairs_took_on_a_gpu_is_recorded_and_shown(tmp_path, monkeypatch):
    """A later run of as many Definitions on a GPU of this kind replaces the earlier one; skipped pairs do not count."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    path = tmp_path / times.MEASURED_ON_GPUS
    path.parent.mkdir()
    failed = SimpleNamespace(errisinstance=lambda kind: kind is not pytest.skip.Exception)
    skipped = SimpleNamespace(errisinstance=lambda kind: kind is pytest.skip.Exception)
    for names, found in ((["a", "b"], [None, failed]), (["a", "b"], [None, None]), (["c"], [None]), (["d"], [skipped])):
        recorder = TimesRecorder(path)
        for name, error in zip(names, found, strict=True):
            params = {"definition": SimpleNamespace(name=name), "kernel": None}
            item = SimpleNamespace(callspec=SimpleNamespace(params=params))
            for when in ("setup", "call", "teardown"):
                recorder.pytest_runtest_makereport(item, SimpleNamespace(when=when, excinfo=error))
        recorder.begin -= 100 * len(names)
        recorder.pytest_sessionfinish(SimpleNamespace())
    one, two = times.read_gpu_times(path)
    assert (one["definitions"], two["definitions"]) == (1, 2) and (two["passed"], two["failed"]) == (2, 0)
    row = safeguards.timed(tmp_path)[-1]
    assert row[0] == "`pytest -m gpu`: 2 pairs of 2 Definitions and their kernels"
    assert row[1].startswith("200 s on one NVIDIA H200 (") and row[2] == "-"
    path.write_text('{"runs": [{"gpu": "a"}]}')
    with pytest.raises(times.TimesError, match=r"gpu_times\.json: unusable .*measure again"):
        times.read_gpu_times(path)
