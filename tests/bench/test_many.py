"""Benchmarks of many Definitions: budgets, failures, what is recorded when, and kernels that load at the same time."""

import contextlib
import dataclasses
import json
import threading

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main
from flashinfer_trace.dataset import store
from flashinfer_trace.families import family_of
from flashinfer_trace.judging.bench import Policy, bench, bench_all, measure, results
from flashinfer_trace.judging.bench.environment import Environment
from flashinfer_trace.judging.bench.measure import _Contender, _start, _TimingRun
from flashinfer_trace.judging.bench.report import Measured, Report, Timetable
from flashinfer_trace.judging.bench.statistics import Series, summary
from flashinfer_trace.judging.process import SubmissionProcess
from flashinfer_trace.judging.server import shared_server
from flashinfer_trace.judging.submission import RunLimits, SubmissionError, from_path, known
from flashinfer_trace.judging.traffic import Workload, workloads
from flashinfer_trace.judging.verdict import Grade, Verdict

NAMES = ("rmsnorm_h1536", "rmsnorm_h3072", "rmsnorm_h512")
MACHINE = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11.0", "3.12.3")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """The command with several Definitions is tested on a CPU, which it refuses to time for users."""
    monkeypatch.setattr("flashinfer_trace.cli.judgment._check_gpu", lambda device, torch: None)


def report(name, *, failure=None, seconds=3e-5):
    found = summary([Series([{"total": seconds, "ahead": 1.0}] * 3, 0.0)])
    mine = Measured("mine.py", failure=failure)
    real = Measured("flashinfer.norm.rmsnorm", "flashinfer-python", "0.6.12", found)
    table = Timetable("decode-8", {"batch_size": 8}, 3, 100, {"float32": 9}, 1e-6, [mine, real] if failure else [real])
    return Report(name, [], MACHINE, False, False, [table])


def loaded(names=NAMES):
    return [store.load(name) for name in names]


def failing(definition):
    if definition.name == NAMES[1]:
        raise RuntimeError("CUDA error:\nan illegal memory access")
    return report(definition.name)


def test_a_definition_that_fails_does_not_stop_the_others():
    seen = []
    found = bench_all(loaded(), failing, lambda definition, report: seen.append(definition.name))
    assert seen == [one.definition for one in found.reports] == [NAMES[0], NAMES[2]]
    assert found.failed == {NAMES[1]: "RuntimeError: CUDA error: an illegal memory access"}
    assert found.timed and not found.passed and found.left == []


def test_the_error_of_a_single_definition_is_that_of_the_command():
    with pytest.raises(RuntimeError, match="illegal"):
        bench_all(loaded(NAMES[1:2]), failing, lambda *found: None)


def test_what_is_no_submission_is_none_for_any_definition():
    def refused(definition):
        raise SubmissionError("no kernel")

    with pytest.raises(SubmissionError):
        bench_all(loaded(), refused, lambda *found: None)


@pytest.mark.parametrize(("budget", "done"), [(None, 3), (100, 3), (11, 2), (10, 1), (0, 1)])
def test_no_definition_is_begun_after_the_budget(budget, done):
    times = iter(range(0, 100, 10))
    found = bench_all(
        loaded(), lambda one: report(one.name), lambda *found: None, budget=budget, now=lambda: next(times)
    )
    assert len(found.reports) == done and found.left == list(NAMES[done:])


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command with made-up benchmarks on a made-up GPU; `seen` gets the Definitions in turn."""

    def run(*arguments, made_up=lambda definition: report(definition.name)):
        seen = []

        def bench(kernel, definition, workloads, **options):
            seen.append((definition.name, len(workloads), options["policy"].seconds))
            return made_up(definition)

        monkeypatch.setattr("flashinfer_trace.judging.bench.bench", bench)
        monkeypatch.setattr("flashinfer_trace.judging.bench.environment.environment", lambda device: MACHINE)
        return CliRunner().invoke(main, ["bench", "--device", "cpu", *arguments]), seen

    return run


