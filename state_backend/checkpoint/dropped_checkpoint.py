"""A checkpoint that retention drops while somebody reads it: its files are missing then, and that is no damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from state_backend.checkpoint.log import Log, interval_of, read_log
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, CheckpointDropped, CorruptFile, NotFound
from state_backend.values.intervals import format_instant
from state_backend.values.records import SweepRecord

_NAMED = 10


def explain_drop(log: Log, checkpoint_id: int) -> str | None:
    """One line that says that retention dropped the checkpoint, and what is there instead; None if the log does not say so."""
    entry = log.entry(checkpoint_id)
    if entry is None or isinstance(entry, SweepRecord) or checkpoint_id in log.retained:
        return None
    interval = interval_of(entry)
    state = f", the state at {format_instant(interval.end)}," if interval is not None else ""
    text = f"checkpoint {checkpoint_id}{state} is no longer retained: retention dropped it, and its files with it."
    usable = [c for c in log.completed() if log.quarantine_above(c.id) is None]
    if not usable:
        return f"{text} No checkpoint is usable now"
    newest = usable[-1]
    ids = ", ".join(str(c.id) for c in usable[-_NAMED:])
    return (
        f"{text} Usable are {ids}; the newest, {newest.id}, is the state at {format_instant(newest.content.interval.end)}. "
        "Read again from one of these"
    )


def check_retained(storage: Storage, checkpoint_id: int | None) -> None:
    """Raises: CheckpointDropped if retention dropped the checkpoint. None, 0: not a committed one, nothing is read then."""
    if checkpoint_id:
        explained = explain_drop(read_log(storage), checkpoint_id)
        if explained is not None:
            raise CheckpointDropped(explained)


@contextmanager
def telling_drops(storage: Storage, checkpoint_id: int | None) -> Iterator[None]:
    """Around what reads a checkpoint. Any other error is raised as it came, also if the log can't be read. ``storage``: of the
    pipeline's folder.

    Raises: CheckpointDropped instead of a CorruptFile or NotFound if the checkpoint was dropped since.
    """
    try:
        yield
    except (CorruptFile, NotFound) as error:
        try:
            check_retained(storage, checkpoint_id)
        except CheckpointDropped as dropped:
            raise dropped from error
        except CairnError as problem:
            error.add_note(f"whether the checkpoint is still retained can't be told: {problem}")
        raise
