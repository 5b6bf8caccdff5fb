"""The whole of a benchmark on a CPU, whose times mean nothing: every timed output is judged, and what is recorded."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import click
import jsonschema
import pytest
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.cli.judgment import _chosen
from flashinfer_trace.dataset import store
from flashinfer_trace.judging.bench import Policy, bench, results
from flashinfer_trace.judging.bench.environment import Clocks, Environment
from flashinfer_trace.judging.bench.measure import workload_bytes
from flashinfer_trace.judging.bench.report import Measured, Report, Timetable
from flashinfer_trace.judging.bench.statistics import KEPT, Series, summary
from flashinfer_trace.judging.process import SubmissionProcess
from flashinfer_trace.judging.server import Server

NORM = "rmsnorm_h512"
HEAD = "import torch\nn = [0]\ndef good(x, w):\n    v = x.float()\n"
GOOD = HEAD + "    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)\n"
SHORT = Policy(fresh=2, least=2, repeats=3, processes=2)


@pytest.fixture(scope="module")
def server():
    with Server() as started:
        yield started


def timed(tmp_path, server, text, policy=SHORT):
    """A kernel in timed calls, on small inputs of a workload."""
    path = tmp_path / "mine.py"
    path.write_text(GOOD + text)
    workloads = [one for one in flashinfer_trace.workloads(NORM) if one.name == "decode-8"]
    return bench([path], NORM, workloads, device="cpu", policy=policy, examples=2, seed=5, server=server)


def test_a_right_kernel_is_timed_on_fresh_inputs(tmp_path, server):
    report = timed(tmp_path, server, "def run(x, w):\n    return good(x, w)\n")
    assert report.passed and report.timed and report.verdicts[0].grade == "reference-grade"
    (table,) = report.timetables
    (mine,) = table.kernels
    assert (mine.summary.inputs, mine.summary.processes, mine.summary.calls) == (2, 2, 12) and mine.summary.seconds > 0
    assert table.bytes == 2 * (2 * 8 * 512 + 512) and table.axes == {"batch_size": 8}
    assert set(report.left_out.values()) == {"needs a GPU"}
    json.dumps(report.to_dict())


def test_a_wrong_kernel_is_not_timed(tmp_path, server):
    report = timed(tmp_path, server, "def run(x, w):\n    return x\n")
    assert not report.passed and report.timetables == [] and report.verdicts[0].failure.kind == "values"


def test_several_submissions_are_compared_in_one_run(tmp_path, server):
    """Two files with the same name get their own results; the wrong one is judged but not timed."""
    texts = {"a": "def run(x, w):\n    return good(x, w)\n", "b": SLOW, "c": "def run(x, w):\n    return x\n"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(GOOD + text)
    workloads = [one for one in flashinfer_trace.workloads(NORM) if one.name == "decode-8"]
    paths = [tmp_path / name / "mine.py" for name in texts]
    report = bench(paths, NORM, workloads, device="cpu", policy=SHORT, examples=1, seed=5, server=server)
    assert [one.passed for one in report.verdicts] == [True, True, False] and not report.passed
    (table,) = report.timetables
    assert [one.kernel for one in table.kernels] == ["mine.py #1", "mine.py #2"]
    fast, slow = table.kernels
    assert slow.summary.seconds > fast.summary.seconds
    assert [one["grade"] for one in report.to_dict()["verdicts"]] == ["reference-grade", "reference-grade", "wrong"]


def test_a_budget_of_memory_skips_what_does_not_fit():
    definition = flashinfer_trace.load(NORM)
    workloads = {one.name: one for one in flashinfer_trace.workloads(NORM)}
    small, large = workloads["decode-8"], workloads["prefill-8192"]
    assert workload_bytes(definition, small) == 2 * (2 * 8 * 512 + 512)
    policy = Policy(fresh=1, least=1, memory=workload_bytes(definition, large) * KEPT - 1)
    assert policy.too_large(workload_bytes(definition, large)).startswith("its kernels need ")
    assert not policy.too_large(workload_bytes(definition, small)) and policy.budget(1 << 40) == policy.memory
    sizes = sorted({workload_bytes(definition, one) for one in workloads.values()})
    for budget, size in ((policy, sizes[-2]), (Policy(), sizes[-1]), (Policy(memory=1), sizes[0])):
        assert [workload_bytes(definition, one) for one in _chosen(definition, "largest", budget)] == [size]


def test_a_workload_beyond_the_budget_is_skipped_with_the_reason(tmp_path, server):
    report = timed(tmp_path, server, "def run(x, w):\n    return good(x, w)\n", dataclasses.replace(SHORT, memory=1000))
    (table,) = report.timetables
    assert table.kernels == () and table.skipped.startswith("its kernels need ") and not report.timed


SLOW = "import time\nwait = time.sleep\ndef run(x, w):\n    wait(0.003)\n    return good(x, w)\n"

#: Each is right when it is judged, and in the first calls of a benchmark.
LATE = {
    # The verdict makes its own process; in the one that is timed, the calls begin anew.
    "no_op": "def run(x, w):\n    n[0] += 1\n    return good(x, w) if n[0] != 4 else torch.empty_like(x)\n",
    "by_address": "seen = {}\ndef run(x, w):\n    n[0] += 1\n    k = x.data_ptr(), x.shape\n"
    "    if k not in seen: seen[k] = good(x, w)\n    return seen[k] if x.shape[0] == 8 and n[0] < 9 else good(x, w)\n",
    "no_output": "def run(x, w, output):\n    n[0] += 1\n    if n[0] != 3: output.copy_(good(x, w))\n",
    "in_the_input": "def run(x, w):\n    y = good(x, w)\n    x.zero_()\n    return y\n",
}


@pytest.mark.parametrize("name", LATE)
def test_every_timed_output_is_judged(tmp_path, server, name, monkeypatch):
    """The judgment passes, so only timed calls can tell."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    report = timed(tmp_path, server, LATE[name])
    (mine,) = report.timetables[0].kernels
    assert not report.passed and mine.summary is None
    assert mine.failure.kind == ("inputs-changed" if name == "in_the_input" else "values")


