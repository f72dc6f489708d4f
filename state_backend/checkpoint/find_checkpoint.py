"""Read the record of the checkpoint that a person or a program names."""

from __future__ import annotations

import logging
from datetime import datetime

from state_backend.checkpoint.clean_up_dropped import leased_checkpoints
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log, read_log, read_newest, read_on
from state_backend.checkpoint.newest_state import checkpoint_named, no_checkpoint, overtaken
from state_backend.values.day_or_instant import parse_checkpoint
from state_backend.values.errors import CorruptRecord
from state_backend.values.records import Record

logger = logging.getLogger("cairn")


def find_checkpoint(at: Location, which: str | int | datetime) -> tuple[Log, Record]:
    """Return the log and a checkpoint's record. `which`: "latest", or an id or the end of an interval, also as text.

    This reads the newest record and the checkpoint's record, but no record of another checkpoint.
    """
    log = read_newest(at.storage)
    try:
        return _find(at, log, which)
    except CorruptRecord:  # A commit may have dropped the checkpoint since the newest record was read.
        return _find(at, read_log(at.storage, log), which)


def record_of(at: Location, which: str | int | datetime) -> Record:
    """Return the record of a checkpoint, named as in `find_checkpoint`. The other retained records are checked too."""
    return _find(at, read_log(at.storage), which)[1]


def id_of(at: Location, which: str) -> int:
    """Return the id of the checkpoint that a person names. A text that is an id is not looked up."""
    found = parse_checkpoint(which)
    return found if isinstance(found, int) else record_of(at, found).id


def _find(at: Location, log: Log, which: str | int | datetime) -> tuple[Log, Record]:
    if isinstance(which, str):
        which = parse_checkpoint(which)
    named = checkpoint_named(log, which) or checkpoint_named(log := read_on(at.storage, log), which)
    if named is not None:
        record = log.whole(named)
        if which == "latest" and (later := overtaken(log, record)) is not None:
            logger.warning("%s: %s", at.pipeline, later)
        return log, record
    if isinstance(which, int) and which in log.summary.dropping:
        leased = leased_checkpoints(at.storage, log)[0]
        if which in leased:
            return log, leased[which]
    raise no_checkpoint(log, at.pipeline, which)
