"""Which state an interval starts from, and which states a commit makes stale. Pure: functions of the log."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from state_backend.checkpoint.log import Log, descriptors_hash
from state_backend.values.errors import StaleStateError, StateGapError, UsageError
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Content, Permissions, Record

_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What an interval starts from: a completed checkpoint, or None for empty state."""

    record: Record | None

    @property
    def id(self) -> int | None:
        return None if self.record is None else self.record.id


def plan_base(
    log: Log, interval: Interval, permissions: Permissions, pipeline_start_ms: int, *, pipeline: str, h0: int | None = None
) -> Base:
    """The base of an interval.

    The highest-id completed, usable, not stale checkpoint that ends where the interval starts; nothing for the interval at
    the pipeline's start. ``allow_gap``: else the one with the latest earlier end. ``allow_stale_base``: else a stale one,
    if it was stale by what was committed up to ``h0`` (default: now); later marks were not what the caller allowed.
    With both, a stale state that ends at the right place comes before a gap.

    Raises: UsageError for an interval before the pipeline's start, or if the start is not the recorded one;
    StateGapError; StaleStateError. Both name what can be restored, what to run again, and the command.
    """
    start_ms, start = interval.start_ms, interval.start
    _check_start(log, pipeline, pipeline_start_ms)
    if start_ms < pipeline_start_ms:
        raise UsageError(
            f"{pipeline} {interval}: starts before the pipeline does, at {format_instant(from_ms(pipeline_start_ms))}"
        )
    if start_ms == pipeline_start_ms:
        return Base(record=None)
    h0 = log.head_id if h0 is None else h0
    stale_by = log.retained()
    restorable = [r for r in log.completed() if is_restorable(log, r)]
    fresh = [r for r in restorable if stale_by[r.id] is None]
    exact = [r for r in restorable if r.content.interval.end == start]
    covered = [r for r in restorable if (by := stale_by[r.id]) is not None and by <= h0] if permissions.allow_stale_base else []
    for found in (_ending_at(start, fresh), _ending_at(start, covered)):
        if found:
            return Base(record=max(found, key=lambda r: r.id))
    advice = _advice(log, interval, fresh, pipeline, pipeline_start_ms)
    if exact:
        stale = max(exact, key=lambda r: r.id)
        by = stale_by[stale.id]
        raise StaleStateError(
            f"{pipeline} {interval}: checkpoint {stale.id}, which ends at its start, is stale: "
            f"{_describe(log, by)} was committed after it. {advice} "
            f"allow_stale_base=True starts from it as it is"
        )
    before = [r for r in (*fresh, *covered) if r.content.interval.end < start]
    if permissions.allow_gap and before:
        return Base(record=max(before, key=lambda r: (r.content.interval.end, stale_by[r.id] is None, r.id)))
    raise StateGapError(f"{pipeline} {interval}: {_why_no_base(log, start)}. {advice}")


def is_restorable(log: Log, record: Record) -> bool:
    """Whether a completed checkpoint may be a base, stale or not: neither it nor an ancestor is quarantined, and no later
    result of the same interval, with another state, has been dropped: that would bring the older result back unseen."""
    if record.id in log.unusable:
        return False
    retained = log.retained()
    return not any(
        i > record.id
        and i not in retained
        and i not in log.unusable
        and t.interval == record.content.interval
        and t.kind in ("interval", "restore")
        and t.reproduces is None
        for i, t in log.summaries.items()
    )


def same_base(log: Log, one: int | None, other: int | None) -> bool:
    """Whether two bases are the same state by construction: equal, or one a consolidation of the other."""
    return _consolidated(log, one) == _consolidated(log, other)


def is_consolidation_of(log: Log, checkpoint_id: int | None, base_id: int | None) -> bool:
    """Whether a checkpoint is the base itself, or a consolidation of it, or one of that."""
    while checkpoint_id != base_id and checkpoint_id is not None and log.summaries[checkpoint_id].kind == "consolidate":
        checkpoint_id = log.summaries[checkpoint_id].base_id
    return checkpoint_id == base_id


def is_reproduction(log: Log, content: Content) -> int | None:
    """The checkpoint that the content supersedes, if it left the same state: digest, watermark and descriptors.

    That is the highest id of exactly the same interval, dropped or not: comparing with an older one that happens to be
    retained could call a return to an outdated state a reproduction. A rewind never is one: it is there to make what
    follows stale.
    """
    if content.kind == "restore":
        return None
    superseded = [t for t in log.summaries.values() if t.interval == content.interval]
    if not superseded:
        return None
    last = max(superseded, key=lambda t: t.id)
    mine = (content.digest, content.time.watermark_ms, descriptors_hash(content))
    return last.id if (last.digest, last.watermark_ms, last.descriptors_hash) == mine else None


