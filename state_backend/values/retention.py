"""Which checkpoints stay: policies as values, which a checkpoint records. They compose, as unions and intersections.

There is none by bytes: checkpoints share files, and a head does not say which, so that the bytes which dropping one would free are
not known where this is decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Protocol, TypeAlias, get_args

from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval


class Ended(Protocol):
    """What a policy goes by of a checkpoint."""

    @property
    def id(self) -> int:
        """From 1, in the order of commits."""

    @property
    def interval(self) -> Interval:
        """The interval whose end its state is of."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The last ``count`` committed."""

    count: int

    def __post_init__(self) -> None:
        _check_number("KeepLast", self.count)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        """Ids of the last ones; ``checkpoints`` ascend by id."""
        return frozenset(c.id for c in checkpoints[-self.count :]) if self.count > 0 else frozenset()

    def intervals_back(self, every: timedelta) -> int:
        """The most intervals of length ``every`` between the newest checkpoint and a kept checkpoint."""
        return self.count

    def __str__(self) -> str:
        return f"the last {self.count} committed"


@dataclass(frozen=True, slots=True)
class KeepPerDay:
    """The one that ends each day, for ``days`` days before the newest interval's end: of the intervals that end in a day the one
    that ends last, at midnight if there is one, and of that the newest checkpoint. Days are in UTC, so that a backfill of an old month
    is thinned as the month itself was."""

    days: int

    def __post_init__(self) -> None:
        _check_number("KeepPerDay", self.days)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        """The id that is highest on each day, in UTC, counted back from the newest end."""
        newest = max((c.interval.end for c in checkpoints), default=None)
        by_day: dict[date, tuple[datetime, int]] = {}
        for c in checkpoints:
            end = c.interval.end
            if newest is not None and newest - end < timedelta(days=self.days):
                # An interval that ends at midnight is the last of the day that is over then.
                day = (end - timedelta(milliseconds=1)).date()
                by_day[day] = max(by_day.get(day, (end, c.id)), (end, c.id))
        return frozenset(checkpoint_id for _, checkpoint_id in by_day.values())

    def intervals_back(self, every: timedelta) -> int:
        """The most intervals of length ``every`` between the newest checkpoint and a kept checkpoint."""
        return math.ceil(timedelta(days=self.days) / every)

    def __str__(self) -> str:
        return f"the one that ends each day for {self.days} days"


@dataclass(frozen=True, slots=True)
class KeepYounger:
    """Those whose interval ended less than ``age`` before the newest interval's end."""

    age: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.age, timedelta) or not timedelta(0) <= self.age < timedelta(days=_MOST):
            raise UsageError(
                f"KeepYounger({self.age!r}): expected a timedelta from 0 to {_MOST} days, as in KeepYounger(timedelta(days=3))"
            )

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        """Ids of those whose state is less than the age behind the newest."""
        newest = max((c.interval.end for c in checkpoints), default=None)
        return frozenset(c.id for c in checkpoints if newest is not None and newest - c.interval.end < self.age)

    def intervals_back(self, every: timedelta) -> int:
        """The most intervals of length ``every`` between the newest checkpoint and a kept checkpoint."""
        return math.ceil(self.age / every)

    def __str__(self) -> str:
        days = self.age / timedelta(days=1)
        return f"every one of the last {f'{days:g} days' if days >= 1 else f'{self.age / timedelta(hours=1):g} hours'}"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What any of the policies keeps; nothing if there is none."""

    any_of: tuple[RetentionPolicy, ...]

    def __post_init__(self) -> None:
        _check_policies("AnyOf", self.any_of)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        """Ids that at least one of the policies keeps."""
        return frozenset().union(*(p.keep(checkpoints) for p in self.any_of))

    def intervals_back(self, every: timedelta) -> int:
        """The most intervals of length ``every`` between the newest checkpoint and a kept checkpoint."""
        return max((policy.intervals_back(every) for policy in self.any_of), default=0)

    def __str__(self) -> str:
        return " and ".join(map(str, self.any_of)) or "none"


@dataclass(frozen=True, slots=True)
class AllOf:
    """What all of the policies keep; everything if there is none."""

    all_of: tuple[RetentionPolicy, ...]

    def __post_init__(self) -> None:
        _check_policies("AllOf", self.all_of)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        """Ids that every one of the policies keeps."""
        return frozenset(c.id for c in checkpoints).intersection(*(p.keep(checkpoints) for p in self.all_of))

    def intervals_back(self, every: timedelta) -> int:
        """The most intervals of length ``every`` between the newest checkpoint and a kept checkpoint."""
        return max((policy.intervals_back(every) for policy in self.all_of), default=0)

    def __str__(self) -> str:
        return " that are also ".join(map(str, self.all_of)) or "all"


# In records no two have the same fields: these tell which policy it is.
RetentionPolicy: TypeAlias = KeepLast | KeepPerDay | KeepYounger | AnyOf | AllOf
_NAMES = " or ".join(policy.__name__ for policy in get_args(RetentionPolicy))
# More than a million days or checkpoints is a slip, and too many days are no timedelta.
_MOST = 1_000_000


# So many recent ones are kept at most: every record lists what is retained.
_MOST_RECENT = 300


def default_retention(interval_length: timedelta) -> RetentionPolicy:
    """For intervals of this length: every one of the last two days (no more than 300), the one that ends each day for 35 days, and
    ten in any case. So one past day of an hourly pipeline can be run again, since the state at its start is there."""
    recent = min(timedelta(days=2), _MOST_RECENT * interval_length)
    return AnyOf((KeepLast(10), KeepYounger(recent), KeepPerDay(35)))


def check_retention(retention: object, what: str) -> None:
    """Raises: UsageError if that is no policy that can be recorded."""
    if not isinstance(retention, RetentionPolicy):
        raise UsageError(f"{what}: expected {_NAMES}, since checkpoints record the policy; found {retention!r}")


def _check_number(what: str, number: object) -> None:
    if type(number) is not int or not 0 <= number <= _MOST:
        raise UsageError(f"{what}({number!r}): expected a whole number from 0 to {_MOST}")


def _check_policies(what: str, policies: object) -> None:
    if not isinstance(policies, tuple):
        raise UsageError(
            f"{what}({policies!r}): expected a tuple of policies, as in {what}((KeepLast(10), KeepPerDay(35)))"
        )
    for policy in policies:
        check_retention(policy, what)
