"""Retention policies: rules by which a commit chooses the checkpoints to retain. Each record stores its policy.

Policies combine as unions and intersections. No policy limits the bytes of all checkpoints: checkpoints share files,
and the newest record does not list each checkpoint's files. So when a commit applies the policy, it does not know how
many bytes the storage would free by dropping a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import Literal, Protocol, TypeAlias, get_args

from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval


class Ended(Protocol):
    """The fields of a checkpoint that a policy uses."""

    @property
    def id(self) -> int:
        """The checkpoint's id, counted from 1 in the order of commits."""

    @property
    def interval(self) -> Interval:
        """The interval of the checkpoint. The checkpoint holds the state at the interval's end."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The policy that keeps the `count` checkpoints that were committed last.

    Attributes:
        count: Number of checkpoints that stay, counted back from the newest commit.
    """

    count: int
    policy: Literal["KeepLast"] = field(default="KeepLast", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check_number("KeepLast", self.count)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        return frozenset(c.id for c in checkpoints[-self.count :]) if self.count > 0 else frozenset()

    def __str__(self) -> str:
        return f"the last {self.count} checkpoints"


@dataclass(frozen=True, slots=True)
class KeepPerDay:
    """The policy that keeps the last checkpoint of each day, for `days` days before the newest interval's end.

    The last checkpoint of a day is the newest checkpoint of the interval that ends last in the day. An interval that
    ends at midnight belongs to the day that ends then. Days are in UTC and count from the newest interval's end, so a
    backfill of an old month keeps the same checkpoints as the original runs.

    Attributes:
        days: Number of days, counted back from the newest interval's end. The last checkpoint of each UTC day stays.
    """

    days: int
    policy: Literal["KeepPerDay"] = field(default="KeepPerDay", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check_number("KeepPerDay", self.days)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        newest = max((c.interval.end for c in checkpoints), default=None)
        by_day: dict[date, tuple[datetime, int]] = {}
        for c in checkpoints:
            end = c.interval.end
            if newest is not None and newest - end < timedelta(days=self.days):
                # An interval that ends at midnight belongs to the day that ends at that midnight.
                day = (end - timedelta(milliseconds=1)).date()
                by_day[day] = max(by_day.get(day, (end, c.id)), (end, c.id))
        return frozenset(checkpoint_id for _, checkpoint_id in by_day.values())

    def __str__(self) -> str:
        return f"the last one of each day for {self.days} days"


@dataclass(frozen=True, slots=True)
class KeepYounger:
    """The policy that keeps checkpoints whose interval ended less than `age` before the newest interval's end.

    Attributes:
        age: A timedelta. A checkpoint stays if its interval ended less than this before the newest interval's end.
    """

    age: timedelta
    policy: Literal["KeepYounger"] = field(default="KeepYounger", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.age, timedelta) or not timedelta(0) <= self.age < timedelta(days=_MOST):
            raise UsageError(
                f"KeepYounger({self.age!r}): expected a timedelta from 0 to {_MOST} days, as in KeepYounger(timedelta(days=3))"
            )

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        newest = max((c.interval.end for c in checkpoints), default=None)
        return frozenset(c.id for c in checkpoints if newest is not None and newest - c.interval.end < self.age)

    def __str__(self) -> str:
        days = self.age / timedelta(days=1)
        return f"all of the last {f'{days:g} days' if days >= 1 else f'{self.age / timedelta(hours=1):g} hours'}"


@dataclass(frozen=True, slots=True)
class KeepQuarantined:
    """The policy that keeps each quarantined checkpoint and its base for some days after the quarantine began.

    The other policies ignore quarantined checkpoints.

    Attributes:
        quarantined_days: Days for which a quarantined checkpoint and its base keep their files. Without this policy:
            14. 0: the next commit drops them. Put it into `AnyOf`, beside policies for usable checkpoints.
    """

    quarantined_days: int
    policy: Literal["KeepQuarantined"] = field(default="KeepQuarantined", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check_number("KeepQuarantined", self.quarantined_days)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        """Return no id: `checkpoints` are usable ones. A commit reads the number of days with `quarantined_days`."""
        return frozenset()

    def __str__(self) -> str:
        return f"quarantined ones for {self.quarantined_days} days"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The policy that keeps each checkpoint that at least one of its policies keeps.

    Attributes:
        any_of: Several policies. A checkpoint stays if at least one of them keeps it.
    """

    any_of: tuple[RetentionPolicy, ...]
    policy: Literal["AnyOf"] = field(default="AnyOf", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check_policies("AnyOf", self.any_of)

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        return frozenset().union(*(p.keep(checkpoints) for p in self.any_of))

    def __str__(self) -> str:
        return " and ".join(map(str, self.any_of)) or "none"


@dataclass(frozen=True, slots=True)
class AllOf:
    """The policy that keeps each checkpoint that all of its policies keep.

    Attributes:
        all_of: Several policies. A checkpoint stays if all of them keep it.
    """

    all_of: tuple[RetentionPolicy, ...]
    policy: Literal["AllOf"] = field(default="AllOf", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check_policies("AllOf", self.all_of)
        if any(isinstance(policy, KeepQuarantined) for policy in self.all_of):
            raise UsageError("KeepQuarantined is not about usable checkpoints, so it belongs in AnyOf, not in AllOf")

    def keep(self, checkpoints: Sequence[Ended]) -> frozenset[int]:
        return frozenset(c.id for c in checkpoints).intersection(*(p.keep(checkpoints) for p in self.all_of))

    def __str__(self) -> str:
        return " that are also ".join(map(str, self.all_of)) or "all"


# A record stores the fields of a policy. By `policy` the decoder finds the class. Older records lack `policy`: their
# decoder takes the first class here that has the record's other fields.
RetentionPolicy: TypeAlias = KeepLast | KeepPerDay | KeepYounger | KeepQuarantined | AnyOf | AllOf
_NAMES = " or ".join(policy.__name__ for policy in get_args(RetentionPolicy))
# The largest number of days or checkpoints that a policy accepts. A larger number is probably a typing error, and a
# timedelta holds at most 999,999,999 days.
_MOST = 1_000_000


# The default policy keeps at most this many recent intervals, because every record lists all retained checkpoints.
_MOST_RECENT = 300


def default_retention(interval_length: timedelta) -> RetentionPolicy:
    """Return the default policy for intervals of the given length.

    The policy keeps the last checkpoint of each day for 35 days, every checkpoint of the last two days (or of the last
    300 intervals, if that is less), and the last 10 checkpoints in any case. A user can therefore run any one of the
    last 35 days of an hourly pipeline again, because the state at the start of each day is kept.
    """
    recent = min(timedelta(days=2), _MOST_RECENT * interval_length)
    return AnyOf((KeepLast(10), KeepYounger(recent), KeepPerDay(35)))


# A person who returns from two weeks of holidays still finds the files of a refused checkpoint.
_QUARANTINED_DAYS = 14


def quarantined_days(policy: RetentionPolicy) -> int:
    """Return how many days a policy keeps quarantined checkpoints: as its longest `KeepQuarantined` says, else 14."""
    found = _all_quarantined_days(policy)
    return max(found, default=_QUARANTINED_DAYS)


def _all_quarantined_days(policy: RetentionPolicy) -> list[int]:
    if isinstance(policy, KeepQuarantined):
        return [policy.quarantined_days]
    inner = policy.any_of if isinstance(policy, AnyOf) else policy.all_of if isinstance(policy, AllOf) else ()
    return [days for one in inner for days in _all_quarantined_days(one)]


def check_retention(retention: object, what: str) -> None:
    """Raise `UsageError` if `retention` is no policy that a record can store. `what` names the value in the message."""
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
