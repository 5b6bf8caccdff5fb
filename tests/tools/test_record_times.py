"""tools.record_times: what is timed, in which order, how often, and what becomes of failures. No GPU is needed."""

import contextlib
import itertools

import pytest

from flashinfer_trace.dataset import store
from flashinfer_trace.judging.bench import Policy, results
from flashinfer_trace.judging.bench.environment import Environment
from flashinfer_trace.judging.bench.report import Measured, Report, Timetable
from flashinfer_trace.judging.bench.statistics import Series, summary
from tools import record_times, record_workloads
from tools.record_times import Item, main, plan, record, second_runs, without_time

MACHINE = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11.0", "3.12.3")
NAMES = ("rmsnorm_h512", "rmsnorm_h3072", "gelu_and_mul_i2048")
BOTH = ("decode-64", "prefill-2048")


def item(name=NAMES[0], workloads=BOTH, members=1, seconds=3.0):
    return Item(store.load(name), workloads, members, seconds)


def report(one, times=(1e-5, 9e-5)):
    """A time of each workload; None for a kernel that hangs."""
    tables = []
    for workload, seconds in zip(one.workloads, times, strict=False):
        found = None if seconds is None else summary([Series([{"total": seconds, "ahead": 1.0}] * 3, 0.0)])
        kernels = [Measured("flashinfer.norm.rmsnorm", "flashinfer-python", "0.6.12", found)]
        tables.append(Timetable(workload, {"batch_size": 8}, 3, 100, {"float32": 9}, 1e-6, kernels))
    return Report(one.definition.name, None, MACHINE, False, False, tables)


def recorded(items, root, measure=report, budget=1000.0, step=0.0):
    """The messages of `record`; the clock advances by `step` whenever it is read."""
    clock, said = itertools.count(), []
    failed = record(items, measure, root, lambda: budget - step * next(clock), said.append)
    return failed, said


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A dataset of four families, one of which no Hopper GPU runs; none has a recorded workload."""
    names = [*NAMES, "rmsnorm_h128", "cutlass_scaled_fp4_mm_n4096_k7168", "moe_align_block_size_topk8_e256_b64"]
    every = [store.load(name) for name in names]
    for module in (record_times, record_workloads):
        monkeypatch.setattr(module, "definitions", lambda: iter(every))
    monkeypatch.setattr(record_workloads, "find_root", lambda: tmp_path)


def test_a_definition_of_each_family_that_stands_for_many_and_takes_few_seconds_comes_first(small):
    found = plan((9, 0), Policy(seconds=0.8))
    assert [(one.definition.op_type, one.members) for one in found] == [("rmsnorm", 3), ("moe", 1), ("activation", 1)]
    assert [one.value for one in found] == sorted((one.value for one in found), reverse=True)
    assert all(one.workloads == BOTH and 3 < one.seconds < 9 for one in found)
    assert {one.definition.op_type for one in plan((10, 0), Policy())} == {"rmsnorm", "moe", "activation", "gemm"}


def test_large_inputs_are_those_of_a_smaller_definition_or_of_one_workload(small, monkeypatch):
    usual = next(one for one in plan((9, 0), Policy()) if one.definition.op_type == "rmsnorm")
    assert usual.definition.name == "rmsnorm_h512"
    monkeypatch.setattr(record_times, "LARGE", 1 << 20)
    (less,) = (one for one in plan((9, 0), Policy()) if one.definition.op_type == "rmsnorm")
    assert less.definition.name == "rmsnorm_h128" and less.workloads == BOTH
    monkeypatch.setattr(record_times, "LARGEST", 1 << 10)
    (least,) = (one for one in plan((9, 0), Policy()) if one.definition.op_type == "rmsnorm")
    assert least.workloads == BOTH[:1]


def test_the_order_can_be_carried_to_another_machine(small, capsys, tmp_path):
    assert main(["--plan", "9.0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    items = [Item.from_line(line) for line in lines]
    assert [str(one) for one in items] == lines and items[0].workloads == BOTH
    with pytest.raises(ValueError, match="unpack"):
        Item.from_line("rmsnorm_h512")


def test_what_was_timed_is_recorded_and_a_failure_stops_nothing(tmp_path):
    items = [item(name) for name in NAMES]

    def measure(one):
        if one.definition.name == NAMES[1]:
            raise RuntimeError("CUDA error:\nan illegal memory access")
        return report(one, (1e-5, None) if one.definition.name == NAMES[2] else (1e-5, 9e-5))

    failed, said = recorded(items, tmp_path, measure)
    assert failed == [NAMES[1], NAMES[2]]
    assert {one["definition"] for one in results.read(tmp_path)} == {NAMES[0], NAMES[2]}
    assert f"failed: {NAMES[1]}: RuntimeError: CUDA error: an illegal memory access" in said
    assert f"not timed: {NAMES[2]}: flashinfer.norm.rmsnorm on prefill-2048: not timed" in said


def test_what_takes_longer_than_the_rest_of_the_budget_has_no_turn(tmp_path):
    items = [item(NAMES[0], seconds=3.0), item(NAMES[1], seconds=50.0), item(NAMES[2], seconds=3.0)]
    failed, said = recorded(items, tmp_path, budget=20.0)
    assert failed == [] and said[-1] == f"no time left for 1: {NAMES[1]}"
    assert {one["definition"] for one in results.read(tmp_path)} == {NAMES[0], NAMES[2]}


def test_second_runs_are_of_what_takes_long_and_has_one(tmp_path):
    items = [item(name) for name in NAMES]
    assert without_time(items, tmp_path, "NVIDIA H200") == items and second_runs(items, tmp_path, "NVIDIA H200") == []
    recorded(items[:1], tmp_path)
    recorded(items[1:2], tmp_path, lambda one: report(one, (1e-5, 1.9e-5)))
    assert without_time(items, tmp_path, "NVIDIA H200") == items[2:]
    assert without_time(items, tmp_path, "NVIDIA B200") == items
    (again,) = second_runs(items, tmp_path, "NVIDIA H200")
    assert again.definition.name == NAMES[0] and again.workloads == ("prefill-2048",)
    recorded([again], tmp_path, lambda one: report(one, (9.1e-5,)))
    assert second_runs(items, tmp_path, "NVIDIA H200") == []


def test_what_failed_before_comes_last(tmp_path, monkeypatch, capsys):
    """The whole command on a CPU, where nothing can be timed."""
    order, last = tmp_path / "order", tmp_path / "last"
    order.write_text("".join(f"{item(name)}\n" for name in NAMES[:2]))
    last.write_text(f"{NAMES[0]}\n")
    seen = []

    def bench(kernel, definition, workloads, **options):
        seen.append((definition.name, tuple(one.name for one in workloads)))
        return report(item(definition.name), () if definition.name == NAMES[1] else (1e-5, 9e-5))

    monkeypatch.setattr(record_times, "bench", bench)
    monkeypatch.setattr(record_times, "Server", contextlib.nullcontext)
    monkeypatch.setattr(record_times, "environment", lambda device: MACHINE)
    given = ["--device", "cpu", "--order", str(order), "--record", str(tmp_path / "results"), "--last", str(last)]
    assert main(given) == 1
    assert seen == [(NAMES[1], BOTH), (NAMES[0], BOTH), (NAMES[0], ("prefill-2048",))]
    assert last.read_text().split() == [NAMES[0], NAMES[1]]
    printed = capsys.readouterr().out
    assert "without time: 2 Definitions" in printed and "second runs: 1 Definition," in printed
    seen.clear()
    assert main([*given, "--share", "0/2"]) == 0 and seen == []
