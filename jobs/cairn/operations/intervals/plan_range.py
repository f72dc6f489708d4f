"""Decide which intervals of a range are computed, and which keep their committed results.

`run_intervals` uses these pure functions. They decide from the results that the log records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from cairn.operations.intervals.what_changed import MadeOf, made_of, what_changed
from state_backend.checkpoint.interval_results import Result
from state_backend.values.day_or_instant import first_instant, last_instant
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import RunRef
from state_backend.values.schedule import Schedule, starting_between

if TYPE_CHECKING:
    from cairn.pipeline import Pipeline
    from state_backend.checkpoint.log import Log

Reprocess = Literal["changed", "none", "all"]
REPROCESS: tuple[str, ...] = get_args(Reprocess)

_RECENT = 20


@frozen
class Keep:
    """Decision: the interval keeps its committed result."""

    checkpoint: int
    why: str


@frozen
class Compute:
    why: str


@frozen
class AskSource:
    """Decision: ask the source for its position, since the log alone can't tell whether the interval keeps its result.

    From the position, `run_intervals` computes the input hash that a new result would have. `plan_by_input` compares
    this hash with the recorded hash.
    """


def keep_or_compute(there: Result | None, reprocess: Reprocess, run: RunRef) -> Keep | Compute | AskSource:
    """Decide if an interval keeps its result `there` (None: it has none). `AskSource`: The log alone can't tell."""
    if there is None:
        return Compute(why="the interval has no result yet")
    if there.spoilt is not None:
        return Compute(why=f"checkpoint {there.id} is not valid: {there.spoilt}")
    if (there.run.run_id, there.run.clear_number) == (run.run_id, run.clear_number):
        return Keep(checkpoint=there.id, why="an earlier try of this run has committed it")
    if reprocess == "all":
        return Compute(why=f"checkpoint {there.id} is computed again, as requested")
    if reprocess == "none":
        return Keep(checkpoint=there.id, why="the interval has a result, and only missing results are requested")
    return AskSource()


def plan_by_input(there: Result, now: MadeOf) -> Keep | Compute:
    """Keep the valid result `there` if a new one (`now`) would have its input hash; else compute the interval again."""
    if there.input_hash is None or now.input_hash is None:
        untold = "the source records no position" if now.input_hash is None else "the source recorded no position then"
        return Compute(why=f"Cairn can't tell whether checkpoint {there.id} had the same code and input: {untold}")
    if there.input_hash == now.input_hash:
        return Keep(checkpoint=there.id, why="code and input are the same")
    if there.content is None:
        which = "other code, other settings or other input; only its hash remains, so Cairn can't tell which"
    else:
        which = "; ".join(what_changed(made_of(there.content), now))
    return Compute(why=f"checkpoint {there.id} had {which}")


def boundaries_of(pipeline: Pipeline, log: Log, every: timedelta | None) -> Schedule | timedelta:
    """Return the rule by which a range is cut into intervals: a schedule, or a length.

    The rule is `every`, else the schedule that the pipeline declares, else the schedule in the newest checkpoint, else
    the length of the newest interval. Raise `UsageError` if none of these exists.
    """
    rule = every or pipeline.declared_schedule or log.schedule
    if rule is not None:
        return rule
    newest = max((kept.interval for kept in log.kept), key=lambda i: i.end, default=None)
    if newest is None:
        raise UsageError(
            f"pipeline {pipeline.name!r} has no checkpoint and declares no schedule, so Cairn can't tell how long an interval is\n"
            "Declare the schedule, as in Pipeline(schedule='@daily'). Or give the length of an interval with `every`, as in --every 1d"
        )
    return newest.end - newest.start


def named_intervals(first: str, last: str, rule: Schedule | timedelta) -> tuple[Interval, ...]:
    """Return the intervals that start from `first` to `last`, which are texts of a day or an instant.

    With a schedule, a day means all intervals that begin on that day in the schedule's zone. With a length, a day means
    the interval that begins with the day in UTC.
    """
    zone = UTC if isinstance(rule, timedelta) else rule.rules
    begins = first_instant("from", first, zone)
    ends = (first_instant if isinstance(rule, timedelta) else last_instant)("to", last, zone)
    if ends < begins:
        raise UsageError(
            f"from {first} is after to {last}; from is the start of the first interval, to of the last one"
        )
    if isinstance(rule, timedelta):
        return intervals_between(begins, ends + rule, rule)
    found = tuple(starting_between(rule, begins, ends))
    if not found:
        raise UsageError(f"no interval of the schedule ({rule}) begins from {first} to {last}")
    return found


def intervals_between(first: datetime, end: datetime, length: timedelta) -> tuple[Interval, ...]:
    if length <= timedelta(0) or end <= first:
        raise UsageError(
            f"there is no interval from {format_instant(first)} to {format_instant(end)}: the end must be after the start"
        )
    count, rest = divmod(end - first, length)
    if rest:
        raise UsageError(
            f"from {format_instant(first)} to {format_instant(end)} is not a whole number of intervals of {length}; the last interval would end "
            f"at {format_instant(first + (count + 1) * length)}"
        )
    return tuple(Interval(first + n * length, first + (n + 1) * length) for n in range(count))


def check_in_order(intervals: Sequence[Interval]) -> None:
    for before, after in pairwise(intervals):
        if before.end != after.start:
            raise UsageError(
                f"{after} does not start where {before} ends; give the intervals of a range in order and without gaps"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a range.

    Attributes:
        done: Number of intervals that are finished.
        total: Number of all intervals.
        kept: Number of finished intervals that kept their result.
        recent_s: Seconds of each of the last 20 intervals that were computed.
    """

    done: int
    total: int
    kept: int
    recent_s: tuple[float, ...]

    def count_computed(self, seconds: float) -> Progress:
        recent = (*self.recent_s, seconds)[-_RECENT:]
        return Progress(done=self.done + 1, total=self.total, kept=self.kept, recent_s=recent)

    def count_kept(self) -> Progress:
        return Progress(done=self.done + 1, total=self.total, kept=self.kept + 1, recent_s=self.recent_s)

    @property
    def seconds_each(self) -> float | None:
        """Mean duration of the last computed intervals in seconds; None before the first is computed."""
        return sum(self.recent_s) / len(self.recent_s) if self.recent_s else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the end if all other intervals take the mean duration; None before the first is computed."""
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