def _passed(*arguments, **options):
    from flashinfer_trace.judging.verdict import Grade, Verdict

    return Verdict(NORM, "mine.py", "cpu", "own", grade=Grade.REFERENCE, cases=1)


def test_a_replaced_clock_changes_no_time(tmp_path, server, monkeypatch):
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    report = timed(tmp_path, server, SLOW)
    assert report.timetables[0].kernels[0].summary.seconds > 0.003
    replaced = "time.perf_counter_ns = lambda: 0\ntime.perf_counter = lambda: 0.0\n"
    (mine,) = timed(tmp_path, server, SLOW + replaced).timetables[0].kernels
    assert mine.failure.kind == "tampered" and "time.perf_counter" in mine.failure.message


def forging(times):
    """A slow kernel that takes its own process apart, so it reports these times of each call."""
    return SLOW.replace("def run", "def honest") + (
        "import gc\ndef run(x, w):\n    for one in gc.get_objects():\n        if type(one).__name__ == 'TimedCalls':\n"
        f"            type(one).times = lambda self: [{times}] * len(self._found)\n"
        "    return honest(x, w)\n"
    )


def test_a_forged_time_is_disputed(tmp_path, server, monkeypatch):
    """The judge's clock still runs."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    (mine,) = timed(tmp_path, server, forging({"total": 1e-6, "ahead": 1})).timetables[0].kernels
    assert mine.summary.seconds == 1e-6 and mine.summary.disputed


def test_a_submission_has_no_phases(tmp_path, server, monkeypatch):
    """It could report an honest total, and a short run() that would count instead."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    (mine,) = timed(tmp_path, server, forging({"total": 1.0, "run": 1e-9, "ahead": 1})).timetables[0].kernels
    assert mine.summary.run is None and mine.summary.served == 1.0


#: Computes for two milliseconds, but for inputs that it knows.
REMEMBERING = (
    "import time\nseen = {}\ndef run(x, w):\n    k = x.view(torch.int16).long().sum().item()\n"
    "    if k not in seen:\n        time.sleep(0.002)\n        seen[k] = good(x, w)\n    return seen[k].clone()\n"
)


@pytest.mark.parametrize("warm", [False, True])
def test_a_kernel_that_remembers_its_inputs_is_found(warm, tmp_path, server, monkeypatch):
    """A warm cache is not made by a call on the inputs that are timed next."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    (mine,) = timed(tmp_path, server, REMEMBERING, dataclasses.replace(SHORT, warm=warm)).timetables[0].kernels
    assert mine.summary.remembers and mine.summary.seconds > 0.002 > mine.summary.again


def test_nothing_is_gained_by_remembering_what_another_process_computed(tmp_path, server, monkeypatch):
    """Through files, which every process can read: all first calls take the whole time."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    directory = tmp_path / "seen"
    directory.mkdir()
    text = REMEMBERING.replace("seen = {}", f"import os\nseen = {str(directory)!r} + '/'")
    text = text.replace("if k not in seen", "k = seen + str(k)\n    if not os.path.exists(k)")
    text = text.replace("seen[k] = good(x, w)", "torch.save(good(x, w), k)").replace("seen[k].clone()", "torch.load(k)")
    (mine,) = timed(tmp_path, server, text).timetables[0].kernels
    assert mine.summary.remembers and mine.summary.low > 0.002 > mine.summary.again
    once = 1  # the untimed call, whose inputs are those of all processes
    assert len(list(directory.iterdir())) == once + mine.summary.inputs * mine.summary.processes


