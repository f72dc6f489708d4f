"""Draw which pipelines read which other pipelines: states by colour and in words, upstreams on the left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Look
from state_backend.chains.judge_inputs import root_of_edge
from state_backend.inspection.chain_of import At, without_cycles
from state_backend.inspection.pipeline_health import Finding
from state_backend.values.frozen import frozen
from state_backend.values.inputs import Edge

WIDTH, HEIGHT, PITCH, MARGIN = 176, 48, 66, 8
_LEAST_GAP, _LETTER, _MOST_LETTERS = 56, 7, 20


class Node(NamedTuple):
    name: str
    # `PipelineRef.key`, for the link to the pipeline's pages; None for an upstream that the page does not list.
    key: str | None
    # A CSS class: `healthy`, `waiting`, `pending`, `stale` or `bad`; `unlisted` if `key` is None.
    tone: str
    words: str
    # For each edge the upstream's name and, in parentheses, the words of `edge_words`.
    reads: tuple[str, ...]
    x: int = 0
    y: int = 0

    @property
    def short(self) -> str:
        return self.name if len(self.name) <= _MOST_LETTERS else f"{self.name[: _MOST_LETTERS - 1]}…"


class Line(NamedTuple):
    path: str
    words: str
    tracked: bool
    x: int
    y: int


@frozen
class ChainGraph:
    nodes: tuple[Node, ...]
    lines: tuple[Line, ...]
    width: int
    height: int


def state_words(look: Look | None, health: Sequence[Finding]) -> tuple[str, str]:
    """Return (CSS class, words) of a pipeline's state. Unusable or outdated results come before `health`."""
    if look is None:
        return "unlisted", "not in this list"
    if look.reading is None:
        return "bad", "unreadable"
    status = look.reading.status
    counts = Counter[str](verdict.kind for _, verdict in status.outdated)
    counts.update({"quarantined": len(status.quarantined), "stale": len(status.stale)})
    found = [f"{counts[kind]} {kind}" for kind in ("unreadable", "quarantined", "stale", "pending") if counts[kind]]
    if not found:
        worst = next(iter(health), Finding("good", "healthy"))
        if worst.tone in ("bad", "warn"):
            return ("bad" if worst.tone == "bad" else "stale"), worst.text
        return ("waiting", "waiting") if any(one.text == "waiting" for one in health) else ("healthy", "healthy")
    kind = next(iter(found)).partition(" ")[2]
    return kind if kind in ("stale", "pending") else "bad", ", ".join(found)


def edge_words(edge: Edge) -> str:
    """Return how a read of an upstream differs from a tracked read of its output; an empty text if it does not."""
    said = [] if edge.reads == "output" else ["late rows" if edge.reads == "late" else "state"]
    said += ["all before"] if edge.mapping == "all" else []
    said += [f"{edge.back} back"] if edge.back else []
    return ", ".join([*said, *([] if edge.tracked else ["not tracked"])])


