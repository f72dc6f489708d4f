"""Compute the timeline of a run: for each try of a task, how long it waited for what, and how long it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from state_backend.values.airflow_runs import DagRun, TaskTry
from state_backend.values.frozen import frozen

Kind = Literal["pause", "scheduler", "queue", "wait", "ran", "failed"]
# The colour of each of Cairn's tasks: n stands for the class `p<n>` of the style sheet. Other tasks have `_OTHER`.
_COLOURS = {"process": 0, "checkpoint": 2, "validate": 3, "savepoint": 4, "sweep": 6}
_OTHER = 8
_WAITS: dict[Kind, str] = {
    "pause": "between tries",
    "scheduler": "waiting for the scheduler",
    "queue": "in the queue",
    "wait": "waiting without a worker slot",
}


class Part(NamedTuple):
    kind: Kind
    at: float
    share: float


class Line(NamedTuple):
    of: TaskTry
    colour: int
    parts: tuple[Part, ...]
    # Seconds by kind. A value is None if its start or end has not happened yet, or if Airflow has not recorded it.
    #   pause      from the end of the task's previous try until the scheduler found that this try may run. A first try,
    #              also after a clear, has no such key
    #   scheduler  from the time at which the try could run until the scheduler queued it. For a first try, that time is
    #              the end of the last task that ended before the try, or the start of the run
    #   queue      in the executor's queue
    #   wait       since a task was deferred, while it is deferred; later this time is a part of `ran`
    #   ran        from start to end, or until now; also of a try that failed
    seconds: Mapping[Kind, float | None]


@frozen
class Timeline:
    lines: tuple[Line, ...]
    # Seconds from the time at which the run was queued until its start; None if it is not known.
    turn: float | None
    # Seconds from the run's start to its end, or until now; None before the start.
    whole: float | None
    # (words, colour, seconds) for each task and each kind of waiting. The colour is None for waiting, else the number n
    # of the class `p<n>`.
    totals: tuple[tuple[str, int | None, float], ...]


def timeline_of(run: DagRun, tries: Sequence[TaskTry], now: datetime) -> Timeline:
    ordered = sorted(tries, key=lambda t: (_first(t) is None, _first(t) or now, t.task_id, t.try_number))
    firsts = [at for one in ordered if (at := _first(one)) is not None]
    began = run.began or min(firsts, default=now)
    # A try may seem to end after its run, because the run's end is by the scheduler's clock, the try's by the worker's.
    latest = max((t.ended for t in tries if t.ended is not None), default=began)
    until = max(run.ended or (now if run.unfinished else latest), latest)
    lines = tuple(_line(one, ordered, began, until, now) for one in ordered)
    return Timeline(
        lines=lines,
        turn=_between(run.queued, run.began),
        whole=_between(run.began, run.ended or (now if run.unfinished else None)),
        totals=tuple(_totals(lines)),
    )


def _first(one: TaskTry) -> datetime | None:
    return min((t for t in (one.scheduled, one.queued, one.began) if t is not None), default=None)


def _waits(
    one: TaskTry, tries: Sequence[TaskTry], began: datetime
) -> list[tuple[Kind, datetime | None, datetime | None]]:
    """Return (kind, start, end) of each wait before the try `one` began. A time is None if Airflow lacks it."""
    # A deferred task is queued again when its trigger fires, but keeps its first start time. A queue time after that
    # start is left out: this second time in the queue is a part of `ran`.
    queued = one.queued if one.queued is None or one.began is None or one.queued <= one.began else None
    given, at = queued or one.scheduled, _first(one)
    before = [t for t in tries if t is not one and t.ended is not None and at is not None and t.ended <= at]
    same = [t for t in before if (t.task_id, t.map_index) == (one.task_id, one.map_index)]
    if same:
        last = max(same, key=lambda t: t.try_number)
        waits: list[tuple[Kind, datetime | None, datetime | None]] = [
            ("scheduler", one.scheduled, given),
            ("queue", queued, one.began),
        ]
        retried = last.most_retries == one.most_retries
        return [("pause", last.ended, one.scheduled), *waits] if retried else waits
    ready = max([began, *(t.ended for t in before if t.ended is not None)]) if at is not None else None
    return [("scheduler", ready, given), ("queue", queued, one.began)]


def _line(one: TaskTry, tries: Sequence[TaskTry], began: datetime, until: datetime, now: datetime) -> Line:
    waits = one.waits_since if one.state == "deferred" else None
    ended = waits or one.ended or (now if one.state in ("running", "deferred") else None)
    marks = [*_waits(one, tries, began), ("ran", one.began, ended if one.began is not None else None)]
    marks += [("wait", waits, now)] if waits is not None else []
    seconds = {kind: _between(start, end) for kind, start, end in marks}
    whole, cleared = (until - began).total_seconds(), one.ended is not None and one.ended <= began
    parts = tuple(
        Part(
            "failed" if one.failed and kind == "ran" else kind,
            _share(start - began, whole),
            _share(end - max(start, began), whole),
        )
        for kind, start, end in marks
        if start is not None and end is not None and seconds[kind] and not cleared
    )
    return Line(one, _COLOURS.get(one.task_id, _OTHER), parts, seconds)


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())


def _share(span: timedelta, whole: float) -> float:
    return min(1.0, max(0.0, span.total_seconds() / whole)) if whole > 0 else 0.0


def _totals(lines: Sequence[Line]) -> Iterator[tuple[str, int | None, float]]:
    tasks = {line.of.task_id: line.colour for line in lines}
    for task_id, colour in tasks.items():
        yield task_id, colour, sum(line.seconds["ran"] or 0.0 for line in lines if line.of.task_id == task_id)
    for kind, words in _WAITS.items():
        if seconds := sum(line.seconds.get(kind) or 0.0 for line in lines):
            yield words, None, seconds
