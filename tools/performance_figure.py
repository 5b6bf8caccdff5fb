"""A picture for docs/performance.md (SVG): the fraction of the roofline that each family's fastest kernels reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_NAMES, _BARS, _ROW, _TOP = 330, 420, 18, 40
_BAR, _MARK, _GRID = "#0072b2", "#d55e00", "#ddd"


def fractions_svg(gpu: str, fractions: Mapping[str, Sequence[float]]) -> str:
    """A row for each family, the highest first: a bar to the highest fraction, and a mark for each other workload.

    Args:
        gpu: its name, for the title.
        fractions: of the roofline, by family, of the fastest kernel on each workload; fractions above 1 are cut.
    """
    rows = sorted(fractions.items(), key=lambda one: (-max(one[1]), one[0]))
    height = _TOP + _ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_NAMES + _BARS + 60} {height}" '
        f'font-family="sans-serif" font-size="12"><title>Fractions of the roofline on {escape(gpu)}</title>'
    ]
    for tenth in range(0, 11, 2):
        x = _NAMES + _BARS * tenth / 10
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{_TOP - 8}" y2="{height - 10}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{x:.0f}" y="{_TOP - 14}" text-anchor="middle">{10 * tenth} %</text>')
    for number, (family, found) in enumerate(rows):
        y = _TOP + _ROW * number
        best, *others = sorted((min(one, 1.0) for one in found), reverse=True)
        label = f"{escape(family)}: {', '.join(f'{100 * one:.0f} %' for one in sorted(found, reverse=True))}"
        parts.append(f'<text x="{_NAMES - 8}" y="{y + 11}" text-anchor="end">{escape(family)}</text>')
        parts.append(
            f'<rect x="{_NAMES}" y="{y + 2}" width="{_BARS * best:.1f}" height="{_ROW - 6}" fill="{_BAR}">'
            f"<title>{label}</title></rect>"
        )
        for one in others:
            x = _NAMES + _BARS * one
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + _ROW - 2}" stroke="{_MARK}"/>')
    return "\n".join([*parts, "</svg>\n"])
