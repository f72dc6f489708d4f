"""What was read of a pipeline, as values that pages are made of."""

from __future__ import annotations

from dataclasses import dataclass

from state_backend.checkpoint.log import Log
from state_backend.inspection.status import Status
from state_backend.values.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A pipeline as it was read at ``read_s`` (of ``time.time``), in ``took_s``. ``validated``: the modes (fast, full) that each checkpoint
    passed, by id."""

    log: Log
    status: Status
    validated: dict[int, frozenset[str]]
    read_s: float
    took_s: float

    @property
    def newest(self) -> Record | None:
        """The completed checkpoint that reaches furthest, of several the last one; None without any."""
        done = self.log.completed()
        return max(done, key=lambda c: (c.content.interval.end, c.id)) if done else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a page got: a reading, perhaps an older one, and what is wrong, if something is."""

    reading: Reading | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The bytes and files of a pipeline's folder, as listed at ``counted_s``."""

    total: int
    files: int
    counted_s: float
