"""Four plots over a history as one SVG, without a plotting library: axes, lines, a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 460, 230, 52
_COLOURS = ("#1f6feb", "#d1570a", "#1a7f37")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines by name as (x, y) points; ``limit`` is drawn across, dashed."""

    title: str
    lines: dict[str, Sequence[tuple[float, float]]]
    limit: float | None = None


def as_svg(plots: Sequence[Plot]) -> str:
    """The plots in rows of two. Axes begin at 0."""
    rows = -(-len(plots) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {rows * _HEIGHT}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for n, plot in enumerate(plots):
        parts.append(f'<g transform="translate({n % 2 * _WIDTH} {n // 2 * _HEIGHT})">{_drawn(plot)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _drawn(plot: Plot) -> str:
    points = [point for line in plot.lines.values() for point in line]
    most_x = max(x for x, _ in points)
    most_y = max(*(y for _, y in points), plot.limit or 0.0) * 1.08 or 1.0
    width, height = _WIDTH - 1.4 * _MARGIN, _HEIGHT - 1.5 * _MARGIN

    def at(x: float, y: float) -> str:
        return f"{_MARGIN + x / most_x * width:.1f},{_MARGIN * 0.7 + (1 - y / most_y) * height:.1f}"

    parts = [f'<text x="{_MARGIN}" y="18" font-weight="bold">{escape(plot.title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = most_x * share, most_y * share
        left, bottom = at(0, y).split(","), at(x, 0).split(",")
        parts.append(f'<polyline points="{at(0, y)} {at(most_x, y)}" stroke="#ddd"/>')
        parts.append(f'<text x="{float(left[0]) - 5}" y="{float(left[1]) + 4}" text-anchor="end">{y:.3g}</text>')
        parts.append(f'<text x="{bottom[0]}" y="{float(bottom[1]) + 15}" text-anchor="middle">{x:.0f}</text>')
    if plot.limit is not None:
        parts.append(
            f'<polyline points="{at(0, plot.limit)} {at(most_x, plot.limit)}" stroke="#888" stroke-dasharray="5 4"/>'
        )
    for n, (name, line) in enumerate(plot.lines.items()):
        drawn = " ".join(at(x, y) for x, y in line)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{_COLOURS[n]}" stroke-width="1.2"/>')
        parts.append(
            f'<text x="{_MARGIN + 8}" y="{_MARGIN * 0.7 + 12 + 14 * n}" fill="{_COLOURS[n]}">{escape(name)}</text>'
        )
    return "".join(parts)
