"""Write what a validation or a person decided about a checkpoint: quarantine, release, validated."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from state_backend.checkpoint.append_record import append
from state_backend.checkpoint.commit_attempt import COMMIT_ROUNDS
from state_backend.checkpoint.fresh_listing import note_names
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.quarantine_consequences import computed_without, hidden_by_release
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import AlreadyExists, PreconditionFailed, StorageUnavailable, UsageError
from state_backend.values.hide_secrets import hide, hide_all
from state_backend.values.marks import Quarantine, Released, Validated
from state_backend.values.records import RELEASE, SweepRecord, ValidationMode

logger = logging.getLogger("cairn")

_MARK_ROUNDS = 10


def quarantine_checkpoint(at: Location, checkpoint_id: int, reason: str, findings: tuple[str, ...] = ()) -> None:
    """Quarantine a checkpoint: no interval starts from the checkpoint or from its descendants."""
    mark = Quarantine(id=checkpoint_id, reason=hide(reason), findings=hide_all(findings))
    path = paths.quarantine(checkpoint_id)
    note_names(at.storage, paths.QUARANTINE, [path.removeprefix(paths.QUARANTINE)])
    try:
        at.storage.create(path, record_codec.encode(mark))
    except AlreadyExists:
        if not _rewrite_mark(at.storage, path, Released, mark):
            logger.info("checkpoint %d of pipeline %s is quarantined already", checkpoint_id, at.pipeline)


def release_checkpoint(at: Location, checkpoint_id: int) -> None:
    """End the quarantine of a checkpoint. The checkpoint and its descendants count again.

    An attempt that started while the checkpoint was quarantined ignores the checkpoint. The log must not have such
    an attempt's commit after the release. So the function takes three steps:

    1. The mark says that a release is under way. From now on, a commit that reads the mark is refused.
    2. The function adds a record without content to the log. The record takes the next id. A commit that wanted this
       id reads the log and the mark again.
    3. If the log has a usable later checkpoint that does not build on this checkpoint, the function restores the mark
       and raises `UsageError`. Otherwise the mark says that the checkpoint is released.

    If the process stops in between, the checkpoint stays quarantined and commits stay refused until the function is
    called again.
    """
    path, log = paths.quarantine(checkpoint_id), read_log(at.storage)
    found = log.quarantined.get(checkpoint_id)
    if found is None:
        raise _not_quarantined(at, checkpoint_id)
    if not found.releasing:
        _check_release(at, log, checkpoint_id)
    waiting, before = replace(found, releasing=True), replace(found, releasing=False)
    released = Released(id=found.id, reason=found.reason, findings=found.findings)
    if not _rewrite_mark(at.storage, path, found, waiting):
        raise _not_quarantined(at, checkpoint_id)
    _append_fence(at, f"{RELEASE}{checkpoint_id}")
    try:
        _check_release(at, read_log(at.storage), checkpoint_id)
    except UsageError:
        _rewrite_mark(at.storage, path, waiting, before)
        raise
    if not _rewrite_mark(at.storage, path, waiting, released):
        raise _not_quarantined(at, checkpoint_id)


def _append_fence(at: Location, name: str) -> None:
    """Add a record without content to the log. Each commit in progress must then read the log again."""
    for _ in range(COMMIT_ROUNDS):
        log = read_log(at.storage)
        retained = tuple(r for _, r in sorted(log.retained.items()))
        fence = SweepRecord(id=log.head_id + 1, retained=retained, sweep=name, abandoned=())
        with suppress(AlreadyExists):
            append(at.storage, log, fence)
            return
    raise StorageUnavailable(f"{at.pipeline}: other commits were faster {COMMIT_ROUNDS} times in a row; try again")


def drop_quarantined(at: Location, checkpoint_id: int) -> None:
    """Let the next commit drop a quarantined checkpoint. The checkpoint stays quarantined.

    The function rewrites the quarantine mark. Until a commit has dropped the checkpoint, a person can still release it.
    """
    found = read_log(at.storage).quarantined.get(checkpoint_id)
    path = paths.quarantine(checkpoint_id)
    if found is None or not _rewrite_mark(at.storage, path, found, replace(found, dropped=True)):
        raise _not_quarantined(at, checkpoint_id)


def _not_quarantined(at: Location, checkpoint_id: int) -> UsageError:
    return UsageError(
        f"checkpoint {checkpoint_id} of pipeline {at.pipeline!r} is not quarantined\n"
        "cairn checkpoints shows the state of each checkpoint"
    )


def check_release(at: Location, checkpoint_id: int) -> None:
    """Raise `UsageError` if `release_checkpoint` would refuse now. It finishes a release that was interrupted."""
    log = read_log(at.storage)
    if not log.quarantined[checkpoint_id].releasing:
        _check_release(at, log, checkpoint_id)


def _check_release(at: Location, log: Log, checkpoint_id: int) -> None:
    other = computed_without(log, checkpoint_id)
    if other is not None:
        raise UsageError(
            f"checkpoint {checkpoint_id} of pipeline {at.pipeline!r} can't be released: checkpoint {other} was computed without it\n"
            f"To make its state the newest instead, use `cairn restore` with checkpoint {checkpoint_id} and --allow-quarantined"
        )
    hidden = hidden_by_release(log, checkpoint_id)
    if hidden is not None:
        raise UsageError(
            f"checkpoint {checkpoint_id} of pipeline {at.pipeline!r} can't be released: its files are deleted, and it would replace "
            f"checkpoint {hidden} of the same interval\nTo replace checkpoint {hidden}, run the interval again"
        )


def _rewrite_mark(storage: Storage, path: str, old: Quarantine | type[Released], new: Quarantine | Released) -> bool:
    """Replace a quarantine mark if it equals `old` or is an instance of `old`. Return True if it was replaced."""
    for _ in range(_MARK_ROUNDS):
        info = storage.stat(path)  # taken before the read, so that a write in between makes `replace` fail
        found = record_codec.decode(storage.read(path), path, Quarantine, Released)
        if info is None or not (isinstance(found, old) if isinstance(old, type) else found == old):
            return False
        with suppress(PreconditionFailed):
            storage.replace(path, record_codec.encode(new), generation=info.generation)
            return True
    raise StorageUnavailable(f"{storage.url}: other processes rewrote {path} {_MARK_ROUNDS} times in a row")


def mark_validated(at: Location, checkpoint_id: int, mode: ValidationMode) -> None:
    """Record that a checkpoint passed validation: for each mode, retention keeps the newest state that passed."""
    with suppress(AlreadyExists):
        mark = Validated(id=checkpoint_id, mode=mode)
        at.storage.create(paths.validated(checkpoint_id, mode), record_codec.encode(mark))
