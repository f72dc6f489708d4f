"""Values that `read_logs.Reader` returns to pages: the log of a pipeline, and when and how it was read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from state_backend.checkpoint.log import Log
from state_backend.inspection.status import Status
from state_backend.values.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The content of a pipeline's folder at one time."""

    log: Log
    status: Status
    validated: dict[int, frozenset[str]]
    # Time of the read, in seconds since the epoch.
    read_s: float
    # Duration of the read in seconds.
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
    """The result of a read of one pipeline for a page."""

    # The newest successful reading; None if the pipeline was never read.
    reading: Reading | None
    # Why the pipeline could not be read now, so `reading` is an older one; None if the read succeeded.
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The size of a pipeline's folder."""

    total: int
    files: int
    # Time of the count, in seconds since the epoch.
    counted_s: float
