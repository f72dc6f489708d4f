"""Which intervals of a range are computed, and which stay as they are. Pure functions over what the log has of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Literal, get_args

from state_backend.checkpoint.interval_results import Result
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import RunRef

Reprocess = Literal["changed", "none", "all"]
REPROCESS: tuple[str, ...] = get_args(Reprocess)

_RECENT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The interval stays as checkpoint ``checkpoint`` left it. ``ours``: an earlier try of the same run committed that."""

    checkpoint: int
    why: str
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The interval is computed and committed."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSource:
    """Whether it is computed depends on what it would be made of now: the source has to say its position."""


def keep_or_compute(there: Result | None, reprocess: Reprocess, run: RunRef) -> Keep | Compute | AskSource:
    """What to do with an interval, as far as the log tells.

    "none": what is there and counts stays. "changed": it stays if code and input are what they were. "all": it is computed again, but
    for what this very run has committed before, in a try that failed later on.
    """
    if there is None:
        return Compute(why="there is no result yet")
    if there.spoilt is not None:
        return Compute(why=f"checkpoint {there.id} does not count: {there.spoilt}")
    if (there.run.run_id, there.run.clear_number) == (run.run_id, run.clear_number):
        return Keep(checkpoint=there.id, why="an earlier try of this run has committed it", ours=True)
    if reprocess == "all":
        return Compute(why=f"checkpoint {there.id} is computed again, as asked for")
    if reprocess == "none":
        return Keep(checkpoint=there.id, why="there is a result, and only what is missing is asked for")
    return AskSource()


def plan_by_input(there: Result, input_hash: str | None) -> Keep | Compute:
    """What to do with an interval that has a result that counts. ``input_hash``: what a new one would be made of."""
    if there.input_hash is None or input_hash is None:
        untold = "the source records no position" if input_hash is None else "the source recorded none then"
        return Compute(why=f"whether checkpoint {there.id} had the same code and input can't be told: {untold}")
    if there.input_hash != input_hash:
        return Compute(why=f"checkpoint {there.id} was made by other code, with other settings or from other input")
    return Keep(checkpoint=there.id, why="the same code made it from the same input")


def intervals_between(first: datetime, end: datetime, length: timedelta) -> tuple[Interval, ...]:
    """The intervals of one length from ``first`` up to ``end``, which is where the last one ends.

    Raises: UsageError if none fits, or the last one would end later.
    """
    if length <= timedelta(0) or end <= first:
        raise UsageError(
            f"there is no interval from {format_instant(first)} to {format_instant(end)}; the end lies behind the start"
        )
    count, rest = divmod(end - first, length)
    if rest:
        raise UsageError(
            f"from {format_instant(first)} to {format_instant(end)} there is no whole number of intervals of {length}; the last one would end "
            f"at {format_instant(first + (count + 1) * length)}"
        )
    return tuple(Interval(first + n * length, first + (n + 1) * length) for n in range(count))


def check_in_order(intervals: Sequence[Interval]) -> None:
    """Raises: UsageError unless each interval starts where the one before ends."""
    for before, after in pairwise(intervals):
        if before.end != after.start:
            raise UsageError(
                f"{after} does not start where {before} ends; a range is run in the order of time, without gaps"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a range is: ``done`` of ``total`` intervals, ``kept`` of them as they were. ``recent_s``: how long each of the last ones
    that were computed took."""

    done: int
    total: int
    kept: int
    recent_s: tuple[float, ...]

    def computed(self, seconds: float) -> Progress:
        """After one more that was computed."""
        recent = (*self.recent_s, seconds)[-_RECENT:]
        return Progress(done=self.done + 1, total=self.total, kept=self.kept, recent_s=recent)

    def left_alone(self) -> Progress:
        """After one more that stays as it is."""
        return Progress(done=self.done + 1, total=self.total, kept=self.kept + 1, recent_s=self.recent_s)

    @property
    def seconds_each(self) -> float | None:
        """Of the last intervals that were computed; None before the first one."""
        return sum(self.recent_s) / len(self.recent_s) if self.recent_s else None

    @property
    def remaining_s(self) -> float | None:
        """If all that is left is computed at that pace."""
        return None if self.seconds_each is None else self.seconds_each * (self.total - self.done)

    def __str__(self) -> str:
        text = f"{self.done} of {self.total}"
        if self.seconds_each is None or self.remaining_s is None:
            return text
        text += f", {self.seconds_each:.2f} s each"
        return f"{text}, {_duration(self.remaining_s)} left" if self.done < self.total else text


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
