"""Rules of forgotten keys: which attempt would bring a key back, and when a forget may be committed. Pure functions over the log.

The invariant: a checkpoint whose id is that of the forget or higher does not hold what the key had before. Every commit keeps it:

    interval      its base has such an id and its rows are later, or its shards left the key out (`Content.filtered`)
    rewind        its target has such an id
    restore       the savepoint or the source of the fork says that the key was removed there before (`Content.forget`)
    consolidate   its base has such an id

All older checkpoints may hold the key. Nobody has to read them to know that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from state_backend.checkpoint.log import Log
from state_backend.values.errors import BaseMoved, UsageError
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Content, Forget, Forgotten, ForgottenKey, Kept, Prepared, Record, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """A forgotten key that an attempt would bring back.

    Attributes:
        id: The record that removed the key.
        rows: The attempt's rows are of a time before the forget.
        base: The attempt's base is older than the forget, so it may hold the key.
    """

    id: int
    key: ForgottenKey
    rows: bool
    base: bool


def key_hash(salt: str, encoded_key: bytes) -> str:
    """Return the hex digits by which a record knows a key. ``salt``: hex digits."""
    return hashlib.sha256(bytes.fromhex(salt) + encoded_key).hexdigest()


def is_key(forgotten: ForgottenKey, encoded_key: bytes) -> bool:
    """Return True if the encoded key is the forgotten one."""
    return key_hash(forgotten.salt, encoded_key) == forgotten.key_hash


def returning_keys(log: Log, start_ms: int | None, base_id: int | None) -> tuple[Returning, ...]:
    """Return the forgotten keys that an attempt would bring back.

    Args:
        log: The log.
        start_ms: The start of the attempt's interval, in milliseconds since the epoch; None for an attempt that reads no rows.
        base_id: The checkpoint that the attempt starts from; None for empty state.
    """
    found = []
    for forgotten in log.summary.forgotten:
        rows = start_ms is not None and start_ms < forgotten.key.until_ms
        base = base_id is not None and base_id < forgotten.id
        if rows or base:
            found.append(Returning(id=forgotten.id, key=forgotten.key, rows=rows, base=base))
    return tuple(found)


def check_rerun(log: Log, pipeline: str, interval: Interval, base_id: int | None) -> None:
    """Refuse an interval that would bring a forgotten key back, if `cairn forget` was called with `refuse`.

    Raises:
        UsageError: The interval is refused.
    """
    for key in returning_keys(log, interval.start_ms, base_id):
        if key.key.on_rerun == "refuse":
            raise UsageError(f"{pipeline} {interval}: {_why(key, base_id)}\n{_how_to_filter(pipeline)}")


def check_not_tried(log: Log, pipeline: str, interval: Interval, base_id: int | None) -> None:
    """Refuse a trial that would bring a forgotten key into a root of its own, where no filter applies.

    Raises:
        UsageError: The trial is refused.
    """
    for key in returning_keys(log, interval.start_ms, base_id):
        if base_id is None or key.base:
            raise UsageError(
                f"{pipeline}: a trial from {format_instant(interval.start)}: {_why(key, base_id)}\n"
                "Begin the trial at the end of a checkpoint that was committed since the key was forgotten"
            )


def check_target(log: Log, target: int) -> None:
    """Refuse to go back to, or to fork, a checkpoint that may hold a forgotten key.

    Raises:
        UsageError: The checkpoint is older than a forget.
    """
    for forgotten in log.summary.forgotten:
        if target < forgotten.id:
            clean = [k.id for k in log.kept if k.id >= forgotten.id]
            raise UsageError(
                f"checkpoint {target} may hold a key that `cairn forget` removed: checkpoint {forgotten.id} was the first without the "
                f"key\nTake one of {', '.join(map(str, clean)) or 'those to come'}. To get the state at an earlier time, run that "
                "interval again, if the key was forgotten with --on-rerun filter"
            )


def check_restored(log: Log, pipeline: str, content: Content) -> None:
    """Refuse a savepoint's or another pipeline's state that may hold a forgotten key.

    Raises:
        UsageError: The state does not say that the key was removed from it.
    """
    for forgotten in _missing(log.summary.forgotten, content.forget):
        raise UsageError(
            f"{pipeline}: the state at {format_instant(content.interval.end)} that would be restored may hold a key that checkpoint "
            f"{forgotten.id} of {pipeline!r} forgot\n"
            "Restore a savepoint that was taken since. To use this one, restore it under another name, and run `cairn forget` there"
        )


def check_commit(log: Log, prepared: Prepared, who: str) -> None:
    """Refuse an attempt that would bring back a key that was forgotten since its begin, and a forget that is too late.

    A forget is too late once another checkpoint was committed: its base is no longer the newest state.

    Args:
        log: The log as it is now.
        prepared: The attempt.
        who: The attempt, for the message.

    Raises:
        BaseMoved: The attempt is refused.
    """
    content = prepared.content
    if content.kind == "forget":
        newest = newest_state(log)
        if newest is None or newest.id != content.base_id or max(log.retained, default=0) > prepared.h0:
            raise BaseMoved(
                f"{who}: checkpoint {max(log.retained, default=0)} was committed meanwhile, so checkpoint {content.base_id} is not the "
                "newest state any more; forget the key again"
            )
    elif content.kind == "restore" and content.base_id is None:
        for forgotten in _missing(log.summary.forgotten, content.forget):
            raise BaseMoved(
                f"{who}: checkpoint {forgotten.id} forgot a key meanwhile, and the restored state may hold the key; restore a savepoint "
                "that was taken since"
            )
        return
    start_ms = content.interval.start_ms if content.kind == "interval" else None
    for key in returning_keys(log, start_ms, content.base_id):
        if key.key.forget not in content.filtered:
            raise BaseMoved(f"{who}: {_why(key, content.base_id)}. Clear the task to process the interval again")


def newest_state(log: Log) -> Kept | None:
    """Return the usable checkpoint that extends furthest, which the next interval starts from; None if there is no usable one."""
    usable = [
        kept
        for kept in log.kept
        if log.retained[kept.id].stale_by is None
        and log.quarantine_above(kept.id) is None
        and not any(log.quarantine_above(n) is None for n in log.superseding(kept))
    ]
    return max(usable, key=lambda kept: (kept.interval.end, kept.id), default=None)


def is_free_of(log: Log, record: Record, encoded_key: bytes) -> bool:
    """Return True if a checkpoint can't hold a key, because it was committed since the forget and all its rows are of before."""
    return any(
        record.id >= forgotten.id and record.content.interval.end_ms <= forgotten.key.until_ms
        for forgotten in log.summary.forgotten
        if is_key(forgotten.key, encoded_key)
    )


