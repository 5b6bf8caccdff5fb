"""Timing policy, statistics, clocks and reports, with made-up times and a made-up nvidia-smi."""

import json
import subprocess
from xml.etree import ElementTree

import pytest
import torch

from flashinfer_trace.judging.bench.environment import Clocks, Environment, clocks, name_of, worst
from flashinfer_trace.judging.bench.figure import points, roofline_svg
from flashinfer_trace.judging.bench.report import Measured, Report, Timetable
from flashinfer_trace.judging.bench.statistics import Policy, Series, summary
from flashinfer_trace.judging.costs.work import Gpu
from flashinfer_trace.judging.process import Failed, times_of
from flashinfer_trace.judging.verdict import Failure


def series(*seconds, outside=0.0, aside=0.0, held=0.0, ahead=1.0):
    return Series([{"total": each, "ahead": ahead} for each in seconds], outside, aside, held)


def test_inputs_are_drawn_until_the_time_is_over_but_never_too_few():
    policy = Policy(fresh=5, least=2, seconds=10.0)
    assert [policy.goes_on(done, 11.0) for done in range(4)] == [True, True, False, False]
    assert [policy.goes_on(done, 1.0) for done in (0, 4, 5)] == [True, True, False]


def test_where_memory_is_short_there_are_fewer_processes_but_one():
    policy = Policy(processes=4)
    assert [policy.fitting(size, 96) for size in (0, 1, 6, 7, 12, 24, 1000)] == [4, 4, 4, 3, 2, 1, 1]


def test_the_time_is_the_mean_of_the_medians_of_series_and_the_quartiles_are_those_of_all_calls():
    found = summary([series(10e-6, 12e-6, 11e-6), series(9e-6, 10e-6, 13e-6)])
    assert found.seconds == pytest.approx(10.5e-6)
    assert found.low < found.seconds < found.high and found.calls == 6 and found.inputs == 2
    assert found.spread == pytest.approx((found.high - found.low) / found.seconds)
    assert not found.remembers and not found.disputed and found.plan is None and found.served == found.seconds


def test_the_highest_and_the_lowest_eighth_of_the_series_do_not_count():
    seconds = [1e-6, *[10e-6] * 3, *[12e-6] * 3, 90e-6]
    found = summary([series(each) for each in seconds], processes=4)
    assert found.seconds == pytest.approx(11e-6) and (found.inputs, found.processes) == (2, 4)


def test_the_time_of_a_kernel_with_two_speeds_does_not_jump():
    """The median of all calls would be 21 us with seven slow series of twelve, and 20 us with five."""
    more, less = (
        summary([series(*[20e-6] * 5)] * (12 - slow) + [series(*[21e-6] * 5)] * slow).seconds for slow in (7, 5)
    )
    assert more / less - 1 < 0.01


def test_one_call_is_its_own_time():
    found = summary([series(5e-6)])
    assert (found.low, found.seconds, found.high, found.again) == (5e-6, 5e-6, 5e-6, None)


def test_of_a_kernel_that_remembers_its_inputs_only_first_calls_count():
    found = summary([series(100e-6, 10e-6, 10e-6), series(104e-6, 9e-6, 11e-6)])
    assert found.remembers and found.seconds == pytest.approx(102e-6)
    # A few microseconds more for the first call are nothing that a cache of results would save.
    assert not summary([series(8e-6, 5e-6), series(8e-6, 5e-6)]).remembers


def test_phases_are_apart_where_every_call_has_them():
    calls = [{"total": 50e-6, "plan": 30e-6, "run": 20e-6, "ahead": 1.0}] * 3
    found = summary([Series(calls, 0.0)])
    assert (found.plan, found.run, found.served, found.seconds) == (30e-6, 20e-6, 20e-6, 50e-6)
    assert summary([Series([*calls, {"total": 1e-6, "ahead": 1.0}], 0.0)]).run is None


def test_calls_that_take_much_longer_outside_than_they_say_are_disputed():
    honest = series(100e-6, 100e-6, outside=2 * (100e-6 + 300e-6), aside=80e-6)
    forged = series(10e-6, 10e-6, outside=2 * 3e-3, aside=80e-6)
    assert not honest.disputed and forged.disputed
    assert summary([forged, forged, honest]).disputed and not summary([honest, honest, forged]).disputed


def test_the_time_for_which_a_gpu_is_held_is_not_disputed():
    spent = 2 * (100e-6 + 4e-3)
    assert not series(100e-6, 100e-6, outside=spent, held=4e-3).disputed
    assert series(100e-6, 100e-6, outside=spent, held=1e-3).disputed
    planned = [{"total": 150e-6, "plan": 50e-6, "run": 100e-6, "ahead": 1.0}] * 2
    assert not Series(planned, 2 * (150e-6 + 2 * 4e-3), held=4e-3).disputed


def test_a_time_in_which_the_gpu_waited_is_said_to_be_the_processors_too():
    assert not summary([series(1e-5, 1e-5, 1e-5), series(3e-5, ahead=0.0)]).waited
    assert summary([series(1e-5, 1e-5), series(3e-5, ahead=0.0)]).waited


