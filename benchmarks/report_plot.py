"""Plot of a report's ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")  # The backend agg needs no display.

_OURS, _PEER = "#1b7f5c", "#b5562a"


def draw_ratios(lines: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw a bar for each line of a report that has a peer.

    A bar points to the right if Cairn is better, and to the left if the peer is better. The peer's name and the ratio
    stand beside the bar. The axis is logarithmic, so twice as good and half as good give bars of equal length.
    """
    from matplotlib import pyplot

    shown = [line for line in lines if line["ratio"]]
    figure, axes = pyplot.subplots(figsize=(11, 0.8 + 0.23 * len(shown)), layout="constrained")
    for at, line in enumerate(shown):
        ratio, better = line["ratio"], line["ratio"] >= 1
        axes.barh(at, ratio - 1, left=1, color=_OURS if better else _PEER, height=0.7)
        text = f"{ratio:.3g}x {line['best_peer']}"
        axes.annotate(
            text,
            (ratio, at),
            (3 if better else -3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            ha="left" if better else "right",
        )
    axes.set_yticks(range(len(shown)), [f"{line['section']}: {line['label']}" for line in shown], fontsize=7)
    axes.set_xscale("log")
    low, high = min([0.5, *(line["ratio"] for line in shown)]), max([2.0, *(line["ratio"] for line in shown)])
    axes.set_xlim(low / 8, high * 8)  # leave room for the texts beside the bars
    axes.set_ylim(len(shown), -1)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_xlabel("the better peer's figure and ours: to the right ours is better", fontsize=9)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
