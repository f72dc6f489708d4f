"""Write and read `prepared.json`, and the file by which validation refuses an attempt.

If a process stops before it has written `prepared.json`, no record names the attempt's files. A sweep deletes them.
"""

from __future__ import annotations

from contextlib import suppress

from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import read_log
from state_backend.formats import paths, record_codec
from state_backend.values.errors import (
    AlreadyExists,
    CorruptRecord,
    NotFound,
    StateUnusable,
    StorageUnavailable,
    ValidationRefused,
)
from state_backend.values.hide_secrets import hide, hide_all
from state_backend.values.marks import Refused
from state_backend.values.records import Prepared


def create_prepared(at: Location, prepared: Prepared) -> Prepared:
    """Write `prepared.json`, which says that all shards of the attempt have acknowledged.

    A second call with equal content changes nothing.
    """
    # Decoded values are compared, not bytes, because gzip's bytes depend on the host's zlib.
    path, (data, recorded) = paths.prepared(prepared.content.attempt), record_codec.encode_and_decode(prepared)
    try:
        at.storage.create(path, data)
    except AlreadyExists:
        there = record_codec.decode(at.storage.read(path), path, Prepared)
        if there != recorded:
            raise StorageUnavailable(
                f"{path} exists with other content: two drivers use the same attempt\nClear the task, so that it begins a new attempt"
            ) from None
    return recorded


def load_prepared(at: Location, attempt: str) -> Prepared:
    path = paths.prepared(attempt)
    try:
        data = at.storage.read(path)
    except NotFound:
        raise never_prepared(at, attempt) from None
    prepared = record_codec.decode(data, path, Prepared)
    if prepared.content.attempt != attempt:
        raise CorruptRecord(f"{path} belongs to another attempt, {prepared.content.attempt}\nRun the interval again")
    return prepared


def never_prepared(at: Location, attempt: str) -> StateUnusable:
    path = paths.prepared(attempt)
    return StateUnusable(
        f"attempt {attempt} of {at.pipeline!r} did not finish: {path} does not exist\nRun the interval again"
    )


def uncommitted_attempts(at: Location) -> list[Prepared]:
    """Return the prepared attempts that are not committed: some still run, others were lost or refused.

    Other files in the folders of attempts are not read.
    """
    listed, log = list(at.storage.list(paths.ATTEMPTS)), read_log(at.storage)
    found = []
    for info in listed:
        attempt = paths.attempt_of(info.path)
        if attempt is not None and info.path == paths.prepared(attempt) and log.of_attempt(attempt) is None:
            with suppress(NotFound):  # another process deleted the file after the listing
                found.append(record_codec.decode(at.storage.read(info.path), info.path, Prepared))
    return found


def is_prepared(at: Location, attempt: str) -> bool:
    """Return True if `prepared.json` exists. A fence, a sweep or the drop of the checkpoint deletes the file."""
    return at.storage.stat(paths.prepared(attempt)) is not None


def refuse(at: Location, attempt: str, reason: str, findings: tuple[str, ...] = ()) -> None:
    """Make every commit of the attempt raise `ValidationRefused` from now on."""
    with suppress(AlreadyExists):
        mark = Refused(attempt=attempt, reason=hide(reason), findings=hide_all(findings))
        at.storage.create(paths.refused(attempt), record_codec.encode(mark))


def check_not_refused(at: Location, attempt: str) -> None:
    path = paths.refused(attempt)
    try:
        mark = record_codec.decode(at.storage.read(path), path, Refused)
    except NotFound:
        return
    raise ValidationRefused(
        f"attempt {attempt} of {at.pipeline!r} can't be committed: {mark.reason}: {'; '.join(mark.findings[:3])}\n"
        "Fix the cause, then run the interval again"
    )