def chain_graph(
    refs: Iterable[PipelineRef], looks: Mapping[str, Look], health: Mapping[str, Sequence[Finding]]
) -> ChainGraph | None:
    """Return the drawing of all pipelines that read others or are read by others; None if there is no such pipeline.

    `looks`, `health`: By `PipelineRef.key`, the last reading, and the findings, worst first.
    """
    listed: dict[At, PipelineRef] = {}
    edges: dict[At, dict[At, list[Edge]]] = {}
    for ref in refs:
        at, reading = (ref.root.rstrip("/"), ref.name), looks[ref.key].reading
        listed.setdefault(at, ref)
        for read in () if reading is None else reading.reads:
            up = (root_of_edge(read.edge.root, at[0]), read.edge.pipeline)
            edges.setdefault(at, {}).setdefault(up, []).append(read.edge)
    if not edges:
        return None
    order = without_cycles({at: {up: min(e.back for e in es) for up, es in ups.items()} for at, ups in edges.items()})
    words = {
        (up, at): "; ".join(filter(None, map(edge_words, es))) for at, ups in edges.items() for up, es in ups.items()
    }
    places, ways = _places(order)
    # The gap fits the words of lines to the next column. The words of longer lines have a spot of their own.
    gap = max(_LEAST_GAP, 24 + _LETTER * max(len(said) for edge, said in words.items() if not ways.get(edge)))
    at_px = {spot: (MARGIN + level * (WIDTH + gap), MARGIN + row * PITCH) for spot, (level, row) in places.items()}
    nodes = []
    for at in order:
        key = listed[at].key if at in listed else None
        tone, said = state_words(looks[key] if key is not None else None, health.get(key or "", ()))
        reads = [_named(up[1], edge) for up, es in edges.get(at, {}).items() for edge in es]
        nodes.append(Node(at[1], key, tone, said, tuple(reads), *at_px[at]))
    lines = [
        _line(
            [at_px[spot] for spot in (up, *ways.get((up, at), ()), at)],
            said,
            tracked=any(e.tracked for e in edges[at][up]),
        )
        for (up, at), said in words.items()
        if up != at
    ]
    width, height = (max(xy[n] for xy in at_px.values()) + size + MARGIN for n, size in enumerate((WIDTH, HEIGHT)))
    return ChainGraph(nodes=tuple(nodes), lines=tuple(lines), width=width, height=height)


def _named(name: str, edge: Edge) -> str:
    words = edge_words(edge)
    return f"{name} ({words})" if words else name


Spot = At | tuple[At, At, int]


def _places(order: Mapping[At, Collection[At]]) -> tuple[dict[Spot, tuple[int, int]], dict[tuple[At, At], list[Spot]]]:
    """Return (places, ways): column and row of each spot, and for each edge the spots that its line passes.

    A spot is a pipeline's box, or a place where a line crosses a column without running through a box. A pipeline is
    one column right of its rightmost upstream. `order`: The upstreams of each pipeline, without cycles.
    """
    column: dict[Spot, int] = {}
    for at in TopologicalSorter(order).static_order():
        column[at] = 1 + max((column[up] for up in order[at]), default=-1)
    before, ways = dict[Spot, list[Spot]](), dict[tuple[At, At], list[Spot]]()
    for at, ups in order.items():
        for up in ups:
            ways[up, at] = [(up, at, n) for n in range(column[up] + 1, column[at])]
            column |= {spot: column[up] + 1 + n for n, spot in enumerate(ways[up, at])}
            for earlier, later in pairwise((up, *ways[up, at], at)):
                before.setdefault(later, []).append(earlier)
    places: dict[Spot, tuple[int, int]] = {}

    def wanted(spot: Spot) -> float:
        rows = [places[one][1] for one in before.get(spot, ())]
        return sum(rows) / len(rows) if rows else 0

    for n in range(1 + max(column.values())):
        row = -1
        for spot in sorted((s for s in column if column[s] == n), key=lambda s: (wanted(s), len(s), s)):
            row = max(row + 1, round(wanted(spot)))
            places[spot] = n, row
    return places, ways


def _line(points: Sequence[tuple[int, int]], words: str, *, tracked: bool) -> Line:
    """Return the line from the right side of the first box to the left side of the last, through all other `points`."""
    path, half = list[str](), HEIGHT // 2
    for (left, y1), (right, y2) in pairwise(points):
        begin, middle = left + WIDTH, (left + WIDTH + right) // 2
        path.append(
            f"{'L' if path else 'M'}{begin} {y1 + half} C{middle} {y1 + half} {middle} {y2 + half} {right} {y2 + half}"
        )
    (x1, y1), (x2, y2) = points[:2]
    x, y = ((x1 + WIDTH + x2) // 2, (y1 + y2) // 2) if len(points) == 2 else (x2 + WIDTH // 2, y2)
    return Line(" ".join(path), words, tracked, x, y + half)
