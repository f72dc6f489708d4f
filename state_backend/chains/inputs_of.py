"""Find what an upstream has for a span of time: its commits, and digests of their content. Only reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import xxhash

from state_backend.checkpoint.exchange_names import is_exchanged
from state_backend.checkpoint.log import Log, attempt_of, base_of, interval_of, kind_of
from state_backend.values.frozen import frozen
from state_backend.values.inputs import Edge, InputPart
from state_backend.values.intervals import Interval, from_ms
from state_backend.values.records import OutputFile, Record, SweepRecord, Tombstone

LISTED_SINGLY = 64


@frozen
class Piece:
    """One interval of an upstream, as an edge reads it.

    Attributes:
        digest: The digest of the rows or of the state; None if the upstream's log has no digest for them.
    """

    interval: Interval
    id: int
    rows: int
    digest: int | None


def span_within(log: Log, edge: Edge, anchor: Interval) -> Interval:
    """Return the span of time of an upstream (whose log is `log`) that an edge reads for the interval `anchor`."""
    start = from_ms(log.newest.content.pipeline_start_ms) if log.newest is not None else anchor.start
    if edge.reads == "state" or (edge.mapping == "within" and anchor.start >= start):
        return anchor
    return Interval(min(start, anchor.end - timedelta(milliseconds=1)), anchor.end)


def commits_in(log: Log, edge: Edge, span: Interval) -> dict[Interval, int]:
    """Return the upstream's intervals in a span, with their commits. Of a state, return only that at the span's end."""
    if edge.reads != "state":
        return dict(log.outputs_near(span))
    last = Interval(span.end - timedelta(milliseconds=1), span.end)
    current = {n for _, n in log.outputs_near(last)}
    # A rewind that retracts output takes the state of later intervals out of use too.
    ending = [e for e in log.commits_near(last) if interval_of(e).end == span.end]
    gone = max((f.id for f in log.facts(last) if f.kind == "replaced" and f.interval.end == span.end), default=0)
    usable = [e for e in ending if e.id in current or (kind_of(e) != "interval" and e.id > gone)]
    return {interval_of(e): e.id for e in usable[-1:]}


def pieces_of(log: Log, edge: Edge, commits: Mapping[Interval, int]) -> list[Piece]:
    """Return a `Piece` for each commit of an upstream that the edge reads, in the order of time."""
    if edge.reads == "state":
        return [_state_piece(log, interval, n) for interval, n in commits.items()]
    if not commits:
        return []
    span = Interval(min(i.start for i in commits), max(i.end for i in commits))
    found = log.current_outputs(span)
    return [_output_piece(edge, interval, *found[interval]) for interval in sorted(commits) if interval in found]


def parts_of(pieces: Sequence[Piece]) -> tuple[InputPart, ...]:
    """Return pieces as parts of a record: up to 64 pieces one by one, more pieces as up to 64 groups of neighbours."""
    size = max(1, -(-len(pieces) // LISTED_SINGLY))
    return tuple(part_of(pieces[at : at + size]) for at in range(0, len(pieces), size))


def part_of(pieces: Sequence[Piece]) -> InputPart:
    digests = [piece.digest for piece in pieces if piece.digest is not None]
    known = zip(pieces, digests, strict=False) if len(digests) == len(pieces) else None
    return InputPart(
        span=Interval(pieces[0].interval.start, pieces[-1].interval.end),
        intervals=len(pieces),
        last_id=max(piece.id for piece in pieces),
        rows=sum(piece.rows for piece in pieces),
        digest=None
        if known is None
        else _digest_of_parts((p.interval.start_ms, p.interval.end_ms, d) for p, d in known),
    )


def is_left_out(log: Log, outputs: Mapping[Interval, int], gap: Interval) -> bool:
    """Return True if a person left out this gap: the next interval started from an earlier or a restored state."""
    after = outputs.get(min((i for i in outputs if i.start >= gap.end), default=gap))
    entry = log.entries[after] if after is not None else None
    base = base_of(entry) if isinstance(entry, Record | Tombstone) else None
    while base is not None and isinstance(found := log.entries[base], Record | Tombstone):
        if interval_of(found).end <= gap.start or kind_of(found) == "restore":
            return True
        base = None if kind_of(found) == "interval" else base_of(found)  # A copy of a state has that state's base.
    return False


def unexchanged(log: Log) -> bool:
    """Return True if a `cairn erase` is not finished: output files that its commit replaces are not deleted yet."""
    forgets = [log.whole(kept.id).content for kept in log.kept if kept.kind == "forget"]
    return not all(is_exchanged(log.entries.storage, content) for content in forgets)


def attempt_at(log: Log, checkpoint_id: int) -> str | None:
    """Return the uuid of the attempt or sweep that made the record of an id; None if the log has no such id."""
    entry = next((kept for kept in log.kept if kept.id == checkpoint_id), None) or log.entry(checkpoint_id)
    if isinstance(entry, Record | Tombstone):
        return attempt_of(entry)
    return None if entry is None else entry.sweep if isinstance(entry, SweepRecord) else entry.attempt


def _output_piece(edge: Edge, interval: Interval, checkpoint_id: int, files: Iterable[OutputFile]) -> Piece:
    read = tuple(file for file in files if file.late == (edge.reads == "late"))
    digests = [file.digest for file in read if file.digest is not None]
    return Piece(
        interval=interval,
        id=checkpoint_id,
        rows=sum(file.rows for file in read),
        digest=sum(digests) % 2**64 if len(digests) == len(read) else None,
    )


def _state_piece(log: Log, interval: Interval, checkpoint_id: int) -> Piece:
    entry = log.entries[checkpoint_id]
    assert isinstance(entry, Record | Tombstone)
    digest, entries = (
        (entry.digest, 0) if isinstance(entry, Tombstone) else (entry.content.digest, entry.content.totals.entries)
    )
    # Intervals of different lengths may end with this state, so the piece covers only the last millisecond.
    at_end = Interval(interval.end - timedelta(milliseconds=1), interval.end)
    return Piece(interval=at_end, id=checkpoint_id, rows=entries, digest=digest)


def _digest_of_parts(parts: Iterable[tuple[int, ...]]) -> int:
    """Return a digest of a set of tuples of whole numbers, such as intervals with their digests."""
    return sum(xxhash.xxh64_intdigest(",".join(map(str, part)).encode()) for part in parts) % 2**64
