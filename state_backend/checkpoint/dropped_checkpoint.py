"""Tell readers of a checkpoint that its files are missing because retention dropped it, and not because of damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from state_backend.checkpoint.log import Log, interval_of, read_log, read_newest
from state_backend.checkpoint.newest_state import told, valid_states
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, CheckpointDropped, CorruptFile, NotFound
from state_backend.values.intervals import format_instant
from state_backend.values.records import SweepRecord


def explain_drop(log: Log, checkpoint_id: int) -> str | None:
    """Return a text that names the valid checkpoints if retention has dropped this checkpoint; None if it has not."""
    entry = log.entry(checkpoint_id)
    if entry is None or isinstance(entry, SweepRecord) or checkpoint_id in log.retained:
        return None
    interval = interval_of(entry)
    state = f", the state at {format_instant(interval.end)}," if interval is not None else ""
    text = f"checkpoint {checkpoint_id}{state} is no longer retained: retention dropped it and its files."
    return f"{text}\n{told(valid_states(log))}"


def check_retained(storage: Storage, checkpoint_id: int | None) -> None:
    # The newest record lists the retained checkpoints. The whole log is read only to explain a drop.
    if checkpoint_id and checkpoint_id not in read_newest(storage).retained:
        explain_errors = explain_drop(read_log(storage), checkpoint_id)
        if explain_errors is not None:
            raise CheckpointDropped(explain_errors)


@contextmanager
def telling_drops(storage: Storage, checkpoint_id: int | None) -> Iterator[None]:
    """Raise `CheckpointDropped` in place of a file error if retention dropped the checkpoint that the block reads.

    Other errors pass unchanged. If the log can't be read, the file error passes with a note.
    """
    try:
        yield
    except (CorruptFile, NotFound) as error:
        try:
            check_retained(storage, checkpoint_id)
        except CheckpointDropped as dropped:
            raise dropped from error
        except CairnError as problem:
            error.add_note(f"Cairn can't tell whether the checkpoint is still retained: {problem}")
        raise
