"""Which state does an interval start from, and what does a commit make stale? Pure functions over the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from state_backend.checkpoint.forgotten_keys import check_rerun
from state_backend.checkpoint.log import Log, interval_of, kind_of, left_same_state
from state_backend.values.errors import Rerun, StaleStateError, StateGapError, StateUnusable, UsageError
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Content, Kept, Permissions, Record, Tombstone


def plan_base(
    log: Log,
    pipeline: str,
    interval: Interval,
    permissions: Permissions,
    pipeline_start_ms: int,
    *,
    as_of: int | None = None,
) -> Record | None:
    """As ``choose_base``: the checkpoint's record. Raises: CorruptRecord if it is not there whole."""
    chosen = choose_base(log, pipeline, interval, permissions, pipeline_start_ms, as_of=as_of)
    return log.whole(chosen.id) if chosen is not None else None


def choose_base(
    log: Log,
    pipeline: str,
    interval: Interval,
    permissions: Permissions,
    pipeline_start_ms: int,
    *,
    as_of: int | None = None,
) -> Kept | None:
    """The completed checkpoint that the interval starts from; None: it starts from empty state.

    Planned thrice for an interval, each time over a log that is read then: before Spark is started (Airflow's task, so that a refusal is
    cheap), at begin (what is restored), and at commit (whether that is still right, since others commit meanwhile).

    ``as_of``: for ``allow_stale_base`` and ``replace_overlapping``, the id up to which marks are forgiven and output is replaced;
    what a later id did is not (None: all).
    Raises: UsageError for an interval before the pipeline's start, one that overlaps current output of another cut (without
    ``replace_overlapping``), or one that would bring a forgotten key back (`forgotten_keys.check_rerun`); StateGapError, StaleStateError, or StateUnusable if all
    that there is descends from a quarantined checkpoint.
    """
    _check_start_and_output(log, pipeline, interval, permissions, pipeline_start_ms, as_of)
    if interval.start_ms == pipeline_start_ms:
        check_rerun(log, pipeline, interval, None)
        return None
    completed = [c for c in log.kept if not is_superseded(log, c)]
    candidates = [c for c in completed if c.interval.end == interval.start]
    if not candidates and permissions.allow_gap:
        candidates = [c for c in completed if c.interval.end <= interval.start]
        if not candidates:
            raise StateGapError(
                f"{pipeline} {interval}: no checkpoint ends before it, so allow_gap has nothing to start from"
            )
    if not candidates:
        points = sorted(
            {
                c.interval.end
                for c in completed
                if log.quarantine_above(c.id) is None and is_forgiven(log.retained[c.id].stale_by, permissions, as_of)
            }
        )
        text, filling = _gap(log, pipeline, interval, points, from_ms(pipeline_start_ms))
        raise StateGapError(text, rerun=filling)
    usable = [c for c in candidates if log.quarantine_above(c.id) is None]
    if not usable:
        text, anew = _refused(log, pipeline, interval, candidates)
        raise StateUnusable(text, rerun=anew)
    fresh = [c for c in usable if is_forgiven(log.retained[c.id].stale_by, permissions, as_of)]
    if not fresh:
        text, again = _stale(log, pipeline, interval, max(usable, key=lambda c: c.id))
        raise StaleStateError(text, rerun=again)
    chosen = max(fresh, key=lambda c: (c.interval.end, c.id))
    check_rerun(log, pipeline, interval, chosen.id)
    return chosen


def _check_start_and_output(
    log: Log, pipeline: str, interval: Interval, permissions: Permissions, pipeline_start_ms: int, as_of: int | None
) -> None:
    if interval.start_ms < pipeline_start_ms:
        raise UsageError(
            f"{pipeline} {interval}: the pipeline starts at {format_instant(from_ms(pipeline_start_ms))}; "
            "an earlier interval can't be processed (start belongs to the pipeline and never changes)"
        )
    kept = [
        (other, n)
        for other, n in overlapping_outputs(log, interval)
        if not permissions.replace_overlapping or (as_of is not None and n > as_of)
    ]
    if kept:
        text, again = _overlapping(pipeline, interval, kept)
        raise UsageError(text, rerun=again)


def overlapping_outputs(log: Log, interval: Interval) -> list[tuple[Interval, int]]:
    """The intervals with current output that overlap ``interval`` and are other than it, with the id of that output, by time.
    An interval without rows has output too."""
    return [(other, n) for other, n in log.outputs_near(interval) if other != interval]


