"""The roofline of a benchmark as a picture (SVG): operations per second over operations per byte, both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from flashinfer_trace.judging.bench.report import Report
from flashinfer_trace.judging.costs.work import Gpu

_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 720, 440, 60, 20
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Point:
    """A kernel on a workload: operations per byte, and per second."""

    kernel: str
    workload: str
    intensity: float
    rate: float


def points(report: Report) -> list[Point]:
    found = []
    for each in report.timetables:
        operations = sum(each.operations.values())
        for one in each.kernels:
            if one.summary is not None and operations and each.bytes:
                rate = operations / one.summary.served
                found.append(Point(one.kernel, each.workload, operations / each.bytes, rate))
    return found


def roofline_svg(report: Report, gpu: Gpu) -> str:
    """The picture. The roof is that of the GPU's memory, and of its arithmetic in the dtypes that are used."""
    shown = points(report)
    used = [dtype for each in report.timetables for dtype in each.operations if dtype in gpu.peak]
    peak = max((gpu.peak[dtype] for dtype in used), default=max(gpu.peak.values()))
    ridge = peak / gpu.bandwidth
    across = _scale([ridge, ridge / 10, *(each.intensity for each in shown)], _MARGIN, _WIDTH - _MARGIN)
    up = _scale([peak, *(each.rate for each in shown)], _HEIGHT - _MARGIN, _MARGIN)
    left, right = across.low, across.high
    roof = [(left, gpu.bandwidth * left), (ridge, peak), (right, peak)]
    line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in roof)
    kernels = list(dict.fromkeys(each.kernel for each in shown))
    legend = _LEGEND * len(kernels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + legend}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(report.definition)} on {escape(gpu.name)}</title>',
        *_axes(across, up),
        f'<clipPath id="inside"><rect x="{_MARGIN}" y="{_MARGIN}" width="{_WIDTH - 2 * _MARGIN}" '
        f'height="{_HEIGHT - 2 * _MARGIN}"/></clipPath>',
        f'<polyline points="{line}" clip-path="url(#inside)" fill="none" stroke="#444" stroke-width="2"/>',
    ]
    for each in shown:
        color = _COLORS[kernels.index(each.kernel) % len(_COLORS)]
        label = escape(f"{each.kernel}, {each.workload}: {each.rate:.3g} operations per second")
        place = f'cx="{across(each.intensity):.1f}" cy="{up(each.rate):.1f}"'
        parts.append(f'<circle {place} r="5" fill="{color}"><title>{label}</title></circle>')
    for number, kernel in enumerate(kernels):
        y = _HEIGHT + _LEGEND * number
        parts.append(f'<circle cx="{_MARGIN}" cy="{y - 4}" r="5" fill="{_COLORS[number % len(_COLORS)]}"/>')
        parts.append(f'<text x="{_MARGIN + 12}" y="{y}">{escape(kernel)}</text>')
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis from `low` to `high`, powers of ten, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        place = math.log(max(value, self.low / 1e3) / self.low) / math.log(self.high / self.low)
        return self.start + place * (self.end - self.start)


def _scale(values: Sequence[float], start: float, end: float) -> _Scale:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return _Scale(10.0**low, 10.0 ** max(high, low + 1), start, end)


def _axes(across: _Scale, up: _Scale) -> list[str]:
    found = []
    for exponent in range(round(math.log10(across.low)), round(math.log10(across.high)) + 1):
        x = across(10.0**exponent)
        found.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_MARGIN}" y2="{_HEIGHT - _MARGIN}" stroke="#ddd"/>')
        found.append(f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">1e{exponent}</text>')
    for exponent in range(round(math.log10(up.low)), round(math.log10(up.high)) + 1):
        y = up(10.0**exponent)
        found.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        found.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    middle = _WIDTH / 2
    found.append(f'<text x="{middle}" y="{_HEIGHT - _MARGIN + 34}" text-anchor="middle">operations per byte</text>')
    found.append(f'<text x="{_MARGIN}" y="{_MARGIN - 10}">operations per second</text>')
    return found
