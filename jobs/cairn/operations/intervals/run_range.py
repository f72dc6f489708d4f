"""Carry out `RunRange`: decide which intervals it names, and run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, timedelta
from typing import Any

from cairn.operations.intervals.plan_range import boundaries_of, intervals_between, named_intervals
from cairn.operations.intervals.run_intervals import Outcome, plan_intervals, run_intervals
from cairn.operations.place import Place
from cairn.pipeline import Interval, Pipeline
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_newest
from state_backend.checkpoint.trials import check_no_trial
from state_backend.values.day_or_instant import first_instant, format_duration
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant
from state_backend.values.operation_parameters import RunRange
from state_backend.values.schedule import Schedule, interval_from, next_interval, no_boundary


def run_range(request: RunRange, place: Place) -> dict[str, Any]:
    """Process and commit the request's intervals. A dry run only says which ones would be computed.

    Return the outcomes of the intervals as JSON values. `dropped`: Retention has dropped the last checkpoint.
    """
    check_no_trial(request.root, "run")
    pipeline = place.load(request)
    storage = locate(request.root, pipeline.name).storage
    intervals = intervals_of(request, pipeline, read_newest(storage))
    place.tell_plan(intervals)
    permissions = request.permissions
    if request.replace_overlapping:
        permissions = replace(permissions, replace_overlapping=True)
    how: dict[str, Any] = {
        "reprocess": "all" if request.last is None else request.reprocess,
        "run": request.run,
    }
    # A dry run needs Spark only to ask the source whether its input changed.
    spark = place.connect(pipeline, "run") if not request.dry_run or how["reprocess"] == "changed" else None
    if request.dry_run or spark is None:
        outcomes = plan_intervals(spark, pipeline, intervals, request.root, **how)
        for one in outcomes:
            what = "would be computed" if one.computed else f"keeps checkpoint {one.checkpoint}"
            place.say(f"{one.interval}: {what}: {one.why}")
        computed = sum(one.computed for one in outcomes)
        place.say(f"{computed} of {len(outcomes)} intervals would be computed; nothing was written")
        return describe_outcomes(outcomes)
    how |= {"permissions": permissions, "on_outcome": place.on_outcome}
    said = describe_outcomes(run_intervals(spark, pipeline, intervals, request.root, request.mode, **how))
    return said | {"dropped": said["checkpoint"] not in read_newest(storage).retained}


def describe_outcomes(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    computed = sum(outcome.computed for outcome in outcomes)
    return {
        "intervals": [
            {
                "start": format_instant(one.interval.start),
                "end": format_instant(one.interval.end),
                "computed": one.computed,
                "checkpoint": one.checkpoint,
                "why": one.why,
            }
            for one in outcomes
        ],
        "computed": computed,
        "kept": len(outcomes) - computed,
        "checkpoint": outcomes[-1].checkpoint,
    }


def intervals_of(request: RunRange, pipeline: Pipeline, log: Log) -> tuple[Interval, ...]:
    """Return the intervals that a request names: from `first` up to `last`, or `count` intervals from `first` on.

    Without `first`, they follow the newest committed interval, or begin at the pipeline's start if there is none.
    """
    if request.last is not None:
        if request.first is None or request.count != 1:
            raise UsageError("--to needs --from, the start of the first interval; leave out --count")
        return named_intervals(request.first, request.last, boundaries_of(pipeline, log, request.every))
    completed = sorted({kept.interval for kept in log.kept})
    newest = max(completed, key=lambda i: i.end, default=None)
    schedule = None if request.every is not None else pipeline.declared_schedule or log.schedule
    if schedule is not None:
        return _of_schedule(request, schedule, pipeline, newest)
    lengths = [i.end - i.start for i in completed[-2:]]
    if len({*lengths}) > 1 and request.every is None:
        raise UsageError(
            f"{request.code} declares no schedule, and its last two intervals have the lengths {lengths[0]} and {lengths[1]}: Cairn can't tell "
            "how long the next one is\n"
            "Declare the schedule, as in Pipeline(schedule='0 6 * * 1-5'). Or give the length of the next interval: "
            f"--every {format_duration(lengths[-1])}"
        )
    length = request.every or boundaries_of(pipeline, log, None)
    assert isinstance(length, timedelta)
    if newest is not None and request.first is None and length not in (*lengths, newest.end - newest.start):
        # Refuse: for a source that reads the file of the interval's start, daily intervals after hourly ones would
        # silently skip 23 of 24 files.
        raise UsageError(
            f"{pipeline.name}: --every {length} differs from the length of its newest interval, {newest}\n"
            f"To continue with intervals of {newest.end - newest.start}, leave out --every\n"
            f"To change the length from now on, add --from {format_instant(newest.end)}"
        )
    if request.first is not None:
        at = first_instant("from", request.first, UTC)
    else:
        at = newest.end if newest is not None else pipeline.start
    return intervals_between(at, at + request.count * length, length)


def _of_schedule(
    request: RunRange, schedule: Schedule, pipeline: Pipeline, newest: Interval | None
) -> tuple[Interval, ...]:
    if request.first is None and newest is not None:
        one = next_interval(schedule, newest)
    else:
        at = pipeline.start if request.first is None else first_instant("from", request.first, schedule.rules)
        begins = interval_from(schedule, at)
        if begins is None:
            raise UsageError(
                f"{no_boundary(schedule, at)}\nFor an interval outside of the schedule, give its length too: --every"
            )
        one = begins
    row = [one]
    while len(row) < request.count:
        row.append(next_interval(schedule, row[-1]))
    return tuple(row)
