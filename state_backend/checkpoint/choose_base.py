"""Choose the state that an interval starts from, and find what a commit makes stale. Pure functions over the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from state_backend.checkpoint.forgotten_keys import check_rerun
from state_backend.checkpoint.log import Log, interval_of, kind_of, left_same_state
from state_backend.checkpoint.newest_state import is_superseded, newest_of, valid_states
from state_backend.values.airflow_commands import command_line
from state_backend.values.day_or_instant import format_duration
from state_backend.values.errors import Rerun, StaleStateError, StateGapError, StateUnusable, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Content, Kept, Permissions, Record, Tombstone
from state_backend.values.schedule import Schedule, are_same, first_interval, interval_before, interval_from


def plan_base(
    log: Log, pipeline: str, interval: Interval, permissions: Permissions, pipeline_start_ms: int
) -> Record | None:
    """Return the record of the checkpoint that `choose_base` chooses for the interval; None for empty state."""
    chosen = choose_base(log, pipeline, interval, permissions, pipeline_start_ms)
    return log.whole(chosen.id) if chosen is not None else None


def choose_base(
    log: Log,
    pipeline: str,
    interval: Interval,
    permissions: Permissions,
    pipeline_start_ms: int,
    *,
    as_of: int | None = None,
    schedule: Schedule | None = None,
) -> Kept | None:
    """Return the retained checkpoint that the interval starts from; None for empty state.

    Cairn calls this three times with a newly read log: before Spark starts, so that an error costs little; at begin;
    and at commit, since other attempts may have committed. `as_of`: The permissions forgive only the overlaps and the
    staleness that commits up to this id have caused; None: those of all commits.
    """
    _check_start_and_output(log, pipeline, interval, permissions, pipeline_start_ms, as_of)
    if interval.start_ms == pipeline_start_ms:
        check_rerun(log, pipeline, interval, None)
        return None
    candidates = [c for c in log.kept if c.interval.end == interval.start and not is_superseded(log, c)]
    if permissions.allow_gap and all(log.quarantine_above(c.id) is not None for c in candidates):
        candidates = [c for c in log.kept if c.interval.end <= interval.start and not is_superseded(log, c)]
        if not candidates:
            raise StateGapError(
                f"{pipeline} {interval}: no checkpoint ends before this interval, so allow_gap does not help\nRun earlier intervals first"
            )
    if not candidates:
        points = sorted(
            {
                c.interval.end
                for c in log.kept
                if not is_superseded(log, c)
                and log.quarantine_above(c.id) is None
                and is_forgiven(log.retained[c.id].stale_by, permissions, as_of)
            }
        )
        text, filling = _gap(log, pipeline, interval, points, from_ms(pipeline_start_ms), schedule or log.schedule)
        if filling is not None and _is_valid(log, interval):
            filling = replace(filling, last=interval.start, though_valid=True)
        raise StateGapError(text, rerun=filling)
    usable = [c for c in candidates if log.quarantine_above(c.id) is None]
    if not usable:
        text, anew = _explain_refusal(log, pipeline, interval, candidates)
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
            f"{pipeline} {interval}: the interval begins before the pipeline's start, {format_instant(from_ms(pipeline_start_ms))}\n"
            "Cairn processes no earlier interval, and the start of a pipeline never changes"
        )
    kept = [
        (other, n)
        for other, n in overlapping_outputs(log, interval)
        if not permissions.replace_overlapping or (as_of is not None and n > as_of)
    ]
    if kept:
        text, again = _overlapping(log, pipeline, interval, kept)
        raise UsageError(text, rerun=again)


def overlapping_outputs(log: Log, interval: Interval) -> list[tuple[Interval, int]]:
    """Return the other intervals that overlap this one and have current output, each with the id of its commit."""
    return [(other, n) for other, n in log.outputs_near(interval) if other != interval]


def _is_valid(log: Log, interval: Interval) -> bool:
    """Return True if the interval has a valid result, or a stale one that was dropped, which the log does not mark."""
    made = dict(log.outputs_near(interval)).get(interval)
    stale = {kept.id for kept in log.kept if log.retained[kept.id].stale_by is not None}
    return made is not None and made not in stale and log.quarantine_above(made) is None


def is_forgiven(stale_by: int | None, permissions: Permissions, as_of: int | None) -> bool:
    if stale_by is None:
        return True
    return permissions.allow_stale_base and (as_of is None or stale_by <= as_of)


def reproduces(log: Log, content: Content) -> int | None:
    """Return the id of the commit whose state the content reproduces; None if the content changes the state.

    A consolidation always reproduces its base. The content of an interval reproduces the interval's newest commit if
    both have the same digest, watermarks and descriptors. If that commit is quarantined, the newest commit that is not
    must have the same ones too. Content that replaces output of overlapping intervals reproduces nothing: a part of
    their output is no longer current, so their checkpoints must become stale.
    """
    if content.kind == "consolidate":
        return content.base_id
    near = log.commits_near(content.interval)
    before = [e for e in near if interval_of(e) == content.interval and kind_of(e) in ("interval", "restore", "forget")]
    if content.kind != "interval" or not before or overlapping_outputs(log, content.interval):
        return None
    # While the newest commit was quarantined, later intervals may have started from an older one, so check both.
    usable = [e for e in before if log.quarantine_above(e.id) is None]
    same = all(left_same_state(e, content) for e in (before[-1], *usable[-1:]))
    return before[-1].id if same else None


def makes_stale(changed: Interval, interval: Interval) -> bool:
    """Return True if a new result for `changed` makes an older result for `interval` stale.

    The older result is stale if its interval ends after the start of `changed`. A new result of the same interval
    replaces the older result instead.
    """
    return changed.start < interval.end and changed != interval


def stale_marks(log: Log, content: Content, new_id: int) -> dict[int, int]:
    """Return the ids of the checkpoints that a commit makes stale, each with `new_id`.

    The commit must not be a reproduction. A checkpoint that is stale already keeps its mark.
    """
    marks = {}
    for old in log.kept:
        if makes_stale(content.interval, old.interval) and log.retained[old.id].stale_by is None:
            marks[old.id] = new_id
    return marks


def restored_away(log: Log) -> frozenset[int]:
    """Return the ids of the retained checkpoints of later intervals that a restore took out of use.

    The stale marks alone don't show this: a checkpoint that was stale before the restore keeps its older mark.
    """
    causes = {mark.stale_by for mark in log.retained.values() if mark.stale_by is not None}
    entries = [log.entry(n) for n in causes | {c.id for c in log.kept if kind_of(c) == "restore"}]
    restores = [e for e in entries if isinstance(e, Record | Tombstone) and kind_of(e) == "restore"]
    return frozenset(
        c.id for c in log.kept if any(r.id > c.id and makes_stale(interval_of(r), c.interval) for r in restores)
    )


@frozen
class Discarded:
    """A checkpoint that a rewind or restore takes out of use: no later interval starts from it."""

    id: int
    interval: Interval


def discarded_by(log: Log, restored: Content) -> tuple[Discarded, ...]:
    """Return the checkpoints that the pipeline loses when `restored` becomes its state, by id.

    These are the checkpoints that the restore makes stale, and that of the same interval if its state differs.
    """
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


def intervals_of(again: Rerun) -> str:
    """Return the intervals to run again as words, like `the interval that starts at 2013-01-03T00:00:00Z`."""
    if again.first == again.last:
        return f"the interval that starts at {format_instant(again.first)}"
    return f"the intervals that start from {format_instant(again.first)} to {format_instant(again.last)}"


def kept(log: Log) -> str:
    """Return a sentence about the newest record's retention policy; empty if the log has no policy."""
    policy = log.newest.content.retention if log.newest is not None else None
    return "" if policy is None else f" Retention keeps {policy!s} (the pipeline's `retention`)."


