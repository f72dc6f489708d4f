"""Errors, grouped by what the caller does next.

Every message says what happened, where, what was expected, what was found, and what to do. Each group is a class. An
Airflow operator can therefore choose between a retry, a final failure and a question to a person without parsing the
message.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The intervals that an error or a plan asks to run again.

    A `Rerun` holds no command, because the command depends on the scheduler: `airflow_commands` formats the command for
    Airflow.

    Attributes:
        first: Start of the first interval.
        last: Start of the last interval, which is included.
        replace_overlapping: True if the intervals replace output of intervals with other boundaries, and so need that
            permission.
    """

    first: datetime
    last: datetime
    replace_overlapping: bool = False

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            object.__setattr__(self, name, getattr(self, name).astimezone(UTC))
        if self.last < self.first:
            raise UsageError(
                f"the first interval to run, {self.first.isoformat()}, is later than the last, {self.last.isoformat()}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the fields as they stand in a result file."""
        first, last = self.first.isoformat(), self.last.isoformat()
        return {"first": first, "last": last, "replace_overlapping": self.replace_overlapping}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Rerun:
        """Build a `Rerun` from the fields that `as_json` returned."""
        first, last = datetime.fromisoformat(fields["first"]), datetime.fromisoformat(fields["last"])
        return cls(first=first, last=last, replace_overlapping=fields["replace_overlapping"])


class CairnError(Exception):
    """Base class of every error that this project raises on purpose.

    Attributes:
        rerun: The intervals to run again, which the message names too. The operators and the command line add the
            command for these intervals to the message. None if running intervals again does not help.
    """

    def __init__(self, *args: object, rerun: Rerun | None = None) -> None:
        super().__init__(*args)
        self.rerun = rerun


# --- Wait and retry: the same call may succeed later. -----------------------------------------------------------------


class RetryableError(CairnError):
    """A failure after which the caller may repeat the call: nothing was changed, or the change is idempotent."""


class StorageUnavailable(RetryableError):
    """The storage can't be reached, rejects the request because of its load, or is full."""


class CheckpointDropped(RetryableError):
    """Retention dropped the checkpoint, or a commit replaced the output, during the read.

    The message says what to do. After a dropped checkpoint it names the usable checkpoints; a repeated call that asks
    for `latest` reads one of these.
    """


class SinkFailed(RetryableError):
    """The sink hook raised for some intervals.

    Their checkpoints stay committed. The next call that publishes runs the hook again.

    Attributes:
        ids: The commits whose output is missing from the sink. If the pipeline publishes in order, these include the
            commits behind the failed one, which were not tried.
    """

    def __init__(self, message: str, ids: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.ids = ids


class UnknownOutcome(RetryableError):
    """A write may or may not have taken effect. Code that catches this error must delete nothing."""


# --- Begin again: the attempt is lost, but a new attempt may succeed. -------------------------------------------------


class AttemptLost(CairnError):
    """This attempt can no longer be committed. A new attempt may process the interval again."""


class Fenced(AttemptLost):
    """Another attempt was the first to commit this interval or an interval that overlaps it."""


class BaseMoved(AttemptLost):
    """The checkpoint that this attempt started from is no longer the base of its interval."""


class Swept(AttemptLost):
    """A sweep abandoned this attempt after the attempt began. The sweep may have deleted the attempt's files."""


# --- Restore an older checkpoint: the requested state can't be used. --------------------------------------------------


class StateUnusable(CairnError):
    """State is missing, damaged, or must not be used. The message names the checkpoint to restore or the next step."""


class CorruptFile(StateUnusable):
    """A durable file is missing or truncated, or its checksum or content is wrong."""


class DamagedCopy(CorruptFile):
    """The host's cached copy of a file can't be read.

    The cache has dropped the copy. A repeated call downloads the file again.
    """


class CorruptRecord(CorruptFile):
    """A record, manifest or other metadata file can't be decoded."""


class StateGapError(StateUnusable):
    """No checkpoint ends where the interval starts. The message names the command that fills the gap."""


class NoSuchCheckpoint(StateGapError):
    """No retained checkpoint matches the request. The message names the retained checkpoints."""


class StaleStateError(StateUnusable):
    """A later re-run made the base stale. The message names the intervals to run again."""


class NotAsTried(StateUnusable):
    """The deployment of a trial computed another result for an interval than the trial did.

    The interval is not committed. The message names the difference.
    """


class ValidationRefused(StateUnusable):
    """Validation found an error in a checkpoint or in a prepared attempt.

    The checkpoint is now quarantined, or the attempt can no longer be committed.
    """


# --- Fix the call: the pipeline, its options or its data must change. -------------------------------------------------


class UsageError(CairnError):
    """The call, the pipeline or the configuration is wrong. The same call will fail again."""


class UnsupportedFormat(UsageError):
    """Another release of Cairn wrote a file in a format that this release does not read.

    The file is not damaged. Leave the file unchanged and use another release of Cairn.
    """


class PermissionRefused(UsageError):
    """The storage denies access. The message names the missing right. A retry does not help."""


class BehindLink(PermissionRefused):
    """A path leads through a symbolic link below the root.

    The target of the link lies outside the root, so Cairn changes nothing there.
    """


class StateSchemaError(UsageError):
    """A state's declaration can't be stored or conflicts with the recorded schema of the state."""


class StateTypeError(UsageError, TypeError):
    """A value does not fit its state's schema. The message names the state, the field and both types."""


class KeyTypeError(UsageError):
    """A key column's type has no single canonical encoding."""


# --- Fix the pipeline's code, or wait for its input and call again. ---------------------------------------------------


class UserCodeError(CairnError):
    """The pipeline's own code failed on the data of an interval. Nothing was committed."""


class SourceError(UserCodeError):
    """The input of an interval is missing, unreadable, or lacks a column."""


class ProcessorError(UserCodeError):
    """The processor raised an exception or yielded a wrong result.

    If the processor raised, the message names the call, the key and the interval, and carries the traceback of the
    user's code.
    """


# --- Report a bug of Cairn. -------------------------------------------------------------------------------------------


class InvariantViolated(CairnError):
    """An internal invariant of Cairn is broken. Please report the message as a bug."""


# --- Results of the storage port, for its callers inside this package. ------------------------------------------------


class StorageError(CairnError):
    """A result of a storage call that the calling code must handle."""


class NotFound(StorageError):
    """No file has that path."""


class AlreadyExists(StorageError):
    """Create-if-absent failed because a file already has that path."""


class PreconditionFailed(StorageError):
    """A write or delete that named a generation failed because the file has another generation."""
