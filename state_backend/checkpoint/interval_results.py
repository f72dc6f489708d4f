"""Find the current result of given intervals: its commit, its input hash, and whether it is still valid.

A run over several intervals uses this to skip intervals whose result would not change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate

from state_backend.checkpoint.choose_base import makes_stale
from state_backend.checkpoint.log import Fact, Log, attempt_of, interval_of, kind_of, run_of
from state_backend.checkpoint.newest_state import valid_states
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Content, Record, RunRef, Tombstone


@frozen
class Result:
    """The current result of an interval: the commit whose output counts."""

    id: int
    attempt: str
    run: RunRef
    input_hash: str | None
    # The commit's content; None if only a tombstone remains.
    content: Content | None
    dropped: bool
    # Why no interval should start from the result, as a sentence; None if the result is valid.
    spoilt: str | None


def results_of(log: Log, intervals: Sequence[Interval], pipeline_start: Interval) -> dict[Interval, Result]:
    """Return the current result of each given interval. Intervals without output are left out.

    The log says of a retained checkpoint whether it is stale, but not of a dropped one. A dropped checkpoint is stale
    if a later commit changed the state of an earlier or overlapping interval. So if a checkpoint was dropped, the
    function reads the later commits of all intervals from the start of `pipeline_start` on, the first interval.
    """
    if not intervals or not log.head_id:
        return {}
    span = Interval(min(i.start for i in intervals), max(i.end for i in intervals))
    wanted = {*intervals}
    newest = {interval: n for interval, n in log.outputs_near(span) if interval in wanted}
    log.entries.load(newest.values())
    dropped = [n for n in newest.values() if n not in log.retained]
    since = Interval(min(pipeline_start.start, span.start), span.end) if dropped else span
    later = log.commits_near(since, after=min(newest.values())) if newest else []
    return {interval: _result(log, n, later) for interval, n in newest.items()}


def spoilt_results(log: Log, outputs: Mapping[Interval, int]) -> dict[Interval, Result]:
    """Return the results that are no longer valid, of the intervals in `outputs` (interval: commit), by time.

    The result of an interval before the end of a restored state is valid: a person made that state current on purpose.
    """
    if not outputs or log.newest is None:
        return {}
    start = from_ms(log.newest.content.pipeline_start_ms)
    # The log has no stale mark of a dropped checkpoint: the facts of all commits tell which later ones may have made it
    # stale. Without dropped ones, the facts of retained checkpoints suffice.
    whole = any(n not in log.retained for n in outputs.values())
    named = log.facts(None) if whole else [Fact(kept.interval, kept.id, kept.kind) for kept in log.kept]
    restore = last_restore(log, named)
    restored = start if restore is None else restore.interval.end
    commits = sorted((f.id, f.interval.start) for f in named if f.kind in ("interval", "restore"))
    ids = [n for n, _ in commits]
    earliest_since = [*accumulate((at for _, at in reversed(commits)), min)][::-1]
    refused = min(log.quarantined, default=None)

    def is_suspect(interval: Interval, n: int) -> bool:
        later = bisect_right(ids, n)
        changed = n in stale or (later < len(ids) and earliest_since[later] < interval.end)
        return interval.start >= restored and (changed or (refused is not None and n >= refused))

    stale = {n for n, retained in log.retained.items() if retained.stale_by is not None}
    suspects = [interval for interval, n in sorted(outputs.items()) if is_suspect(interval, n)]
    found = results_of(log, suspects, Interval(start, start + timedelta(milliseconds=1)))
    return {interval: found[interval] for interval in suspects if found[interval].spoilt is not None}


def last_restore(log: Log, facts: Sequence[Fact]) -> Fact | None:
    """Return the restore in `facts` whose state no later commit has changed; of several, that of the latest interval.

    None without one. Retention may have dropped it, but the results that were computed from it still count.
    """
    valid = {kept.id for kept in valid_states(log)}

    def counts(restore: Fact) -> bool:
        if restore.id in valid or log.quarantine_above(restore.id) is not None:
            return restore.id in valid
        # It may be dropped, or replaced by `cairn erase`. So look for a later commit that changed the state.
        later = log.commits_near(Interval(datetime.min.replace(tzinfo=UTC), restore.interval.end), after=restore.id)
        return not any(_makes_stale(one, restore.interval) or _replaces_state(one, restore.interval) for one in later)

    counting = (fact for fact in facts if fact.kind == "restore" and counts(fact))
    return max(counting, key=lambda fact: (fact.interval.end, fact.id), default=None)


def _replaces_state(commit: Record | Tombstone, interval: Interval) -> bool:
    return kind_of(commit) == "interval" and interval_of(commit) == interval and commit.reproduces is None


def _result(log: Log, checkpoint_id: int, later: Sequence[Record | Tombstone]) -> Result:
    entry = log.entries[checkpoint_id]
    assert isinstance(entry, Record | Tombstone)
    return Result(
        id=checkpoint_id,
        attempt=attempt_of(entry),
        run=run_of(entry),
        input_hash=entry.content.input_hash if isinstance(entry, Record) else entry.input_hash,
        content=entry.content if isinstance(entry, Record) else None,
        dropped=checkpoint_id not in log.retained,
        spoilt=_spoilt(log, entry, later),
    )


def _spoilt(log: Log, entry: Record | Tombstone, later: Sequence[Record | Tombstone]) -> str | None:
    interval = interval_of(entry)
    if (refused := log.quarantine_above(entry.id)) is not None:
        return f"checkpoint {refused} is quarantined"
    if (mark := log.retained.get(entry.id)) is not None:
        if mark.stale_by is not None:
            return f"checkpoint {mark.stale_by} made it stale"
    else:
        for other in later:
            if other.id > entry.id and _makes_stale(other, interval):
                return f"checkpoint {other.id} made it stale"
    for other in later:
        if other.id > entry.id and kind_of(other) == "restore" and interval_of(other) == interval:
            return f"checkpoint {other.id} restored other state at {format_instant(interval.end)}"
    return None


def _makes_stale(commit: Record | Tombstone, interval: Interval) -> bool:
    """Return True if the commit made the interval's result stale.

    A commit that reproduces the state of an earlier commit makes no result stale.
    """
    if kind_of(commit) not in ("interval", "restore") or commit.reproduces is not None:
        return False
    return makes_stale(interval_of(commit), interval)


def spoilt_by(results: dict[Interval, Result], record: Record) -> dict[Interval, Result]:
    """Return `results` with `spoilt` set where the new commit `record` makes a result stale. Its own is not added."""
    return {
        interval: replace(result, spoilt=f"checkpoint {record.id} made it stale")
        if result.spoilt is None and _makes_stale(record, interval)
        else result
        for interval, result in results.items()
    }