@pytest.mark.parametrize(("grade", "status"), [(Grade.NOT_JUDGED, 4), (Grade.WRONG, 1), (Grade.REFERENCE, 0)])
def test_the_exit_status_tells_what_is_wrong_from_what_was_not_judged(invoke, grade, status):
    verdict = Verdict(NAMES[0], "mine.py", "cuda", "own", grade=grade)
    result, _ = invoke("-d", NAMES[0], made_up=lambda one: dataclasses.replace(report(one.name), verdicts=[verdict]))
    assert result.exit_code == status, result.output


def recorded(root):
    return sorted(path.stem for path in root.glob("nvidia_h200/*/*.jsonl"))


def test_names_and_globs_are_timed_in_turn(invoke, tmp_path):
    globs = ["-d", "rmsnorm_h153[0-9]", "-d", NAMES[2], "-d", NAMES[2]]
    result, seen = invoke(*globs, "--record", str(tmp_path), "--seconds", "1.5", "--workloads", "decode-8")
    assert result.exit_code == 0 and seen == [(NAMES[0], 1, 1.5), (NAMES[2], 1, 1.5)]
    assert recorded(tmp_path) == [NAMES[0], NAMES[2]]
    assert f"{NAMES[2]} (2 of 2)" in result.stderr and f"{NAMES[2]} on NVIDIA H200" in result.stdout
    assert invoke("-d", "rmsnorm_h15*6x")[0].exit_code == 2


def test_what_was_timed_before_an_interruption_is_recorded(invoke, tmp_path):
    def interrupted(definition):
        if definition.name == NAMES[1]:
            raise KeyboardInterrupt
        return report(definition.name)

    result, _ = invoke("-d", NAMES[0], "-d", NAMES[1], "--record", str(tmp_path), made_up=interrupted)
    assert result.exit_code == 130 and recorded(tmp_path) == [NAMES[0]] and NAMES[0] in result.stdout


def test_failures_and_what_is_left_are_told(invoke):
    every = [part for name in NAMES for part in ("-d", name)]
    result, _ = invoke(*every, made_up=failing)
    assert result.exit_code == 1 and f"failed: {NAMES[1]}: RuntimeError" in result.stderr
    result, seen = invoke(*every, "--budget", "0", "--format", "json")
    assert result.exit_code == 0 and len(seen) == 1
    assert f"the 0 s are over; left: 2 Definitions\n{NAMES[1]} {NAMES[2]}\n" in result.stderr
    found = json.loads(result.stdout)
    assert [one["definition"] for one in found["reports"]] == [NAMES[0]] and found["left"] == list(NAMES[1:])


def test_missing_times_are_those_of_this_gpu_and_of_the_present_reference(invoke, tmp_path):
    every = [part for name in NAMES for part in ("-d", name)]
    for name in NAMES[:2]:
        (path,) = results.append(report(name), store.load(name), tmp_path)
    path.write_text(path.read_text().replace(store.load(NAMES[1]).reference_sha256, "0" * 64))
    result, seen = invoke(*every, "--missing", "--record", str(tmp_path))
    assert result.exit_code == 0 and [name for name, *_ in seen] == [NAMES[1], NAMES[2]]
    assert "1 recorded, 2 missing\n" in result.stderr
    result, seen = invoke(*every, "--missing", "--record", str(tmp_path))
    assert result.exit_code == 0 and seen == [] and "3 recorded, 0 missing" in result.stderr
    result, _ = invoke(*every, "--missing", "--record", str(tmp_path), "--format", "json")
    assert result.exit_code == 0 and json.loads(result.stdout) == {"reports": [], "failed": {}, "left": []}
    (tmp_path / "nvidia_h200").rename(tmp_path / "nvidia_b200")
    assert len(invoke(*every, "--missing", "--record", str(tmp_path))[1]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--missing"], "--record"),
        (["--figure", "x.svg"], "draws one Definition, and 2 are chosen"),
        (["--record", "new", "--warm"], "--record takes times with a cold cache and without --graph"),
        (["--record", "new", "--graph"], "--record takes times with a cold cache and without --graph"),
    ],
)
def test_options_that_do_not_go_together(invoke, options, message):
    result, seen = invoke("-d", NAMES[0], "-d", NAMES[1], *options)
    assert result.exit_code == 2 and message in result.stderr and seen == []


