"""Compute the values of the lineage page: a graph of checkpoints and their bases.

The graph looks like that of `git log --graph`: one checkpoint per row, newest first, in lanes side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cairn_ui.checkpoint_list import Row, ids_of_page, row_of
from cairn_ui.pipeline_overview import prefetch
from cairn_ui.values import Reading
from state_backend.checkpoint.log import Log
from state_backend.values.records import Record

PAGE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through one row of the graph."""

    x1: int
    y1: float
    x2: int
    y2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The place of one checkpoint in the graph."""

    id: int
    lane: int
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One row of the graph."""

    placed: Placed
    row: Row
    # Where the state came from, in two cases. If no interval computed the state: how it was made, such as "went back to
    # checkpoint 3". If a re-run of an interval reproduced an earlier state: "same result as checkpoint 3". None for
    # every other checkpoint.
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One page of the graph."""

    nodes: tuple[Node, ...]
    lanes: int
    # Value of the URL parameter `before` for the page with newer checkpoints; None on the first page.
    newer: int | None
    # Value of the URL parameter `before` for the page with older checkpoints; None on the last page.
    older: int | None


def place(edges: Iterable[tuple[int, int | None]]) -> tuple[tuple[Placed, ...], int]:
    """Assign a lane (a column of the graph) to each checkpoint, and draw a line from each checkpoint down to its base.

    A checkpoint without a line from above gets the first free lane. A lane is free if no line runs through it.
    """
    lanes: list[int | None] = []  # For each lane, the id of the base that its line leads to; None for a free lane.
    placed, widest = [], 0
    for node, base in edges:
        here = [n for n, wanted in enumerate(lanes) if wanted == node]
        lane = here[0] if here else _free(lanes)
        lines = [Line(x1=n, y1=0, x2=lane, y2=0.5) for n in here]
        lines += [Line(x1=n, y1=0, x2=n, y2=1) for n, wanted in enumerate(lanes) if wanted not in (None, node)]
        for n in here:
            lanes[n] = None
        if base is not None:
            if base in lanes:
                lines.append(Line(x1=lane, y1=0.5, x2=lanes.index(base), y2=1))
            else:
                lanes[lane] = base
                lines.append(Line(x1=lane, y1=0.5, x2=lane, y2=1))
        widest = max(widest, lane + 1, *(max(line.x1, line.x2) + 1 for line in lines), 1)
        while lanes and lanes[-1] is None:
            lanes.pop()
        placed.append(Placed(id=node, lane=lane, lines=tuple(lines)))
    return tuple(placed), widest


def _free(lanes: list[int | None]) -> int:
    if None in lanes:
        return lanes.index(None)
    lanes.append(None)
    return len(lanes) - 1


def graph_of(reading: Reading, before: int | None, size: int = PAGE) -> Graph:
    """Return one page of the lineage graph.

    The page leaves out sweeps, whose records are in the log too but hold no checkpoint. So it may have fewer rows than
    `size`.
    """
    log = reading.log
    ids = ids_of_page(log.head_id, before, size)
    prefetch(log, ids)
    rows = [row for n in ids if (row := row_of(reading, n)).kind != "sweep"]
    placed, lanes = place((row.id, row.base) for row in rows)
    nodes = tuple(Node(placed=p, row=row, source=source(log, row.id)) for p, row in zip(placed, rows, strict=True))
    newer = min(log.head_id, ids[0] + size) + 1 if ids and ids[0] < log.head_id else None
    return Graph(nodes=nodes, lanes=lanes, newer=newer, older=ids[-1] if ids and ids[-1] > 1 else None)


def source(log: Log, checkpoint_id: int) -> str | None:
    """Return where a checkpoint's state came from, if that is worth a remark.

    If no interval computed the state, the text says how it was made, such as "went back to checkpoint 3". If a re-run
    reproduced an earlier state of its interval, the text is "same result as checkpoint 3". For every other checkpoint
    the result is None.
    """
    entry = log.entries[checkpoint_id]
    if not isinstance(entry, Record):
        return "restored" if getattr(entry, "kind", None) == "restore" else None
    content = entry.content
    if content.kind == "consolidate":
        return f"checkpoint {content.base_id}, consolidated"
    if content.kind == "forget":
        return f"checkpoint {content.base_id} without forgotten keys"
    if content.kind != "restore":
        return f"same result as checkpoint {entry.reproduces}" if entry.reproduces is not None else None
    if content.restored_from is not None:
        return f"restored from savepoint {content.restored_from}"
    if content.base_id is not None:
        return f"went back to checkpoint {content.base_id}"
    return "forked from another pipeline"
