"""Errors, grouped by what the caller does next.

Every message says what happened, where, what was expected, what was found, and what to do. The groups are classes, so
that an Airflow operator can decide between retrying, failing for good and asking a person without parsing text.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The intervals that an error or a plan asks to run again.

    The command that runs them belongs to the scheduler: `airflow_commands` renders the command.

    Attributes:
        first: Start of the first interval.
        last: Start of the last interval, which is included.
        replace_overlapping: The intervals replace output of intervals with other boundaries, and need that permission.
    """

    first: datetime
    last: datetime
    replace_overlapping: bool = False

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            object.__setattr__(self, name, getattr(self, name).astimezone(UTC))
        if self.last < self.first:
            raise UsageError(f"nothing can be run again from {self.first.isoformat()} back to {self.last.isoformat()}")

    def as_json(self) -> dict[str, Any]:
        """Return the fields for a result file."""
        first, last = self.first.isoformat(), self.last.isoformat()
        return {"first": first, "last": last, "replace_overlapping": self.replace_overlapping}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Rerun:
        """Read the fields that `as_json` returned."""
        first, last = datetime.fromisoformat(fields["first"]), datetime.fromisoformat(fields["last"])
        return cls(first=first, last=last, replace_overlapping=fields["replace_overlapping"])


class CairnError(Exception):
    """Base of every error that this project raises on purpose. ``rerun``: the intervals to run again, which the message names and
    whoever schedules them can render as a command; None if that is not the way out."""

    def __init__(self, *args: object, rerun: Rerun | None = None) -> None:
        super().__init__(*args)
        self.rerun = rerun


# --- wait and retry: the same call may succeed later -------------------------------------------------------------------


class RetryableError(CairnError):
    """Nothing was changed, or the change is idempotent; call again."""


class StorageUnavailable(RetryableError):
    """The storage could not be reached, refused for load, or has no room now."""


class CheckpointDropped(RetryableError):
    """Retention dropped the checkpoint while it was read; the message names those that are there. Called again, ``latest`` is one
    of them."""


class SinkFailed(RetryableError):
    """The sink hook raised for some intervals. Their checkpoints are committed and stay so; publishing again runs the hook again.

    ids: the commits whose output is not with the sink; more than those that failed where a pipeline wants its order kept."""

    def __init__(self, message: str, ids: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.ids = ids


class UnknownOutcome(RetryableError):
    """A write may or may not have taken effect. Whoever catches this deletes nothing."""


# --- begin again: the attempt is lost, a new one may succeed -------------------------------------------------------------


class AttemptLost(CairnError):
    """This attempt can't be committed any more; the interval may be processed again by a new attempt."""


class Fenced(AttemptLost):
    """Another attempt committed this interval, or one that overlaps it, first."""


class BaseMoved(AttemptLost):
    """The checkpoint that this attempt started from is no longer the base of its interval."""


class Swept(AttemptLost):
    """A sweep abandoned this attempt after it began; its files may be gone."""


# --- restore older: the state that was asked for can't be used -----------------------------------------------------------


class StateUnusable(CairnError):
    """State is missing or damaged; the message names what can be restored instead."""


class CorruptFile(StateUnusable):
    """A durable file is missing, truncated, or not what its handle says."""


class DamagedCopy(CorruptFile):
    """A file that this host had a copy of could not be read. The copy is dropped; the same call fetches the file again."""


class CorruptRecord(CorruptFile):
    """A record, manifest or other metadata file can't be decoded."""


class StateGapError(StateUnusable):
    """No checkpoint ends where the interval starts; the message names the command that fills the gap."""


class NoSuchCheckpoint(StateGapError):
    """No completed checkpoint is the one that was asked for; the message names those that there are."""


class StaleStateError(StateUnusable):
    """The base was made stale by a later re-run; the message names the intervals to run again."""


class NotAsTried(StateUnusable):
    """An interval did not come to what the trial came to that is deployed. It is not committed; the message says why."""


class ValidationRefused(StateUnusable):
    """A checkpoint was restored and found wrong; it is quarantined."""


# --- fix the call: the pipeline, its options or its data must change -------------------------------------------------------


class UsageError(CairnError):
    """The call, the pipeline or the configuration is wrong; calling again unchanged can't help."""


class UnsupportedFormat(UsageError):
    """Another release of Cairn wrote a file in a format that this release does not read. The file is no damage: it stays as it is."""


class PermissionRefused(UsageError):
    """The storage refuses permission; the message names who has to grant what. It doesn't pass by itself."""


class BehindLink(PermissionRefused):
    """A path leads through a symbolic link below the root. What lies behind the link is outside the root, and is not changed."""


class StateSchemaError(UsageError):
    """A state descriptor does not fit the recorded one."""


class StateTypeError(UsageError, TypeError):
    """A value does not fit its state's schema; names state, field, expected and found type."""


class KeyTypeError(UsageError):
    """A key column's type has no single canonical encoding."""


# --- fix the pipeline's code or wait for the input: the same call may succeed if it depends on the outside -------------------


class UserCodeError(CairnError):
    """The pipeline's own code failed on the data of an interval. Nothing was committed."""


class SourceError(UserCodeError):
    """The input of an interval is missing, unreadable, or lacks a column."""


class ProcessorError(UserCodeError):
    """User code raised; the original exception is the cause. Names key and interval."""


# --- a bug -------------------------------------------------------------------------------------------------------------------


class InvariantViolated(CairnError):
    """Something that can't happen did; please report it with the message."""


# --- answers of the storage port, meant for its callers inside this package -----------------------------------------------------


class StorageError(CairnError):
    """An answer of the storage that its caller must decide about."""


class NotFound(StorageError):
    """No file has that path."""


class AlreadyExists(StorageError):
    """Create-if-absent found a file at that path."""


class PreconditionFailed(StorageError):
    """A generation-matched write or delete found another generation."""
