"""The schedule of a DAG: choose the timetable of a new DAG, and read the schedule from a timetable."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pendulum

from cairn_operators.airflow_versions import CronDataIntervalTimetable, DeltaDataIntervalTimetable, setting_of
from cairn_operators.pipeline_source import declared_schedule

if TYPE_CHECKING:
    from state_backend.values.schedule import Schedule

_NOT_CRON = ("@once", "@continuous")


def with_data_intervals(schedule: Any, start_date: datetime) -> Any:
    """Return a timetable with data intervals for a cron text (zone of `start_date`) or a timedelta; else `schedule`."""
    if isinstance(schedule, str) and schedule not in _NOT_CRON:
        return CronDataIntervalTimetable(schedule, timezone=pendulum.instance(start_date).timezone)
    return DeltaDataIntervalTimetable(schedule) if isinstance(schedule, timedelta) else schedule


def timetable_of_pipeline(dag_id: str, code: str) -> Any:
    """Return the timetable of the schedule that the `Pipeline` at `code` declares. Raise `ValueError` without one."""
    from state_backend.values.errors import UsageError
    from state_backend.values.schedule import Cron

    try:
        declared = declared_schedule(code)
    except (ValueError, UsageError) as error:
        raise ValueError(f"DAG {dag_id} has no schedule: {error}. Give stateful_pipeline(…, schedule=…)") from None
    if declared is None:
        raise ValueError(
            f'DAG {dag_id} has no schedule: {code} declares none. Give stateful_pipeline(…, schedule="@daily"), '
            'or declare Pipeline(…, schedule="@daily")'
        )
    if isinstance(declared, Cron):
        return CronDataIntervalTimetable(declared.expression, timezone=declared.zone)
    return DeltaDataIntervalTimetable(declared.length)


def check_same_schedule(dag: Any, code: str) -> None:
    """Raise `ValueError` if a DAG has another schedule than its `Pipeline` declares.

    The check is skipped if the source of the pipeline's module does not show a schedule. The task `process` repeats the
    check with the imported pipeline.
    """
    from state_backend.values.errors import UsageError
    from state_backend.values.schedule import are_same, decode

    own = schedule_of_dag(dag)
    try:
        declared = declared_schedule(code) if own is not None else None
    except (ValueError, UsageError):
        return
    if own is None or declared is None:
        return
    schedule: Schedule = decode(own)
    if not are_same(schedule, declared):
        raise ValueError(
            f"DAG {dag.dag_id} has the schedule {schedule}, but {code} declares {declared}. "
            "Leave out schedule= in stateful_pipeline, or make both the same"
        )


def schedule_of_dag(dag: Any) -> dict[str, Any] | None:
    """Return the schedule of a DAG as JSON values, as `state_backend.values.schedule.encode` writes them.

    The result is None for a timetable whose intervals neither a cron expression nor a timedelta describes: assets,
    manual runs only, a relativedelta, or a class of the user's own.
    """
    from state_backend.values.schedule import Cron, Every, encode

    timetable: Any = getattr(dag, "timetable", None)
    kind = type(timetable).__name__
    if kind == "CronDataIntervalTimetable":
        zone = setting_of(timetable, "timezone")
        return encode(Cron(setting_of(timetable, "expression"), zone if isinstance(zone, str) else zone.name))
    if kind == "DeltaDataIntervalTimetable" and isinstance(delta := setting_of(timetable, "delta"), timedelta):
        return encode(Every(delta // timedelta(milliseconds=1)))
    return None
