"""Values that the reader of logs hands to pages."""

from __future__ import annotations

from dataclasses import dataclass

from state_backend.checkpoint.log import Log
from state_backend.inspection.status import Status
from state_backend.values.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A pipeline as it was read.

    Attributes:
        log: The pipeline's log.
        status: The state of the next interval, and problems.
        validated: Modes (fast, full) of the validations that a checkpoint passed, by its id.
        read_s: Time of the read, in seconds since the epoch.
        took_s: Duration of the read in seconds.
    """

    log: Log
    status: Status
    validated: dict[int, frozenset[str]]
    read_s: float
    took_s: float

    @property
    def newest(self) -> Record | None:
        """The retained checkpoint whose interval ends last; of several, the newest. None without checkpoints."""
        done = self.log.completed()
        return max(done, key=lambda c: (c.content.interval.end, c.id)) if done else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The answer to a page about one pipeline.

    Attributes:
        reading: The newest reading, which may be an old one; None if the pipeline was never read.
        problem: Why the pipeline could not be read now; None if it could.
    """

    reading: Reading | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The size of a pipeline's folder.

    Attributes:
        total: Bytes of all files.
        files: Number of files.
        counted_s: Time of the count, in seconds since the epoch.
    """

    total: int
    files: int
    counted_s: float
