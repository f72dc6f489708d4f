"""Begin an attempt: read the end of the log, and choose the checkpoint to start from. Nothing is written."""

from __future__ import annotations

from state_backend.checkpoint.choose_base import choose_base
from state_backend.checkpoint.forgotten_keys import Returning, check_restored, returning_keys
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log, read_log, read_newest, read_on
from state_backend.checkpoint.output_schemas import spelling
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.values.errors import CorruptRecord, StateUnusable, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Content, Permissions, Record
from state_backend.values.schedule import Schedule

_READ_ROUNDS = 10


@frozen
class Begun:
    # The highest id in the log when the attempt began; 0 for an empty log.
    h0: int
    # Record of the checkpoint that the attempt starts from; None for empty state.
    base: Record | None
    # The log as it was when the attempt began; None for a restore, which makes no output.
    log: Log | None = None
    spelling: tuple[str, ...] = ()  # names of all columns that the input has had
    returning: tuple[Returning, ...] = ()  # forgotten keys that the attempt could bring back


def begin(
    at: Location,
    interval: Interval,
    *,
    permissions: Permissions,
    pipeline_start_ms: int,
    schedule: Schedule | None = None,
    log: Log | None = None,
) -> Begun:
    """Choose the checkpoint that an interval starts from. Return it with what the attempt needs of the log.

    `log`: The log as the caller has just read it; None: read it. It may be old: the commit chooses the base again.
    """
    log = read_newest(at.storage) if log is None else log
    for tried in range(_READ_ROUNDS):
        _check_start(at, log, pipeline_start_ms)
        try:
            chosen = choose_base(log, at.pipeline, interval, permissions, pipeline_start_ms, schedule=schedule)
            base = log.whole(chosen.id) if chosen is not None else None
            break
        except (StateUnusable, CorruptRecord):
            # A newer commit may have filled the gap (StateUnusable), or dropped the chosen base (CorruptRecord).
            further = read_on(at.storage, log)
            if further is log or tried == _READ_ROUNDS - 1:
                raise
            log = further
    return Begun(
        h0=log.head_id,
        base=base,
        log=log,
        spelling=spelling(log),
        returning=returning_keys(log, interval.start_ms, base.id if base is not None else None),
    )


def begin_restore(at: Location, content: Content, *, pipeline_start_ms: int) -> Begun:
    """Begin an attempt that restores `content` as the state at the end of its interval."""
    log = read_log(at.storage)
    _check_start(at, log, pipeline_start_ms)
    check_restored(log, at.pipeline, content)
    if pipeline_start_ms >= content.interval.end_ms:
        raise UsageError(
            f"pipeline {at.pipeline!r} starts with empty state at {format_instant(from_ms(pipeline_start_ms))}. "
            f"The state to restore is the state at {format_instant(content.interval.end)}, so no interval would start from it\n"
            "Set the pipeline's start to an earlier time"
        )
    for entry in log.completed()[-1:]:
        ours, theirs = parse_struct(entry.content.key_schema), parse_struct(content.key_schema)
        if names_and_types(ours) != names_and_types(theirs):
            raise UsageError(
                f"the state of pipeline {at.pipeline!r} has the key {ours}, but the state to restore has the key {theirs}\n"
                "Restore it into a pipeline of another name"
            )
    return Begun(h0=log.head_id, base=None)


def _check_start(at: Location, log: Log, pipeline_start_ms: int) -> None:
    newest = log.newest
    if newest is not None and newest.content.pipeline_start_ms != pipeline_start_ms:
        raise UsageError(
            f"pipeline {at.pipeline!r} began at {format_instant(from_ms(newest.content.pipeline_start_ms))}, but its start "
            f"is {format_instant(from_ms(pipeline_start_ms))} now. The start of a pipeline never changes\n"
            "Set it back, or give the pipeline another name to begin with empty state\n"
            "If you never changed it, another pipeline of this name writes below the same root: rename one of the two"
        )
