"""Place checkpoints and their bases in a graph.

The graph looks like that of `git log --graph`: one checkpoint per row, newest first, in lanes side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Line(NamedTuple):
    x1: int
    y1: float
    x2: int
    y2: float


class Placed(NamedTuple):
    id: int
    lane: int
    lines: tuple[Line, ...]


def place(edges: Iterable[tuple[int, int | None]]) -> tuple[tuple[Placed, ...], int]:
    """Return each checkpoint with its lane (a column of the graph) and its lines, and the number of lanes.

    `edges`: (checkpoint, base or None), newest first. A line leads from each checkpoint down to its base. A checkpoint
    without a line from above gets the first free lane, through which no line runs.
    """
    lanes: list[int | None] = []  # For each lane, the id of the base that its line leads to; None for a free lane.
    placed, widest = [], 0
    for node, base in edges:
        here = [n for n, wanted in enumerate(lanes) if wanted == node]
        lane = here[0] if here else _free(lanes)
        lines = [Line(n, 0, lane, 0.5) for n in here]
        lines += [Line(n, 0, n, 1) for n, wanted in enumerate(lanes) if wanted not in (None, node)]
        for n in here:
            lanes[n] = None
        if base is not None:
            if base in lanes:
                lines.append(Line(lane, 0.5, lanes.index(base), 1))
            else:
                lanes[lane] = base
                lines.append(Line(lane, 0.5, lane, 1))
        widest = max(widest, lane + 1, *(max(line.x1, line.x2) + 1 for line in lines), 1)
        while lanes and lanes[-1] is None:
            lanes.pop()
        placed.append(Placed(node, lane, tuple(lines)))
    return tuple(placed), widest


def _free(lanes: list[int | None]) -> int:
    if None in lanes:
        return lanes.index(None)
    lanes.append(None)
    return len(lanes) - 1