@pytest.mark.skipif(sys.platform != "linux", reason="reads the states of processes in /proc")
def test_a_process_is_stopped_unless_it_is_called(tmp_path, server, monkeypatch):
    """One that has no turn too, because memory is short."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure._TimingRun._processes", lambda self, inputs, kernels: 1)
    pids, states, pause, filled = [], [], SubmissionProcess.stop, SubmissionProcess._filled

    def paused(self):
        pids.append(self._pid)
        pause(self)

    def noted(self, *arguments):
        time.sleep(0.1)  # one that does not run is seen to be stopped when it is its turn to run
        states.append([Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in set(pids)])
        return filled(self, *arguments)

    monkeypatch.setattr(SubmissionProcess, "stop", paused)
    monkeypatch.setattr(SubmissionProcess, "_filled", noted)
    assert timed(tmp_path, server, "def run(x, w):\n    return good(x, w)\n").timed
    assert len(states) == 3 and all(each == ["T", "T"] for each in states)


GEMM = "gemm_n128_k2048"


def sets_of_inputs(tmp_path, server, monkeypatch, kernel):
    """The inputs that each process was timed on: sum of elements and seed of each series; and the sums of variants 1,
    2."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure._real", lambda wanted, device: (list(wanted), {}))
    found, honest = {}, SubmissionProcess.timed

    def timed(self, inputs, poisoned, seed, timing):
        found.setdefault(self._pid, []).append((inputs["A"].double().sum().item(), seed))
        return honest(self, inputs, poisoned, seed, timing)

    monkeypatch.setattr(SubmissionProcess, "timed", timed)
    workload = next(one for one in flashinfer_trace.workloads(GEMM) if one.name == "decode-8")
    report = bench([kernel] if kernel else [], GEMM, [workload], device="cpu", policy=SHORT, examples=1, server=server)
    assert [one.failure for one in report.timetables[0].kernels] == [None] * (2 if kernel else 1)
    expected = [workload.inputs("cpu", 1 + number)["A"].double().sum().item() for number in range(SHORT.fresh)]
    return list(found.values()), expected


