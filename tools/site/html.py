"""HTML that shows any text literally, for pages whose Markdown passes it through."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

__all__ = ["escape"]

#: Colors of series, which people with color blindness can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 320, 70, 40


def code(text: str) -> str:
    """A code span."""
    return f"<code>{escape(text)}</code>"


def link(target: str, shown: str) -> str:
    """A link to a relative address; `shown` is HTML."""
    return f'<a href="{escape(target)}">{shown}</a>'


def badge(state: str) -> str:
    """A state, such as verified, as a colored label."""
    return f'<span class="state {escape(state)}">{escape(state)}</span>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table that scrolls within the page. Cells are HTML; the columns in `right` hold numbers. Empty without rows."""
    numbers = {*right}
    cell = [' class="number"' if column in numbers else "" for column in range(len(headings))]
    body = ["".join(f"<td{cell[n]}>{text}</td>" for n, text in enumerate(row)) for row in rows]
    if not body:
        return ""
    head = "".join(f'<th scope="col"{cell[n]}>{text}</th>' for n, text in enumerate(headings))
    lines = "\n".join(f"<tr>{row}</tr>" for row in body)
    return scrolled(f"<thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody>")


def scrolled(rows: str) -> str:
    """A table that scrolls within the page; what scrolls must be reachable by keyboard."""
    return f'<div class="scroll" tabindex="0"><table class="data">{rows}</table></div>'


def scatter(title: str, series: Mapping[str, Sequence[tuple[float, float, str]]]) -> str:
    """Measured time over the time of the roofline, in seconds, both logarithmic; the line is the roofline.

    Args:
        title: for those who cannot see it.
        series: kernel -> (least seconds, measured seconds, what it is of).
    """
    points = [point for found in series.values() for point in found]
    if not points:
        return ""
    low = math.floor(min(math.log10(x) for x, _, _ in points))
    high = math.ceil(max(math.log10(y) for _, y, _ in points))

    def at(value: float, start: float, end: float) -> float:
        return start + (math.log10(value) - low) / max(high - low, 1) * (end - start)

    def across(value: float) -> float:
        return at(value, _LEFT, _WIDTH - 10)

    def up(value: float) -> float:
        return at(value, _HEIGHT - _BOTTOM, 10)

    legend = _HEIGHT + 20 * len(series)
    parts = [f'<svg class="plot" role="img" viewBox="0 0 {_WIDTH} {legend}"><title>{escape(title)}</title>']
    for power in range(low, high + 1):
        value, shown = 10.0**power, _power(power)
        lines = f"M{across(value):.0f} 10V{_HEIGHT - _BOTTOM}M{_LEFT} {up(value):.0f}H{_WIDTH - 10}"
        parts.append(f'<path class="grid" d="{lines}"/>')
        parts.append(f'<text x="{across(value):.0f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{shown}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{up(value) + 4:.0f}" text-anchor="end">{shown}</text>')
    ends = 10.0**low, 10.0**high
    parts.append(
        f'<path class="roof" d="M{across(ends[0]):.0f} {up(ends[0]):.0f}L{across(ends[1]):.0f} {up(ends[1]):.0f}"/>'
    )
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">least possible time</text>')
    for number, (name, found) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        for x, y, what in found:
            shown = escape(f"{name}, {what}: {y * 1e6:.1f} us, {x / y:.0%} of the roofline")
            parts.append(
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="4" fill="{color}"><title>{shown}</title></circle>'
            )
        y_legend = _HEIGHT + 14 + 20 * number
        parts.append(f'<circle cx="{_LEFT}" cy="{y_legend - 4}" r="5" fill="{color}"/>')
        parts.append(f'<text x="{_LEFT + 12}" y="{y_legend}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _power(power: int) -> str:
    names = {0: "1 s", -1: "100 ms", -2: "10 ms", -3: "1 ms", -4: "100 us", -5: "10 us", -6: "1 us", -7: "100 ns"}
    return names.get(power, f"1e{power} s")