@pytest.mark.parametrize(
    "times",
    [
        *(
            None,
            [],
            [{}],
            ["x"],
            3,
            [{"total": 1e-6}],
            [{"total": 1e-6, "ahead": 0.5}],
            [{"total": 1e-6, "ahead": None}],
        ),
        *([{"total": total, "ahead": 1}] for total in (0, -1.0, "x", float("nan"), 10**400)),
    ],
)
def test_times_that_are_none_are_refused(times):
    with pytest.raises(Failed, match="times"):
        times_of({"times": times}, 1)
    assert times_of({"times": [{"total": 1e-6, "ahead": 1}]}, 1) == [{"total": 1e-6, "ahead": 1.0}]


def test_clocks_are_read_from_nvidia_smi_and_missing_ones_are_said_to_be():
    found = clocks("0", lambda command: "1755, 1980, 3201, 41, 312.50, 0x0000000000000005\n")
    assert found == Clocks(1755, 1980, 3201, 41, 312.5, ("power cap",))
    assert (
        clocks("0", lambda command: "[N/A], 1980, 1, 1, 1, 0x0")
        == "nvidia-smi does not say: '[N/A], 1980, 1, 1, 1, 0x0'"
    )

    def missing(command):
        raise FileNotFoundError

    def broken(command):
        raise subprocess.CalledProcessError(9, command)

    assert clocks("0", missing) == "nvidia-smi cannot be run: FileNotFoundError"
    assert clocks("0", broken) == "nvidia-smi cannot be run: CalledProcessError"


def test_several_readings_of_clocks_are_told_by_the_worst_of_each():
    hot = Clocks(1980, 1980, 3201, 80, 300.0, ("hardware thermal slowdown", "power brake"))
    slow = Clocks(1400, 1980, 2600, 60, 700.0, ("power cap", "power brake"))
    reasons = ("power cap", "hardware thermal slowdown", "power brake")
    assert worst(["not read", hot, slow]) == worst([slow, hot]) == Clocks(1400, 1980, 2600, 80, 700.0, reasons)
    assert worst(["not read", "nor then"]) == "not read"


def test_a_gpu_has_the_same_name_whichever_are_visible(monkeypatch):
    """nvidia-smi counts all GPUs, and torch those that CUDA_VISIBLE_DEVICES names."""
    known = {"cuda:0": "0b1c", "cuda": "GPU-2d3e"}
    properties = lambda device: type("Properties", (), {"uuid": known[str(device)]})  # noqa: E731
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    assert name_of(torch.device("cuda:0")) == "GPU-0b1c" and name_of(torch.device("cuda")) == "GPU-2d3e"


MACHINE = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11.0", "3.12.3")
FAST, SLOW = (summary([series(*[seconds] * 3)]) for seconds in (10e-6, 40e-6))


def report(*kernels, **options):
    table = Timetable("decode-64", {"m": 64}, 7, 1000, {"bfloat16": 5}, 5e-6, kernels, Clocks(1, 2, 3, 4, 5.0, ()))
    return Report("gemm", [], MACHINE, False, False, [table], **options)


def test_ratios_are_to_the_fastest_real_kernel():
    mine, real, slow = (
        Measured("mine.py", summary=SLOW),
        Measured("a", "lib", "1", FAST),
        Measured("b", "lib", "1", SLOW),
    )
    found = report(mine, slow, real)
    (table,) = found.timetables
    assert table.best is real and table.ratio(mine) == pytest.approx(0.25) and table.ratio(real) == 1.0
    assert table.fraction(real) == pytest.approx(0.5)
    rows = found.rows()
    assert rows[1][:6] == ["decode-64", "mine.py", "40 us", "40 us - 40 us", "12 %", "0.25"]
    assert report(mine).timetables[0].ratio(mine) is None
    data = json.loads(json.dumps(found.to_dict()))
    assert data["timetables"][0]["best"] == "a" and data["timetables"][0]["kernels"][0]["ratio"] == pytest.approx(0.25)


def test_a_wrong_output_of_a_timed_call_is_no_pass():
    wrong = Measured("mine.py", failure=Failure("values", "worst error is 3 x the bound"))
    found = report(wrong)
    assert not found.passed and not found.timed and found.rows()[1][-1] == "worst error is 3 x the bound"
    assert report(Measured("a", "lib", "1", failure=Failure("raised", "no"))).passed


def test_the_figure_has_a_point_for_each_time_below_the_roof():
    table = Timetable("decode-64", {}, 1, 10**6, {"bfloat16": 10**8}, 1e-5, [Measured("<mine>", summary=SLOW)])
    found = Report("gemm", [], MACHINE, False, False, [table])
    (point,) = points(found)
    assert point.intensity == 100 and point.rate == pytest.approx(10**8 / 40e-6)
    gpu = Gpu("H200", ("NVIDIA H200",), 4.8e12, {"bfloat16": 989.4e12})
    svg = ElementTree.fromstring(roofline_svg(found, gpu))
    space = "{http://www.w3.org/2000/svg}"
    mark, legend = svg.findall(f"{space}circle")
    assert mark.find(f"{space}title").text == "<mine>, decode-64: 2.5e+12 operations per second"
    roof = [tuple(map(float, pair.split(","))) for pair in svg.find(f"{space}polyline").get("points").split()]
    (x0, y0), (x1, y1), _ = roof
    x, y = float(mark.get("cx")), float(mark.get("cy"))
    # Upwards is downwards in pixels: at the same intensity the roof, 4.8e14, is above the point.
    assert x0 < x < x1 and y0 + (y1 - y0) * (x - x0) / (x1 - x0) < y
    assert float(legend.get("cx")) < x
