"""The error message if a pipeline without a checkpoint runs an interval that is not its first one."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from cairn.pipeline import Interval, Pipeline
from state_backend.values.errors import StateGapError
from state_backend.values.intervals import format_instant
from state_backend.values.schedule import Cron, Every, Schedule, count_between, interval_from

_LONGER = ("@hourly", "@daily", "@weekly", "@monthly")
# The message proposes longer intervals only if more than this number of intervals are missing.
_MANY = 100


def with_choices(error: StateGapError, pipeline: Pipeline, interval: Interval, *, newest_first: bool) -> StateGapError:
    """Return a copy of `error` with a message for the user that lists what to do; `error` itself if it has no `rerun`.

    The pipeline has no checkpoint. `newest_first`: True if Airflow chose the newest interval, as the DAG's catchup is
    off.
    """
    if error.rerun is None:
        return error
    first, last = error.rerun.first, error.rerun.last
    schedule = pipeline.declared_schedule or Every(interval.end_ms - interval.start_ms)
    missing, exact = count_between(schedule, first, last)
    many = f"{_number(missing, exact)} {'interval' if missing == 1 else 'intervals'}"
    why = "Airflow ran the newest interval first, because the DAG's catchup is off. " if newest_first else ""
    lines = [
        f"{pipeline.name} {interval}: this is not the pipeline's first interval, and the pipeline has no checkpoint.",
        f"{why}The first interval starts at {format_instant(first)}, {many} earlier. Nothing was committed. Choose:",
        f"- Begin with this interval: in the Pipeline set start={_as_code(interval.start, pipeline.start)}, and set the "
        "DAG's start_date to the same time. Then clear this task.",
    ]
    longer = _longer(schedule, first, last) if missing > _MANY else []
    if longer:
        lines.append(
            f"- Begin at {format_instant(first)} with longer intervals, if the source can read them: set {' or '.join(longer)} in the "
            "DAG, and in the Pipeline if it declares a schedule. Then run the command below."
        )
    lines.append(f"- Keep start and schedule: run all {many} in order, then clear this task. Command:")
    return StateGapError("\n".join(lines), rerun=error.rerun)


def _longer(schedule: Schedule, first: datetime, last: datetime) -> list[str]:
    """Return longer schedules that a message proposes, as texts such as `schedule="@daily" (12 intervals)`.

    They are presets with an interval that begins at `first`, and with at most half as many intervals as `schedule`.
    """
    zone = schedule.zone if isinstance(schedule, Cron) else "UTC"
    most = count_between(schedule, first, last)[0] // 2
    found = []
    for preset in _LONGER:
        cron = Cron(preset, zone)
        count, exact = count_between(cron, first, last)
        if count <= most and interval_from(cron, first) is not None:
            found.append(f'schedule="{preset}" ({_number(count, exact)} intervals)')
    return found


def _number(count: int, exact: bool) -> str:
    return f"{count:,}" if exact else f"about {float(f'{count:.2g}'):,.0f}"


def _as_code(at: datetime, start: datetime) -> str:
    """Return `at` as Python code, in the zone of `start` (the pipeline's start), or in UTC if this zone has no name."""
    if isinstance(start.tzinfo, ZoneInfo) and start.tzinfo.key != "UTC":
        zone, local = f'ZoneInfo("{start.tzinfo.key}")', at.astimezone(start.tzinfo)
    else:
        zone, local = "UTC", at.astimezone(UTC)
    fields = [local.year, local.month, local.day, local.hour, local.minute, local.second]
    while len(fields) > 3 and fields[-1] == 0:
        fields.pop()
    return f"datetime({', '.join(map(str, fields))}, tzinfo={zone})"
