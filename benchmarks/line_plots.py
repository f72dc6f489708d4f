"""Line plots over time, several in one PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # The backend agg needs no display.


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot.

    Attributes:
        title: The title.
        lines: The (x, y) points of each line, by name.
        limits: The heights at which dashed horizontal lines are drawn.
    """

    title: str
    lines: dict[str, Sequence[tuple[float, float]]]
    limits: Sequence[float] = ()


def draw(plots: Sequence[Plot], file: Path, across: str = "batch") -> None:
    """Draw the plots in two columns. All axes begin at 0.

    Args:
        plots: The plots.
        file: The PNG file to write.
        across: The label of the horizontal axis.
    """
    from matplotlib import pyplot

    rows = -(-len(plots) // 2)
    figure, all_axes = pyplot.subplots(rows, 2, figsize=(11, 3.2 * rows), squeeze=False, layout="constrained")
    for axes, plot in zip(all_axes.flat, plots, strict=False):
        for name, line in plot.lines.items():
            axes.plot(*zip(*line, strict=True), label=name or None, linewidth=0.9)
        for limit in plot.limits:
            axes.axhline(limit, color="grey", linestyle="--", linewidth=0.8)
        axes.set_title(plot.title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(visible=True, alpha=0.3)
        if len(plot.lines) > 1:
            axes.legend(fontsize=8)
    figure.supxlabel(across, fontsize=9)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
