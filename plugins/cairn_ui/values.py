"""Values that `read_logs.Reader` returns to pages: the log of a pipeline, and when and how it was read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from state_backend.checkpoint.log import Log
from state_backend.inspection.status import Status
from state_backend.values.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The content of a pipeline's folder at one time.

    Attributes:
        log: The pipeline's log.
        status: Whether the next interval can start, and the pipeline's problems.
        validated: Modes ("fast", "full") of the validations that a checkpoint passed, by checkpoint id.
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
        """The retained checkpoint whose interval ends last; None without checkpoints.

        If the intervals of several checkpoints end at this time, the checkpoint with the highest id counts.
        """
        done = self.log.completed()
        return max(done, key=lambda c: (c.content.interval.end, c.id)) if done else None

    @property
    def newest_end(self) -> datetime | None:
        """The end of the last interval with a retained checkpoint; None without checkpoints."""
        newest = self.newest
        return None if newest is None else newest.content.interval.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The result of a read of one pipeline for a page.

    Attributes:
        reading: The newest successful reading; None if the pipeline was never read.
        problem: Why the pipeline could not be read now, so `reading` is an older one; None if the read succeeded.
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
