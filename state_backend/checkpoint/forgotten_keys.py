"""Rules of forgotten keys, which `begin` and `commit` check: may an attempt run, or would it bring a key back?

These are pure functions over the log. `cairn erase` removes a key from the newest state by a commit, called the forget
here. A checkpoint is called clean if its id is the forget's id or a higher one. Invariant: no clean checkpoint holds
entries that the key had before the forget. Each later commit's checkpoint counts as clean, so the commit is refused
unless:

    interval      The base is clean, and the interval starts after all intervals that were committed before the forget.
                  Or the attempt's shards left out the key's rows and entries: `Content.filtered` names the forget.
    rewind        The checkpoint to go back to is clean.
    restore       The savepoint or the other pipeline's checkpoint lists the key as removed (`Content.forget`).
    consolidate   The base is clean.

Checkpoints with an id below the forget's may hold the key. Ids and times are enough to decide, so no state is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from state_backend.checkpoint.log import Log
from state_backend.checkpoint.newest_state import newest_state, valid_states
from state_backend.values.errors import BaseMoved, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Content, Forget, Forgotten, ForgottenKey, Prepared, Record, Summary


@frozen
class Returning:
    """A forgotten key that an attempt could bring back."""

    id: int  # the record that removed the key
    key: ForgottenKey
    rows: bool  # True: the attempt's input rows may have the key
    base: bool  # True: the state of the attempt's base may have the key


def key_hash(salt: str, encoded_key: bytes) -> str:
    """Return the hash by which records name a forgotten key: SHA-256 of salt and encoded key, as hex digits."""
    return hashlib.sha256(bytes.fromhex(salt) + encoded_key).hexdigest()


def is_key(forgotten: ForgottenKey, encoded_key: bytes) -> bool:
    """Return True if `encoded_key` is the key that `forgotten` names by its hash."""
    return key_hash(forgotten.salt, encoded_key) == forgotten.key_hash


def returning_keys(log: Log, start_ms: int | None, base_id: int | None) -> tuple[Returning, ...]:
    """Return the forgotten keys that an attempt could bring back, from its input rows or from the state of its base.

    `start_ms`: The start of its interval; None: it reads no rows. `base_id`: None for empty state.
    """
    found = []
    for forgotten in log.summary.forgotten:
        rows = start_ms is not None and start_ms < forgotten.key.until_ms
        base = base_id is not None and base_id < forgotten.id
        if rows or base:
            found.append(Returning(id=forgotten.id, key=forgotten.key, rows=rows, base=base))
    return tuple(found)


def check_rerun(log: Log, pipeline: str, interval: Interval, base_id: int | None) -> None:
    """Raise `UsageError` if an interval could bring back a key that `cairn erase --on-rerun refuse` removed."""
    for key in returning_keys(log, interval.start_ms, base_id):
        if key.key.on_rerun == "refuse":
            raise UsageError(
                f"{pipeline} {interval}: {_why(key, base_id)}\nTo run the interval without the key, name the key once more: "
                f"cairn erase --pipeline {pipeline} --on-rerun filter JSON"
            )


def check_not_tried(log: Log, pipeline: str, interval: Interval, base_id: int | None) -> None:
    """Refuse a trial that could bring a forgotten key back into the trial's own root.

    A trial learns of a forgotten key from its base only, and only if the base was committed since the key's removal.
    """
    for key in returning_keys(log, interval.start_ms, base_id):
        if base_id is None or key.base:
            raise UsageError(
                f"{pipeline}: a trial from {format_instant(interval.start)}: {_why(key, base_id)}\n"
                "Begin the trial at the end of a checkpoint that was committed since the key was forgotten"
            )


def check_target(log: Log, target: int) -> None:
    """Refuse a rewind to, or a fork of, checkpoint `target` if the checkpoint may hold a forgotten key."""
    for forgotten in log.summary.forgotten:
        if target < forgotten.id:
            clean = [k.id for k in valid_states(log) if k.id >= forgotten.id]
            raise UsageError(
                f"checkpoint {target} may hold a key that `cairn erase` removed: checkpoint {forgotten.id} was the first without the "
                f"key\nTake one of {', '.join(map(str, clean)) or 'those to come'}. To get the state at an earlier time, run that "
                "interval again, if the key was forgotten with --on-rerun filter"
            )


def check_restored(log: Log, pipeline: str, content: Content) -> None:
    """Refuse a restore or a fork if its state may hold a key that this pipeline has forgotten."""
    for forgotten in _missing(log.summary.forgotten, content.forget):
        raise UsageError(
            f"{pipeline}: the state at {format_instant(content.interval.end)} that would be restored may hold a key that checkpoint "
            f"{forgotten.id} of {pipeline!r} forgot\n"
            "Restore a savepoint that was taken since. To use this one, restore it under another name, and run `cairn erase` there"
        )


def check_commit(log: Log, prepared: Prepared, who: str) -> None:
    """Check at commit that an attempt brings no forgotten key back.

    A key may have been forgotten while the attempt ran. An attempt of `cairn erase` itself may be committed only if no
    other checkpoint was committed since it began. Otherwise that checkpoint would still hold the key.
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


def is_free_of(log: Log, record: Record, encoded_key: bytes) -> bool:
    """Return True if a checkpoint certainly does not hold a key.

    The log shows this if both conditions hold:

    - The checkpoint's commit, or an earlier one, forgot the key.
    - The checkpoint's interval ends no later than the latest interval that was committed before the forget. Commits of
      such intervals after the forget leave the key out (see the module). Only later intervals, with new input, may have
      brought the key back.
    """
    return any(
        record.id >= forgotten.id and record.content.interval.end_ms <= forgotten.key.until_ms
        for forgotten in log.summary.forgotten
        if is_key(forgotten.key, encoded_key)
    )


def next_forgotten(before: Summary, new: Record) -> tuple[Forgotten, ...]:
    """Return all forgotten keys of the pipeline once the record `new` is created."""
    if new.content.kind not in ("forget", "restore") or new.content.forget is None:
        return before.forgotten
    known = {(f.key.salt, f.key.key_hash): f for f in before.forgotten}
    for key in new.content.forget.keys:
        old = known.get((key.salt, key.key_hash))
        if new.content.kind == "forget" or old is None or old.key.until_ms < key.until_ms:
            known[key.salt, key.key_hash] = Forgotten(id=new.id, key=key)
    return tuple(sorted(known.values(), key=lambda f: (f.id, f.key.key_hash)))


def forgets_of(record: Record) -> Forget | None:
    """Return the keys that a savepoint or fork of the checkpoint must list as forgotten; None if there are none."""
    keys = tuple(forgotten.key for forgotten in record.summary.forgotten)
    return Forget(keys=keys) if keys else None


def _missing(forgotten: Iterable[Forgotten], said: Forget | None) -> list[Forgotten]:
    """Return those of `forgotten` that `said` lacks. `said` may list a later removal of the same key."""
    until_ms = {(key.salt, key.key_hash): key.until_ms for key in (said.keys if said is not None else ())}
    return [f for f in forgotten if until_ms.get((f.key.salt, f.key.key_hash), f.key.until_ms - 1) < f.key.until_ms]


def _why(key: Returning, base_id: int | None) -> str:
    until = format_instant(from_ms(key.key.until_ms))
    if key.base:
        return f"`cairn erase` removed a key with checkpoint {key.id}, and checkpoint {base_id}, which is older, may still hold the key"
    return f"`cairn erase` removed a key with checkpoint {key.id}, and rows of before {until} may bring the key back"