def test_lines_are_appended_whole_whoever_writes_at_the_same_time(tmp_path):
    definition = store.load(NAMES[0])
    threads = [
        threading.Thread(target=results.append, args=(report(definition.name), definition, tmp_path)) for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(list(results.read(tmp_path))) == 8


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    definition = store.load(NAMES[0])
    (path,) = results.append(report(definition.name), definition, tmp_path)
    before = path.read_bytes()

    def full(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        results.append(report(definition.name), definition, tmp_path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


#: Loads only if five others load at the same time.
MEETING = """import os, pathlib, time
here = pathlib.Path(__file__)
here.with_suffix(f".{os.getpid()}.there").touch()
end = time.monotonic() + 20
while len(list(here.parent.glob("*.there"))) < 6:
    if time.monotonic() > end:
        raise RuntimeError("the others do not load")
    time.sleep(0.01)
def run(x, w):
    return x
"""


def test_kernels_of_a_definition_load_at_the_same_time(tmp_path):
    contenders = []
    for name, text in {"one": MEETING, "two": MEETING, "broken": "1 / 0", "three": MEETING}.items():
        (tmp_path / f"{name}.py").write_text(text)
        contenders.append(_Contender(from_path(str(tmp_path / f"{name}.py")), None))
    with contextlib.ExitStack() as stack:
        _start(contenders, 2, store.load(NAMES[0]), "cpu", RunLimits(), shared_server(), stack)
        assert [len(one.processes) for one in contenders] == [2, 2, 0, 2]
    assert [one.failure and one.failure.kind for one in contenders] == [None, None, "not-loaded", None]


def test_inputs_are_drawn_for_nobody_who_has_failed(tmp_path, monkeypatch):
    """The judgment passes, so the first timed call fails."""
    monkeypatch.setattr(measure, "judge", lambda *arguments, **options: _Passed())
    path = tmp_path / "wrong.py"
    path.write_text("def run(x, w):\n    return x\n")
    (workload,) = (one for one in workloads(NAMES[0]) if one.name == "decode-8")
    drawn, inputs = [], Workload.inputs
    monkeypatch.setattr(Workload, "inputs", lambda *given: drawn.append(given) or inputs(*given))
    found = bench([path], NAMES[0], [workload], device="cpu", policy=Policy(least=3, processes=1))
    assert not found.passed and len(drawn) == 1


def test_what_a_kernel_does_not_take_is_left_out_with_the_reason(monkeypatch):
    """A kernel of torch, which would run on a CPU."""
    definition = store.load("softmax_temperature_v128256")
    kernels = [one for one in family_of(definition).kernels_of(definition) if one.library == "torch"]
    monkeypatch.setattr(measure, "_real", lambda *given: (kernels, {}))
    (workload,) = (one for one in workloads(definition) if one.name == "decode-1")
    monkeypatch.setattr(measure, "unfit", lambda kernel, axes: f"takes no {axes}")
    found = bench([], definition, [workload], device="cpu", policy=Policy(fresh=1, least=1))
    assert found.left_out == {"torch.softmax on decode-1": "takes no {'batch_size': 1}"}
    assert not found.timed and found.timetables[0].kernels == []


@pytest.mark.parametrize("real", [True, False])
def test_only_real_kernels_get_the_same_seeds_in_every_run(monkeypatch, real):
    definition = store.load("softmax_temperature_v128256")
    (kernel,) = (one for one in family_of(definition).kernels_of(definition) if one.library == "torch")
    (workload,) = (one for one in workloads(definition) if one.name == "decode-1")
    seeds, timed = [], SubmissionProcess.timed

    def noted(self, inputs, poisoned, seed, timing):
        seeds.append(seed)
        return timed(self, inputs, poisoned, seed, timing)

    monkeypatch.setattr(SubmissionProcess, "timed", noted)
    for _ in range(2):
        contender = _Contender(known(definition, kernel.label), kernel)
        with contextlib.ExitStack() as stack:
            _start([contender], 2, definition, "cpu", RunLimits(), shared_server(), stack)
            bout = _TimingRun(definition, "cpu", Policy(fresh=2, least=2, processes=2), [contender])
            bout._secret = not real
            (found,) = bout.timetable(workload).kernels
            assert found.failure is None and found.summary.processes == 2
    assert len(set(seeds[:4])) == 4 and (seeds[:4] == seeds[4:]) == real


class _Passed:
    passed = True