def lines_of(what: Iterable[object], most: int = 10) -> str:
    """Return up to `most` items as text, one item a line. A last line says how many items are left out."""
    listed = [f"\n  {one}" for one in what]
    more = len(listed) - most
    return "".join(listed if more <= 0 else [*listed[:most], f"\n  and {more} more"])


def why_stale(log: Log, stale_by: int) -> str:
    """Return a clause that says how commit `stale_by` changed the state that later checkpoints were made from."""
    cause = log.entry(stale_by)
    if not isinstance(cause, Record | Tombstone):
        return f"checkpoint {stale_by} later changed an earlier interval"
    if kind_of(cause) == "restore":
        return f"checkpoint {stale_by} later restored the state at {format_instant(interval_of(cause).end)}"
    return f"checkpoint {stale_by} recomputed {interval_of(cause)} with another result"


def _start_before(schedule: Schedule | None, end: datetime, length: timedelta) -> datetime:
    """Return the start of the interval that ends at `end`: by the schedule, else `length` before."""
    found = interval_before(schedule, end) if schedule is not None else None
    return end - length if found is None else found.start


def _overlapping(log: Log, pipeline: str, interval: Interval, others: list[tuple[Interval, int]]) -> tuple[str, Rerun]:
    length = interval.end - interval.start
    start = min(interval.start, *(other.start for other, _ in others))
    end = max(interval.end, *(other.end for other, _ in others))
    again = Rerun(first=start, last=max(start, _start_before(log.schedule, end, length)), replace_overlapping=True)
    shown = lines_of((f"{other} (checkpoint {n})" for other, n in others), 3)
    text = (
        f"{pipeline} {interval}: output of intervals with other boundaries overlaps this interval:{shown}\n"
        "A reader of both outputs would get the same rows twice.\n"
        "To keep the old output, run intervals with the old boundaries.\n"
        "To replace it, allow replace_overlapping: an option of cairn run, a parameter of the DAG's run, an argument of run_interval.\n"
        f"After the commit, the old output no longer counts, and the rest of {Interval(start, end)} has no output until you run it too.\n"
        f"With replace_overlapping, run {intervals_of(again)}."
    )
    return text, again