def next_forgotten(before: Summary, new: Record) -> tuple[Forgotten, ...]:
    """Return the forgotten keys as of a new record. A key that is forgotten again counts from the new record on."""
    if new.content.kind not in ("forget", "restore") or new.content.forget is None:
        return before.forgotten
    known = {(f.key.salt, f.key.key_hash): f for f in before.forgotten}
    for key in new.content.forget.keys:
        if new.content.kind == "forget" or (key.salt, key.key_hash) not in known:
            known[key.salt, key.key_hash] = Forgotten(id=new.id, key=key)
    return tuple(sorted(known.values(), key=lambda f: (f.id, f.key.key_hash)))


def forgets_of(record: Record) -> Forget | None:
    """Return what a copy of the checkpoint outside the log has to say of forgotten keys; None for nothing."""
    keys = tuple(forgotten.key for forgotten in record.summary.forgotten)
    return Forget(keys=keys) if keys else None


def _missing(forgotten: Iterable[Forgotten], said: Forget | None) -> list[Forgotten]:
    known = {key.forget for key in said.keys} if said is not None else set()
    return [f for f in forgotten if f.key.forget not in known]


def _why(key: Returning, base_id: int | None) -> str:
    until = format_instant(from_ms(key.key.until_ms))
    if key.base:
        return f"`cairn forget` removed a key with checkpoint {key.id}, and checkpoint {base_id}, which is older, may still hold the key"
    return f"`cairn forget` removed a key with checkpoint {key.id}, and rows of before {until} may bring the key back"


def _how_to_filter(pipeline: str) -> str:
    return (
        "To run the interval without the key, name the key once more: "
        f"cairn forget --pipeline {pipeline} --key JSON --on-rerun filter"
    )