def is_superseded(log: Log, candidate: Record | Kept) -> bool:
    """Whether a later commit of the same interval left another state. It counts also when it was dropped: retention must not
    bring back the result that it replaced. One that validation refused does not count."""
    return any(log.quarantine_above(n) is None for n in log.superseding(candidate))


def is_forgiven(stale_by: int | None, permissions: Permissions, as_of: int | None) -> bool:
    """Whether a mark does not keep anybody from the checkpoint that it lies on; ``as_of`` as in ``plan_base``."""
    if stale_by is None:
        return True
    return permissions.allow_stale_base and (as_of is None or stale_by <= as_of)


def reproduces(log: Log, content: Content) -> int | None:
    """The id of the commit of exactly this interval that the content supersedes and equals in digest, watermarks and
    descriptors; None if it changes something. A consolidation reproduces its base by construction. What replaces output of
    overlapping intervals changes something, even if the state is that of an earlier commit: the checkpoints of those intervals become
    stale, so that nobody goes on from one while a part of its output is gone."""
    if content.kind == "consolidate":
        return content.base_id
    near = log.commits_near(content.interval)
    before = [e for e in near if interval_of(e) == content.interval and kind_of(e) in ("interval", "restore", "forget")]
    if content.kind != "interval" or not before or overlapping_outputs(log, content.interval):
        return None
    superseded = before[-1]
    return superseded.id if left_same_state(superseded, content) else None


def makes_stale(changed: Interval, interval: Interval) -> bool:
    """Whether a commit with a new result for ``changed`` makes an older result for ``interval`` stale: that one was built on what is
    changed now. A newer result of the very same interval takes its place instead."""
    return changed != interval and changed.start < interval.end


def stale_marks(log: Log, content: Content, new_id: int) -> dict[int, int]:
    """What a commit that is no reproduction makes stale: ids with the id that did it. Marks are sticky: one that is there
    stays as it is."""
    marks = {}
    for old in log.kept:
        if log.retained[old.id].stale_by is None and makes_stale(content.interval, old.interval):
            marks[old.id] = new_id
    return marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """A checkpoint that no interval starts from any more once another state is restored."""

    id: int
    interval: Interval


def discarded_by(log: Log, restored: Content) -> tuple[Discarded, ...]:
    """What the pipeline loses when ``restored`` becomes its state at the end of that content's interval, by id: checkpoints that
    it makes stale, and the present result of that interval if that is another state."""
    marked = stale_marks(log, restored, log.head_id + 1).keys()
    return tuple(
        Discarded(id=c.id, interval=c.interval) for c in log.kept if c.id in marked or _is_replaced(log, c, restored)
    )


def _is_replaced(log: Log, candidate: Kept, restored: Content) -> bool:
    return (
        candidate.interval == restored.interval
        and not left_same_state(candidate, restored)
        and log.retained[candidate.id].stale_by is None
        and not is_superseded(log, candidate)
    )


# --- what a person reads -------------------------------------------------------------------------------------------------------


def intervals_of(again: Rerun) -> str:
    """The intervals to run again, in words."""
    if again.first == again.last:
        return f"the interval that starts at {format_instant(again.first)}"
    return f"the intervals that start from {format_instant(again.first)} to {format_instant(again.last)}"


def kept(log: Log) -> str:
    """A sentence: which checkpoints are retained, by the newest record; empty if there is none."""
    policy = log.newest.content.retention if log.newest is not None else None
    return "" if policy is None else f" Retention keeps {policy!s} (the pipeline's `retention`)."


def lines_of(what: Iterable[object], most: int = 10) -> str:
    """Each on a line of its own; of more than ``most`` the last ones are counted."""
    listed = [f"\n  {one}" for one in what]
    more = len(listed) - most
    return "".join(listed if more <= 0 else [*listed[:most], f"\n  and {more} more"])


def _overlapping(pipeline: str, interval: Interval, others: list[tuple[Interval, int]]) -> tuple[str, Rerun]:
    length = interval.end - interval.start
    start = min(interval.start, *(other.start for other, _ in others))
    end = max(interval.end, *(other.end for other, _ in others))
    again = Rerun(first=start, last=max(start, end - length), replace_overlapping=True)
    shown = lines_of((f"{other} (checkpoint {n})" for other, n in others), 3)
    text = (
        f"{pipeline} {interval}: there is output that overlaps it and is cut otherwise:{shown}\n"
        "Whoever read both would have the same time twice.\n"
        "To keep that output, run the intervals as they were cut.\n"
        "To replace it, allow replace_overlapping (--replace-overlapping of cairn run; a parameter of the DAG's run; an argument of "
        "run_interval): it is "
        f"no longer current once this interval is committed, and the rest of {Interval(start, end)} has no output until it is run "
        f"too. Run with it {intervals_of(again)}."
    )
    return text, again


