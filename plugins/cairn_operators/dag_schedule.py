"""Read the schedule of a DAG from its timetable."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def schedule_of_dag(dag: Any) -> dict[str, Any] | None:
    """Return the schedule of a DAG as JSON values, as `state_backend.values.schedule.encode` writes them.

    The result is None for a timetable whose intervals neither a cron expression nor a timedelta describes: assets, manual
    runs only, a relativedelta, or a class of the user's own.

    Args:
        dag: The DAG of a running task.
    """
    from state_backend.values.schedule import Cron, Every, encode

    timetable: Any = getattr(dag, "timetable", None)
    kind = type(timetable).__name__
    if kind == "CronDataIntervalTimetable":
        zone = timetable.timezone
        return encode(Cron(timetable.expression, zone if isinstance(zone, str) else zone.name))
    if kind == "DeltaDataIntervalTimetable" and isinstance(timetable.delta, timedelta):
        return encode(Every(timetable.delta // timedelta(milliseconds=1)))
    return None