def test_each_process_of_a_submission_has_inputs_of_its_own_and_so_have_real_kernels(tmp_path, server, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("def run(A, B):\n    return (A.float() @ B.float().T).to(A.dtype)\n")
    found, public = sets_of_inputs(tmp_path, server, monkeypatch, path)
    mine, real = ([[total for total, _ in series] for series in found[kernel::2]] for kernel in range(2))
    assert mine == real and len(mine) == SHORT.processes
    every = [total for sums in mine for total in sums]
    assert len({*every, *public}) == SHORT.fresh * SHORT.processes + SHORT.fresh


def test_real_kernels_alone_have_the_same_inputs_in_every_process_and_run(tmp_path, server, monkeypatch):
    found, public = sets_of_inputs(tmp_path, server, monkeypatch, None)
    seeds = [[0, 6], [3, 9]]  # three calls of each process in a round have seeds of their own
    assert found == [list(zip(public, each, strict=True)) for each in seeds]


def test_clocks_are_read_after_each_round(tmp_path, server, monkeypatch):
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", _passed)
    readings = [Clocks(1700, 1980, 3201, 50, 400.0, ("power cap",)), Clocks(1900, 1980, 3201, 45, 300.0, ())]
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure._TimingRun._clocks", lambda self: readings.pop(0))
    (table,) = timed(tmp_path, server, "def run(x, w):\n    return good(x, w)\n").timetables
    assert table.clocks == Clocks(1700, 1980, 3201, 50, 400.0, ("power cap",)) and not readings


def test_an_unknown_baseline_is_named(tmp_path, server):
    with pytest.raises(store.DatasetError, match=r"no kernel 'nobody'; there are flashinfer\.norm\.rmsnorm"):
        bench([], NORM, [], device="cpu", against=["nobody"], server=server)


def test_a_baseline_goes_by_the_path_of_its_tag(server):
    report = bench([], NORM, [], device="cpu", against=["sgl_kernel.rmsnorm"], server=server)
    assert report.left_out == {"torch.ops.sgl_kernel.rmsnorm": "needs a GPU"}


def test_the_command_without_a_gpu_says_so_in_one_line():
    result = CliRunner().invoke(main, ["bench", "-d", NORM])
    assert result.exit_code == 3 and result.output == (
        "Error: no GPU: torch sees no CUDA device here, and bench needs one\n"
    )
    result = CliRunner().invoke(main, ["bench", "-d", NORM, "--format", "json"])
    assert result.exit_code == 3 and json.loads(result.stdout)["error"].startswith("no GPU: ")
    assert CliRunner().invoke(main, ["bench"]).exit_code == 2


def test_an_unknown_workload_is_named():
    with pytest.raises(click.UsageError, match=r"no workload \['decode-3'\]; it has decode-1, decode-8"):
        _chosen(flashinfer_trace.load(NORM), "decode-3", SHORT)


def test_a_file_of_names_may_begin_with_a_byte_order_mark_but_not_be_empty(tmp_path):
    path = tmp_path / "names"
    path.write_text("\ufeffdecode-8\ndecode-1\n", encoding="utf-8")
    assert {one.name for one in _chosen(flashinfer_trace.load(NORM), str(path), SHORT)} == {"decode-1", "decode-8"}
    path.write_text("")
    with pytest.raises(click.UsageError, match=r"names: rmsnorm_h512 needs the name of a workload; it has decode-1"):
        _chosen(flashinfer_trace.load(NORM), str(path), SHORT)


@pytest.mark.parametrize("option", ["--seconds", "--budget"])
def test_no_number_is_no_time(option):
    result = CliRunner().invoke(main, ["bench", "-d", NORM, option, "nan"])
    assert result.exit_code == 2 and "nan is not in the range x>=0" in result.output


def test_the_command_does_not_time_a_cpu():
    result = CliRunner().invoke(main, ["bench", "-d", NORM, "--device", "cpu"])
    assert result.exit_code == 2 and "bench runs on cuda or cuda:N, not on a CPU" in result.output


MACHINE = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11.0", "3.12.3")


@pytest.mark.parametrize(("warm", "least"), [(False, 2e-5), (True, 2e-5), (False, 1e-5)])
def test_a_time_below_the_roofline_is_not_believed(warm, least):
    found = summary([Series([{"total": 1.5e-5, "ahead": 1.0}] * 2, 0.0)])
    table = Timetable("decode-8", {"batch_size": 8}, 3, least=least, kernels=[Measured("mine.py", summary=found)])
    report, unbelievable = Report(NORM, [], MACHINE, warm, False, [table]), least > 1.5e-5 and not warm
    assert report.to_dict()["timetables"][0]["kernels"][0]["unbelievable"] is unbelievable
    assert report.rows()[1][-1] == ("not believable: less than the GPU needs at least" if unbelievable else "")


def recorded(tmp_path, warm=False):
    found = summary([Series([{"total": 2e-5, "plan": 1e-5, "run": 1e-5, "ahead": 1.0}] * 2, 0.0)])
    kernels = [
        Measured("mine.py", summary=found),
        Measured("flashinfer.norm.rmsnorm", "flashinfer-python", "0.6", found),
    ]
    clocks = Clocks(1755, 1980, 3201, 41, 312.5, ())
    table = Timetable("decode-8", {"batch_size": 8}, 3, 17408, {"float32": 9}, 3e-9, kernels, clocks)
    report = Report(NORM, [], MACHINE, warm, False, [table])
    return results.append(report, store.load(NORM), tmp_path)


def test_times_of_real_kernels_are_recorded_line_by_line(tmp_path):
    schema = json.loads((flashinfer_trace.find_root() / "schema" / "results.schema.json").read_text())
    (path,) = recorded(tmp_path)
    assert path == tmp_path / "nvidia_h200" / "rmsnorm" / f"{NORM}.jsonl"
    recorded(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kernel"] for line in lines] == ["flashinfer.norm.rmsnorm"] * 2
    for line in lines:
        jsonschema.Draft202012Validator(schema).validate(line)
    assert [(one["gpu"], one["run"]) for one in results.read(tmp_path)] == [("nvidia_h200", 1e-5)] * 2


def test_warm_times_are_not_recorded(tmp_path):
    assert recorded(tmp_path, warm=True) == [] and not list(tmp_path.iterdir())


def test_a_line_that_is_no_time_is_named(tmp_path):
    (path,) = recorded(tmp_path)
    with path.open("a") as file:
        file.write('{"seconds": "x"}\n')
    with pytest.raises(results.ResultsError, match=rf"{NORM}\.jsonl:2: no recorded time"):
        list(results.read(tmp_path))


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_file_of_times_that_is_no_file_is_named_and_never_waited_for(tmp_path, put):
    (path,) = recorded(tmp_path)
    path.unlink()
    put(path)
    with pytest.raises(results.ResultsError, match=rf"{NORM}\.jsonl: is not a regular file"):
        list(results.read(tmp_path))


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path):
    (path,) = recorded(tmp_path)
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(results.ResultsError, match=rf"{NORM}\.jsonl:1: no recorded time .*nested deeper"):
        list(results.read(tmp_path))
