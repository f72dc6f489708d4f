"""Which checkpoints stay. Policies are pure and compose, as unions and intersections.

There is none by bytes: checkpoints share files, and a head does not say which, so that the bytes which dropping one would free are
not known where this is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from state_backend.checkpoint.log import Log
from state_backend.values.records import Record, Retained


class RetentionPolicy(Protocol):
    """Chooses among the checkpoints that count: completed and not quarantined, by id."""

    def keep(self, checkpoints: Sequence[Record]) -> frozenset[int]:
        """The ids to keep."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The last ``count`` committed."""

    count: int

    def keep(self, checkpoints: Sequence[Record]) -> frozenset[int]:
        return frozenset(c.id for c in checkpoints[-self.count :]) if self.count > 0 else frozenset()


@dataclass(frozen=True, slots=True)
class KeepPerDay:
    """The last one of each day for ``days`` days before the newest interval's end. Days are of interval ends, in UTC, so
    that a backfill of an old month is thinned as the month itself was."""

    days: int

    def keep(self, checkpoints: Sequence[Record]) -> frozenset[int]:
        newest = max((c.content.interval.end for c in checkpoints), default=None)
        by_day = {}
        for c in checkpoints:
            end = c.content.interval.end
            if newest is not None and newest - end < timedelta(days=self.days):
                by_day[end.date()] = c.id
        return frozenset(by_day.values())


@dataclass(frozen=True, slots=True)
class KeepYounger:
    """Those whose interval ended less than ``age`` before the newest interval's end."""

    age: timedelta

    def keep(self, checkpoints: Sequence[Record]) -> frozenset[int]:
        newest = max((c.content.interval.end for c in checkpoints), default=None)
        return frozenset(c.id for c in checkpoints if newest is not None and newest - c.content.interval.end < self.age)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What any of the policies keeps; nothing if there is none."""

    policies: tuple[RetentionPolicy, ...]

    def keep(self, checkpoints: Sequence[Record]) -> frozenset[int]:
        return frozenset().union(*(p.keep(checkpoints) for p in self.policies))


@dataclass(frozen=True, slots=True)
class AllOf:
    """What all of the policies keep; everything if there is none."""

    policies: tuple[RetentionPolicy, ...]

    def keep(self, checkpoints: Sequence[Record]) -> frozenset[int]:
        return frozenset(c.id for c in checkpoints).intersection(*(p.keep(checkpoints) for p in self.policies))


DEFAULT_POLICY: RetentionPolicy = AnyOf((KeepLast(10), KeepPerDay(35)))


def plan_retention(
    log: Log, new: Record, marks: Mapping[int, int], policy: RetentionPolicy, protected: frozenset[int] = frozenset()
) -> tuple[Retained, ...]:
    """What is completed once ``new`` is committed, with stale marks.

    Never dropped: ``new``, which is the newest usable one since its base was checked, the one that reaches furthest in time
    (a re-run of an old day must not cost today's state), and ``protected``. Quarantined ones
    and their descendants neither count nor stay, unless they are protected. Nor does what a usable consolidation took the place
    of, from the commit after that one on: until then an interval that started from it may be under way.
    """
    before = log.completed()
    usable = [c for c in [*before, new] if c is new or log.quarantine_above(c.id) is None]
    replaced = {c.content.base_id for c in usable if c.content.kind == "consolidate" and c is not new}
    usable = [c for c in usable if c.id not in replaced]
    latest = max(usable, key=lambda c: (c.content.interval.end, c.id))
    keep = {new.id, latest.id, *(policy.keep(usable)), *(protected & {c.id for c in before})}
    inherited = log.retained
    return tuple(
        Retained(id=i, stale_by=inherited[i].stale_by if i in inherited and inherited[i].stale_by else marks.get(i))
        for i in sorted(keep)
    )
