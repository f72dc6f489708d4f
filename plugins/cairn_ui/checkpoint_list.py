"""Compute the values of the history page: the entries of a pipeline's log, newest first, 50 to a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from cairn_ui.pipeline_overview import keys_of, prefetch, source_of, state_word, tone_of
from cairn_ui.values import Reading
from state_backend.checkpoint.log import Log, run_of
from state_backend.inspection.describe import code_name
from state_backend.values.intervals import Interval
from state_backend.values.records import FiledShard, InlineShard, Record, RunRef, ShardRef

PAGE = 50
_ORDER = ("plan", "restore", "read", "process", "timers", "expire", "consolidate", "capture", "upload", "commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of an interval, such as restore or upload."""

    name: str
    seconds: float
    share: float
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One entry of the log as a table row. Values that a tombstone or a sweep does not have are None."""

    id: int
    kind: str
    state: str
    tone: str
    # The interval; None for a sweep.
    interval: Interval | None
    # Id of the base; None if the interval started from empty state.
    base: int | None
    # The run that committed; None for a sweep.
    run: RunRef | None
    whole: bool
    in_airflow: bool = False
    # Time of the commit; None if it is not known.
    committed: datetime | None = None
    # Form of the checkpoint: changelog, full or incremental; None for a restore.
    mode: str | None = None
    new_bytes: int | None = None
    full_bytes: int | None = None
    files_written: int | None = None
    files_shared: int | None = None
    keys: int | None = None
    keys_touched: int | None = None
    input_rows: int | None = None
    seconds: float | None = None
    phases: tuple[Phase, ...] = ()
    validated: tuple[str, ...] = ()
    docs: str | None = None
    code: str | None = None
    code_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of the history."""

    rows: tuple[Row, ...]
    head: int
    # Value of the URL parameter `before` for the page with newer entries; None on the first page.
    newer: int | None
    # Value of the URL parameter `before` for the page with older entries; None on the last page.
    older: int | None

    @property
    def phases(self) -> tuple[tuple[str, int], ...]:
        """Name and colour of each phase that a row has, in the order in which phases happen."""
        found = {(p.colour, p.name) for row in self.rows for p in row.phases}
        return tuple((name, colour) for colour, name in sorted(found))


def ids_of_page(head: int, before: int | None, size: int = PAGE) -> list[int]:
    """Return the ids of a page in descending order. No read is needed, since the ids of log entries have no gaps."""
    first = head if before is None else min(head, before - 1)
    return list(range(first, max(0, first - size), -1))


def page_of(
    reading: Reading, before: int | None, written_ms: Mapping[int, int], docs: Mapping[int, str], size: int = PAGE
) -> Page:
    """Return one page of the history."""
    log = reading.log
    ids = ids_of_page(log.head_id, before, size)
    prefetch(log, ids)
    newer = None
    if ids and ids[0] < log.head_id:
        newer = min(log.head_id, ids[0] + size) + 1
    return Page(
        rows=tuple(row_of(reading, n, written_ms.get(n), docs.get(n)) for n in ids),
        head=log.head_id,
        newer=newer,
        older=ids[-1] if ids and ids[-1] > 1 else None,
    )


def row_of(reading: Reading, checkpoint_id: int, written_ms: int | None = None, docs: str | None = None) -> Row:
    """Return one entry of the log as a table row."""
    log = reading.log
    entry = log.entries[checkpoint_id]
    kind, base = source_of(log, checkpoint_id)
    state = state_word(log, checkpoint_id)
    if not isinstance(entry, Record):
        return Row(
            id=checkpoint_id,
            kind=kind,
            state=state,
            tone=tone_of(state),
            interval=getattr(entry, "interval", None),
            base=base,
            run=getattr(entry, "run", None),
            whole=False,
        )
    content = entry.content
    totals, phases = content.totals, phases_of(content.durations_us)
    return Row(
        id=checkpoint_id,
        kind=kind,
        state=state,
        tone=tone_of(state),
        interval=content.interval,
        base=base,
        run=run_of(entry),
        whole=checkpoint_id in log.retained,
        committed=None if written_ms is None else datetime.fromtimestamp(written_ms / 1000, UTC),
        mode=mode_of(entry) if kind in ("interval", "consolidate", "forget") else None,
        new_bytes=totals.uploaded_bytes,
        full_bytes=totals.state_bytes,
        files_written=totals.uploaded_files,
        files_shared=max(0, totals.state_files - totals.uploaded_files),
        keys=keys_of(entry),
        keys_touched=totals.keys_touched,
        input_rows=totals.input_rows,
        seconds=sum(p.seconds for p in phases) if phases else None,
        phases=phases,
        validated=tuple(sorted(reading.validated.get(checkpoint_id, ()))),
        docs=docs,
        code=code_name(content),
        code_hash=content.code_hash,
    )


def phases_of(durations_us: Mapping[str, int]) -> tuple[Phase, ...]:
    """Return an interval's phases in the order in which they happen. Their shares sum to 1."""
    whole = sum(durations_us.values())
    names = sorted(durations_us, key=lambda n: (_ORDER.index(n) if n in _ORDER else len(_ORDER), n))
    return tuple(
        Phase(
            name=n,
            seconds=durations_us[n] / 1e6,
            share=durations_us[n] / whole if whole else 0.0,
            colour=_ORDER.index(n) if n in _ORDER else 7,
        )
        for n in names
    )


def mode_of(record: Record) -> str:
    """Derive the form of a checkpoint from its files, since the record does not name it."""
    content = record.content
    if any(_has_segments(ref) for ref in content.shards):
        return "changelog"
    new = content.totals.uploaded_files
    return "full" if new and new >= content.totals.state_files else "incremental"


def _has_segments(ref: ShardRef) -> bool:
    match ref:
        case InlineShard():
            return bool(ref.inline.segments)
        case FiledShard():
            return ref.in_segment is not None or bool(ref.changes is not None and ref.changes.segments)


def ids_of_run(log: Log, run_id: str, interval: Interval | None) -> list[int]:
    """Return the ids of the checkpoints that a run committed, ascending.

    The function searches the retained checkpoints, and all commits that overlap the run's interval.
    """
    near = {e.id for e in log.commits_near(interval)} if interval is not None and log.head_id else set()
    found = []
    for n in sorted({*near, *log.retained}):
        run = getattr(getattr(log.entry(n), "content", log.entry(n)), "run", None)
        if run is not None and run.run_id == run_id:
            found.append(n)
    return found
