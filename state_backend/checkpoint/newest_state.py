"""Decide which checkpoints are valid, which one is the newest state, and which one a name means. Pure functions over
the log.

A checkpoint is valid if an interval may start from it without a permission: it is retained, it is not stale, neither it
nor an ancestor is quarantined, and no later commit of its interval has left another state. The newest state is the
valid checkpoint of the latest interval. It need not have the highest id: a re-run of an old interval that leaves the
same state, or a consolidation of an old checkpoint, gets the highest id and changes no later checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from state_backend.checkpoint.log import Log, interval_of, kept_of, left_same_state
from state_backend.values.errors import NoSuchCheckpoint, UsageError
from state_backend.values.intervals import format_instant
from state_backend.values.records import Kept, Record, Tombstone


def is_superseded(log: Log, candidate: Record | Kept) -> bool:
    """Return True if a later commit of the same interval left another state, and validation did not refuse that commit.

    A dropped later commit counts too: otherwise retention would bring back the result that the later commit replaced.
    """
    by = log.by_id.superseded.get(candidate.id)
    return by is not None and any(log.quarantine_above(n) is None for n in by)


def superseded_by(new: Record, older: Iterable[Kept]) -> list[Kept]:
    """Return the older checkpoints of the same interval that have another state than the commit `new`."""
    if new.content.kind not in ("interval", "restore", "forget"):
        return []
    interval = interval_of(new)
    return [old for old in older if old.interval == interval and not left_same_state(new, old)]


def valid_states(log: Log, new: Record | None = None, marks: Mapping[int, int] | None = None) -> tuple[Kept, ...]:
    """Return the valid checkpoints, by id; with `new`, as after this commit, which makes the ids in `marks` stale."""
    stale = {n for n, retained in log.retained.items() if retained.stale_by is not None} | {*(marks or ())}
    old = [
        k for k in log.kept if k.id not in stale and log.quarantine_above(k.id) is None and not is_superseded(log, k)
    ]
    if new is None:
        return tuple(old)
    gone = {k.id for k in superseded_by(new, old)}
    return (*(k for k in old if k.id not in gone), *([kept_of(new)] if new.id not in stale else []))


def newest_of(states: Iterable[Kept]) -> Kept | None:
    """Return the checkpoint of the latest interval; of that interval's checkpoints, the one that was committed last."""
    return max(states, key=lambda kept: (kept.interval.end, kept.id), default=None)


def newest_state(log: Log) -> Kept | None:
    """Return the newest state, which the next interval starts from; None if no checkpoint is valid."""
    return newest_of(valid_states(log))


def checkpoint_named(log: Log, which: str | int | datetime) -> int | None:
    """Return the id of the retained checkpoint that `which` names; None if there is none.

    An id names its checkpoint. "latest" names the newest state, a datetime the newest valid checkpoint of that end.
    """
    if isinstance(which, int):
        return which if which in log.retained else None
    if not isinstance(which, datetime) and which != "latest":
        raise UsageError(f"checkpoint {which!r} is neither 'latest', nor an id, nor the end of an interval")
    found = newest_of(k for k in valid_states(log) if which in ("latest", k.interval.end))
    return None if found is None else found.id


def overtaken(log: Log, newest: Kept | Record) -> str | None:
    """Return a sentence: why the checkpoints of intervals later than that of `newest` are not valid; None: none."""
    end = interval_of(newest).end
    later = [kept for kept in log.kept if kept.interval.end > end]
    if not later:
        return None
    until = format_instant(max(kept.interval.end for kept in later))
    return (
        f"the newest state is checkpoint {newest.id} of {interval_of(newest)}. The checkpoints of later intervals, up to {until}, "
        f"are not valid: {', '.join(f'{k.id} {_why_invalid(log, k)}' for k in later[-_NAMED:])}"
    )


def no_checkpoint(log: Log, pipeline: str, which: str | int | datetime) -> NoSuchCheckpoint:
    """Return the error for a name, `which`, that fits no usable checkpoint. The message lists the valid checkpoints."""
    text = f"pipeline {pipeline!r} has no usable checkpoint {which}"
    if isinstance(which, int):
        text += ": its state is dropped" if isinstance(log.entry(which), Tombstone) else ""
    else:
        there = [kept for kept in log.kept if which in ("latest", kept.interval.end)][-_NAMED:]
        if there:
            text += f": {', '.join(f'checkpoint {k.id} {_why_invalid(log, k)}' for k in there)}"
    return NoSuchCheckpoint(f"{text}\n{told(valid_states(log))}")


def told(states: Collection[Kept]) -> str:
    """Return a sentence with the ids and interval ends of the last ten of `states`, the valid checkpoints."""
    last = sorted(states, key=lambda kept: (kept.interval.end, kept.id))[-_NAMED:]
    listed = ", ".join(f"{k.id} (to {format_instant(k.interval.end)})" for k in last)
    if len(states) > len(last):
        listed = f"{len(states)}, of which the newest are {listed}"
    return f"Usable checkpoints: {listed or 'none'}"


def _why_invalid(log: Log, kept: Kept) -> str:
    refused, stale_by = log.quarantine_above(kept.id), log.retained[kept.id].stale_by
    if refused is not None:
        return "is quarantined" if refused == kept.id else f"descends from checkpoint {refused}, which is quarantined"
    if is_superseded(log, kept):
        return "is replaced"
    return "is valid" if stale_by is None else f"is stale by {stale_by}"


_NAMED = 10