def _gap(
    log: Log, pipeline: str, interval: Interval, points: list[datetime], start: datetime, schedule: Schedule | None
) -> tuple[str, Rerun | None]:
    """Return the message that no checkpoint ends where `interval` starts, and the intervals to run first.

    `points`: The interval ends of the checkpoints that an interval may start from, sorted. Ends of stale and
    quarantined checkpoints are left out, since a re-run from there would fail too.
    """
    text = f"{pipeline} {interval}: no checkpoint ends where the interval starts."
    last = _start_before(schedule, interval.start, interval.end - interval.start)
    anew = Rerun(first=start, last=max(start, last))
    if not points:
        there = "All checkpoints are quarantined or stale" if log.kept else "The pipeline has no checkpoint"
        text += f"\n{there}. Begin at the pipeline's start, {format_instant(start)}."
        return f"{text}\nTo fill the gap, run {intervals_of(anew)}.", anew
    before = [p for p in points if p < interval.start]
    after = [p for p in points if p > interval.start]
    nearest = [format_instant(p) for p in [*before[-1:], *after[:1]]]
    text += f" The nearest usable checkpoints end at {' and '.join(nearest)}."
    if after:
        text += kept(log)
    if not before:
        text += f" The earliest ends at {format_instant(points[0])}."
        return f"{text}\nRestore an older savepoint, or begin at the pipeline's start: run {intervals_of(anew)}.", anew
    bridge = _bridge(log, schedule, Interval(before[-1], interval.start))
    if bridge is not None:
        return f"{text}\n{bridge}", None
    length, gap = interval.end - interval.start, interval.start - before[-1]
    scheduled = interval_before(schedule, interval.start) if schedule is not None else None
    if scheduled is not None and scheduled.start >= before[-1]:
        again = Rerun(first=before[-1], last=scheduled.start)
        return f"{text}\nTo fill the gap, run {intervals_of(again)}.", again
    if gap < length:
        text += (
            f" The time from {format_instant(before[-1])} to the interval's start is shorter than the interval ({length}): its "
            "boundaries do not fit those of earlier intervals.\n"
            f"Run the interval that starts at {format_instant(before[-1])}, or first close the gap with a shorter interval (run_interval)."
        )
        return text, None
    # `Rerun` names all intervals whose start is at or between `first` and `last`. It must have the last interval of the
    # gap, but not this interval. If the gap is a whole number of lengths, its last interval starts one length before
    # this one. Otherwise (some days have 23 or 25 hours) that start is unknown, so `last` is one second before this
    # interval's start.
    last = interval.start - (timedelta(seconds=1) if gap % length else length)
    again = Rerun(first=before[-1], last=last)
    return f"{text}\nTo fill the gap, run {intervals_of(again)}.", again