def stale_marks(log: Log, new_content: Content, new_id: int, is_reproduction: bool) -> dict[int, int | None]:
    """``stale_by`` of every completed checkpoint, and of the new one, once it is committed.

    A commit makes stale what lies after the start of its interval, except for other results of the very same interval:
    those are superseded, not outdated. Marks are sticky: the first stays. A consolidation marks nothing and is as stale
    as what it consolidates.
    """
    interval = new_content.interval
    marks = log.retained()
    new_mark: int | None = None
    if new_content.kind == "consolidate":
        new_mark = marks.get(new_content.base_id) if new_content.base_id is not None else None
    elif not is_reproduction:
        for record in log.completed():
            other = record.content.interval
            if marks[record.id] is None and other != interval and interval.start < other.end:
                marks[record.id] = new_id
    return {**marks, new_id: new_mark}


def _check_start(log: Log, pipeline: str, pipeline_start_ms: int) -> None:
    for record in log.completed()[-1:]:
        recorded_ms = record.content.pipeline_start_ms
        if recorded_ms != pipeline_start_ms:
            raise UsageError(
                f"pipeline {pipeline!r}: start is {format_instant(from_ms(pipeline_start_ms))}, but its state was made with "
                f"{format_instant(from_ms(recorded_ms))}; it can't change"
            )


def _ending_at(end: datetime, records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.content.interval.end == end]


def _consolidated(log: Log, checkpoint_id: int | None) -> int | None:
    while checkpoint_id is not None and log.summaries[checkpoint_id].kind == "consolidate":
        checkpoint_id = log.summaries[checkpoint_id].base_id
    return checkpoint_id


def _why_no_base(log: Log, start: datetime) -> str:
    ids = [i for i, t in log.summaries.items() if t.interval is not None and t.interval.end == start]
    if not ids:
        return f"no checkpoint ends at its start, {format_instant(start)}"
    completed = [i for i in ids if i in log.retained()]
    if not completed:
        return (
            f"checkpoint {ids[-1]} ended at its start, {format_instant(start)}, but retention has dropped it; "
            f"a savepoint may reach back that far"
        )
    reasons = {_root_of_quarantine(log, i) for i in completed if i in log.unusable}
    because = f"quarantined: {_join(sorted(reasons))}" if reasons else "superseded by a result that retention has dropped"
    return f"what ends at its start, checkpoint {_join(completed)}, can't be used ({because})"


def _root_of_quarantine(log: Log, checkpoint_id: int) -> int:
    while checkpoint_id not in log.quarantined:
        base_id = log.summaries[checkpoint_id].base_id
        assert base_id is not None
        checkpoint_id = base_id
    return checkpoint_id


def _advice(log: Log, interval: Interval, fresh: list[Record], pipeline: str, pipeline_start_ms: int) -> str:
    """What can be restored near an interval, what to run again to get there, and how."""
    start = interval.start
    before = max((r for r in fresh if r.content.interval.end < start), key=lambda r: (r.content.interval.end, r.id), default=None)
    after = min((r for r in fresh if r.content.interval.end > start), key=lambda r: (r.content.interval.end, -r.id), default=None)
    first = before.content.interval.end if before is not None else from_ms(pipeline_start_ms)
    known = sorted({t.interval for t in log.summaries.values() if t.interval is not None and t.kind == "interval"})
    again = [i for i in known if first <= i.start and i.end <= start]
    # Logical dates are interval starts. The last interval to run ends where ours starts; if it never ran, it is taken to
    # be no shorter than the shortest known one: a backfill includes all starts up to that date, so late is safe.
    shortest = min(i.end - i.start for i in (*known, interval))
    last = max([i.start for i in again if i.end == start] or [max(first, start - shortest)])
    points = [_describe(log, r.id) for r in (before, after) if r is not None]
    nearest = " and ".join(points) if points else "none; the pipeline's first interval starts from empty state"
    listed = _join([*map(str, again[:_LISTED]), *([f"{len(again) - _LISTED} more"] if len(again) > _LISTED else [])])
    run = f"Intervals to run again: {listed}. " if again else ""
    return (
        f"Nearest restore points: {nearest}. {run}To fill the gap: airflow backfill create --dag-id {shlex.quote(pipeline)} "
        f"--from-date {format_instant(first)} --to-date {format_instant(last)} --reprocess-behavior completed"
    )


def _describe(log: Log, checkpoint_id: int | None) -> str:
    if checkpoint_id is None or checkpoint_id not in log.summaries:
        return f"checkpoint {checkpoint_id}"
    return f"checkpoint {checkpoint_id} of {log.summaries[checkpoint_id].interval}"


def _join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
