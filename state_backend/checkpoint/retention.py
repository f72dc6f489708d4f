"""Which checkpoints stay completed. Pure policies that compose: what any of them keeps is kept.

Age is logical: measured in interval ends against the latest one, so that a backfill of old days expires nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Protocol

from state_backend.checkpoint.lineage import stale_marks
from state_backend.checkpoint.log import Log
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, Retained


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint as policies see it. ``usable``: neither it nor an ancestor is quarantined."""

    id: int
    interval: Interval
    stale: bool
    usable: bool


class Policy(Protocol):
    """Decides over all completed checkpoints and the new one, ascending by id. Those that are not usable don't count."""

    def keep(self, candidates: Sequence[Candidate]) -> frozenset[int]:
        """The ids that this policy wants to keep."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The n highest ids. Unusable ones between them stay too without counting: a quarantine may be lifted."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"KeepLast needs n >= 1, got {self.n}")

    def keep(self, candidates: Sequence[Candidate]) -> frozenset[int]:
        """See `Policy.keep`."""
        counted = [c.id for c in candidates if c.usable][-self.n :]
        return frozenset(c.id for c in candidates if counted and c.id >= counted[0])


@dataclass(frozen=True, slots=True)
class KeepPerDay:
    """For each of the last ``days`` UTC days that have one, up to the day of the latest interval end: the checkpoint that
    ends last, one that is not stale before one that is. An interval that ends at midnight belongs to the day that ends."""

    days: int

    def __post_init__(self) -> None:
        if self.days < 1:
            raise UsageError(f"KeepPerDay needs days >= 1, got {self.days}")

    def keep(self, candidates: Sequence[Candidate]) -> frozenset[int]:
        """See `Policy.keep`."""
        by_day: dict[date, Candidate] = {}
        for c in candidates:
            if c.usable:
                day = _day(c)
                by_day[day] = max(by_day.get(day, c), c, key=lambda x: (not x.stale, x.interval.end, x.id))
        oldest = max(by_day, default=date.min)
        oldest -= min(timedelta(days=self.days - 1), oldest - date.min)
        return frozenset(c.id for day, c in by_day.items() if day >= oldest)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What any of the policies keeps."""

    policies: tuple[Policy, ...]

    def keep(self, candidates: Sequence[Candidate]) -> frozenset[int]:
        """See `Policy.keep`."""
        return frozenset[int]().union(*(p.keep(candidates) for p in self.policies))


DEFAULT_POLICY = AnyOf((KeepLast(10), KeepPerDay(35)))


def plan_retention(
    log: Log,
    content: Content,
    new_id: int,
    reproduces: int | None,
    policy: Policy,
    protected: frozenset[int] = frozenset(),
) -> tuple[Retained, ...]:
    """What stays completed once ``content`` is committed as ``new_id``, with the staleness that this commit causes.

    Never dropped, whatever the policy says: the new one, the usable one with the highest id, the usable one that is not
    stale and ends last (a re-run of an old day must not cost the state of today), and ``protected`` (such as the newest
    validated one).
    """
    marks = stale_marks(log, content, new_id, reproduces is not None)
    candidates = [
        Candidate(id=r.id, interval=r.content.interval, stale=marks[r.id] is not None, usable=r.id not in log.unusable)
        for r in log.completed()
    ]
    new_usable = content.base_id not in log.unusable
    candidates.append(
        Candidate(id=new_id, interval=content.interval, stale=marks[new_id] is not None, usable=new_usable)
    )
    usable = [c for c in candidates if c.usable]
    kept = policy.keep(candidates) | protected | {new_id}
    kept |= {c.id for c in usable[-1:]}
    fresh = [c for c in usable if not c.stale]
    if fresh:
        kept |= {max(fresh, key=lambda c: (c.interval.end, c.id)).id}
    return tuple(Retained(id=c.id, stale_by=marks[c.id]) for c in candidates if c.id in kept)


def _day(candidate: Candidate) -> date:
    return (candidate.interval.end - timedelta(milliseconds=1)).date()