def _gap(
    log: Log, pipeline: str, interval: Interval, points: list[datetime], start: datetime
) -> tuple[str, Rerun | None]:
    """``points``: the ends of those checkpoints that an interval may start from, in their order. The end of one that is quarantined or
    stale is none: a re-run from there would be refused too. ``start``: the pipeline's."""
    text = f"{pipeline} {interval}: no checkpoint ends where it starts."
    if not points:
        there = "All that there are are quarantined or stale" if log.kept else "There is no checkpoint at all"
        again = Rerun(first=start, last=max(start, interval.start - (interval.end - interval.start)))
        return (
            f"{text}\n{there}: begin at the pipeline's start, {format_instant(start)}.\n"
            f"To get here, run {intervals_of(again)}.",
            again,
        )
    before = [p for p in points if p < interval.start]
    after = [p for p in points if p > interval.start]
    nearest = [format_instant(p) for p in [*before[-1:], *after[:1]]]
    text += f" The nearest restore points are {' and '.join(nearest)}."
    if after:
        text += kept(log)
    if not before:
        text += f" The earliest is {format_instant(points[0])}: restore an older savepoint, or begin at the pipeline's start."
        return text, None
    length, gap = interval.end - interval.start, interval.start - before[-1]
    if gap < length:
        text += (
            f" No interval of its length ({length}) fits between {format_instant(before[-1])} and its start: it is cut otherwise "
            f"than what was run before. Run the interval that starts at {format_instant(before[-1])}, or first a shorter one that "
            "closes the gap (run_interval)."
        )
        return text, None
    # The days of a time zone differ by an hour; the last to run is the one that starts last before this one.
    last = interval.start - (timedelta(seconds=1) if gap % length else length)
    again = Rerun(first=before[-1], last=last)
    return f"{text}\nTo fill the gap, run {intervals_of(again)}.", again


def _stale(log: Log, pipeline: str, interval: Interval, base: Kept) -> tuple[str, Rerun]:
    stale_by = log.retained[base.id].stale_by
    assert stale_by is not None
    culprit = log.entries[stale_by]
    changed = interval_of(culprit) if isinstance(culprit, Record | Tombstone) else None
    text = (
        f"{pipeline} {interval}: checkpoint {base.id}, which ends where it starts, is stale: checkpoint {stale_by} changed "
        f"{changed} after it was made."
    )
    first, last_start, whole = base.interval, base.interval.start, base.interval
    if changed is not None and changed.end < whole.end and (changed.end <= whole.start or whole.start <= changed.start):
        length = max(changed.end - changed.start, timedelta(milliseconds=1))
        first = Interval(changed.end, changed.end + length)
        if changed.overlaps(whole):  # a part of it was run with another cut; the rest is still to be
            last_start = max(first.start, whole.end - length)
    again = Rerun(first=first.start, last=last_start)
    return f"{text}\nRun again {intervals_of(again)}.", again


def _refused(log: Log, pipeline: str, interval: Interval, candidates: list[Kept]) -> tuple[str, Rerun | None]:
    base = max(candidates, key=lambda c: c.id)
    refused = log.quarantine_above(base.id)
    assert refused is not None
    mark = log.quarantined[refused]
    entry = log.entries[refused]
    first = interval_of(entry) if isinstance(entry, Record | Tombstone) else None
    text = f"{pipeline} {interval}: its base, checkpoint {base.id}, "
    text += "is quarantined" if refused == base.id else f"descends from checkpoint {refused}, which is quarantined"
    text += f" ({mark.reason}){':' if mark.findings else '.'}{lines_of(mark.findings, 3)}"
    usable = [c for c in log.kept if log.quarantine_above(c.id) is None]
    if usable:
        newest = max(usable, key=lambda c: (c.interval.end, c.id))
        text += f"\nThe newest valid checkpoint is {newest.id}, which ends at {format_instant(newest.interval.end)}."
    if first is None:
        return text, None
    again = Rerun(first=first.start, last=max(first.start, base.interval.start))
    return f"{text}\nMend the cause, then run again {intervals_of(again)}.", again
