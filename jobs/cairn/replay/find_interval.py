"""Find the checkpoint and the base of the interval that a user wants to replay. Pure functions over the log."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo

from state_backend.checkpoint.log import Log
from state_backend.inspection.describe import state_of
from state_backend.values.day_or_instant import first_instant
from state_backend.values.errors import NoSuchCheckpoint, StateUnusable, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import Kept, Record, Tombstone
from state_backend.values.schedule import Schedule


@frozen
class Replayable:
    """A committed interval that can run again from its base."""

    record: Record  # The interval's checkpoint.
    status: str  # Its state, such as "completed" or "stale by 12".
    # The checkpoint that the interval started from; None for empty state.
    base: Record | None
    # The status of the base; None without a base.
    base_status: str | None


def find_interval(log: Log, pipeline: str, which: str | Interval, schedule: Schedule | None = None) -> Replayable:
    """Return the committed interval that a user names. A day is in the zone of `schedule`, or of the recorded one."""
    declared = schedule or log.schedule
    zone = UTC if declared is None else declared.rules
    if isinstance(which, str) and re.fullmatch(r"\d{1,7}", which):
        found = [kept for kept in log.kept if kept.id == int(which)]
        entry = None if found else log.entry(int(which))
        dropped = entry if isinstance(entry, Tombstone) else None
    else:
        found, dropped = _of_interval(log, which, zone)
    if not found:
        if dropped is not None:
            raise StateUnusable(
                f"{pipeline}: checkpoint {dropped.id} of {dropped.interval} is dropped: its state, code and source position are unknown\n"
                f"{_others(log)}"
            )
        raise NoSuchCheckpoint(f"{pipeline}: no checkpoint {_name_interval(which, zone)}\n{_others(log)}")
    record = log.whole(max(found, key=lambda k: (k.kind == "interval", log.quarantine_above(k.id) is None, k.id)).id)
    content = record.content
    if content.kind != "interval":
        raise UsageError(
            f"{pipeline}: checkpoint {record.id} is of kind {content.kind}, which ran no processor\n{_others(log)}"
        )
    base = None
    if content.base_id is not None:
        if content.base_id not in log.retained:
            raise StateUnusable(
                f"{pipeline}: checkpoint {record.id} of {content.interval} started from checkpoint {content.base_id}, which is dropped. "
                f"So the state before is unknown\n{_others(log)}"
            )
        base = log.whole(content.base_id)
    return Replayable(
        record=record,
        status=state_of(log, record),
        base=base,
        base_status=None if base is None else state_of(log, base),
    )


def _of_interval(log: Log, which: str | Interval, zone: tzinfo) -> tuple[list[Kept], Tombstone | None]:
    if isinstance(which, Interval):
        start, found = which.start, [kept for kept in log.kept if kept.interval == which]
    else:
        start = first_instant("INTERVAL", which, zone)
        found = [kept for kept in log.kept if kept.interval.start == start]
    near = log.commits_near(Interval(start, start + timedelta(milliseconds=1))) if not found else []
    dropped = [entry for entry in near if isinstance(entry, Tombstone) and entry.interval.start == start]
    return found, dropped[-1] if dropped else None


def _name_interval(which: str | Interval, zone: tzinfo) -> str:
    if isinstance(which, Interval):
        return f"of {which}"
    return which if which.isdecimal() else f"of an interval that starts at {_instant(which, zone)}"


def _instant(text: str, zone: tzinfo) -> str:
    found: datetime = first_instant("INTERVAL", text, zone)
    return format_instant(found)


def _others(log: Log) -> str:
    intervals = [kept for kept in log.kept if kept.kind == "interval"]
    some = [kept for kept in intervals if kept.base_id is None or kept.base_id in log.retained]
    listed = ", ".join(f"{r.id} ({format_instant(r.interval.start)})" for r in some[-10:])
    if len(some) > 10:
        listed = f"{len(some)}, of which the newest are {listed}"
    return f"Intervals that can be replayed: {listed or 'none'}"