def _bridge(log: Log, schedule: Schedule | None, gap: Interval) -> str | None:
    """Return advice if the schedule has changed and none of its intervals begins at the start of the gap; else None."""
    if schedule is None or log.schedule is None or are_same(log.schedule, schedule):
        return None
    if interval_from(schedule, gap.start) is not None:
        return None
    end = min(first_interval(schedule, gap.start).start, gap.end)
    one = Interval(gap.start, end)
    overlaps = any(other.overlaps(one) for other, _ in log.outputs_near(one))
    command = command_line(
        "run",
        code=log.code,
        root=log.entries.root,
        from_=gap.start,
        every=format_duration(end - gap.start),
        replace_overlapping=overlaps,
    )
    return (
        f"The schedule has changed from {log.schedule} to {schedule}, and no interval of the new schedule begins at "
        f"{format_instant(gap.start)}.\n"
        f"Run one interval outside of the schedule, from there to {format_instant(end)}:\n"
        f"{command}"
    )


def _stale(log: Log, pipeline: str, interval: Interval, base: Kept) -> tuple[str, Rerun]:
    stale_by = log.retained[base.id].stale_by
    assert stale_by is not None
    culprit = log.entries[stale_by]
    changed = interval_of(culprit) if isinstance(culprit, Record | Tombstone) else None
    text = f"{pipeline} {interval}: its base, checkpoint {base.id}, is stale: {why_stale(log, stale_by)}."
    first, last_start, whole = base.interval, base.interval.start, base.interval
    if changed is not None and changed.end < whole.end and (changed.end <= whole.start or whole.start <= changed.start):
        length = max(changed.end - changed.start, timedelta(milliseconds=1))
        first = Interval(changed.end, changed.end + length)
        # `changed` is the interval that was run again, and `whole` is the base's interval. If `changed` is a part of
        # `whole`, the intervals from the end of `changed` to the end of `whole` must be run again.
        if changed.overlaps(whole):
            last_start = max(first.start, _start_before(log.schedule, whole.end, length))
    again = Rerun(first=first.start, last=last_start)
    return f"{text}\nRun again {intervals_of(again)}.", again


def _explain_refusal(log: Log, pipeline: str, interval: Interval, candidates: list[Kept]) -> tuple[str, Rerun | None]:
    base = max(candidates, key=lambda c: c.id)
    refused = log.quarantine_above(base.id)
    assert refused is not None
    mark = log.quarantined[refused]
    entry = log.entries[refused]
    whole = interval_of(entry) if isinstance(entry, Record | Tombstone) else None
    text = f"{pipeline} {interval}: its base, checkpoint {base.id}, "
    text += "is quarantined" if refused == base.id else f"descends from checkpoint {refused}, which is quarantined"
    text += f" ({mark.reason}){':' if mark.findings else '.'}{lines_of(mark.findings, 3)}"
    if (newest := newest_of(valid_states(log))) is not None:
        text += f"\nThe newest usable checkpoint is {newest.id}, which ends at {format_instant(newest.interval.end)}."
    if whole is None:
        return text, None
    # The interval of the quarantined checkpoint may have run again since, with a usable result.
    redone = any(c.interval == whole and log.quarantine_above(c.id) is None for c in log.kept)
    first = whole.end if redone else whole.start
    again = Rerun(first=first, last=max(first, base.interval.start))
    return f"{text}\nFix the cause, then run again {intervals_of(again)}.", again
