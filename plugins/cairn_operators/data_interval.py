"""Read the data interval of a run, and decide whether a task that runs only after some intervals is due.

A sweep, savepoint or validation task may get a time span such as 7 days. The task is then due only after the intervals
in which a whole number of these spans after the DAG's start date ends.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cairn_operators.airflow_versions import (
    TIMETABLES,
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    setting_of,
)


def data_interval(context: Any) -> tuple[datetime, datetime]:
    start, end = context.get("data_interval_start"), context.get("data_interval_end")
    if start is None or end is None or not start < end:
        timetable = getattr(context.get("dag"), "timetable", None)
        if start is not None and start == end and type(timetable).__name__ == "CronDataIntervalTimetable":
            raise AirflowFailException(
                f"this run's data interval has no length ({start}): Airflow gives such an interval to a manual run after a change of "
                f"clocks that skips the local time of the DAG's schedule.\n{_last_before(context, start)}"
            )
        if start is not None and start == end and timetable is not None:
            raise AirflowFailException(
                f"this run's data interval has no length ({start}), because the DAG's schedule is a {type(timetable).__name__}. "
                "Cairn keeps state per interval.\n"
                f"Give the DAG schedule={_suggestion(timetable)} (from {TIMETABLES}). Or set [scheduler] create_cron_data_intervals "
                "(for a timedelta: create_delta_data_intervals) to True in airflow.cfg, which changes all DAGs. Only "
                'stateful_pipeline takes "@daily" as it is. Then backfill the days that you want'
            )
        from state_backend.values.airflow_commands import backfill_command
        from state_backend.values.errors import Rerun

        first = plain(context["dag"].start_date)
        raise AirflowFailException(
            f"this run has no data interval (start {start}, end {end}), but Cairn keeps state per interval.\n"
            "Trigger the run with a logical date, or backfill the intervals that you want. This command runs only the DAG's first "
            f"interval:\n{backfill_command(context['dag_run'].dag_id, Rerun(first=first, last=first))}"
        )
    return start, end


def check_ended(context: Any, end: datetime) -> None:
    """Raise an Airflow exception if a run's data interval ends in the future, since its input is then not complete.

    Airflow gives such an interval to a manual run in the hour that clocks repeat, to a backfill up to today, and to a
    scheduled run if the clock of its database is ahead. Except for a manual run, an `end` up to a minute ahead is
    accepted, since clocks differ.
    """
    own, ends, now = getattr(context["dag_run"], "run_type", None), plain(end), datetime.now(tz=UTC)
    if str(getattr(own, "value", own)) == "manual" and ends > now:
        raise AirflowFailException(
            f"this run's data interval ends at {ends.isoformat()}, which is still to come, so its input is not complete. The "
            f"scheduled run processes this interval after its end.\n{_last_before(context, context['data_interval_start'])}"
        )
    if ends > now + timedelta(minutes=1):
        raise AirflowException(
            f"this run's data interval ends at {ends.isoformat()}, but this host's clock says {now.isoformat(timespec='seconds')}, so its "
            "input is not complete. Airflow tries again. A backfill up to today begins too early. A scheduled run begins too early "
            "only if the clock of Airflow's database is ahead, or this host's clock is behind: correct the wrong clock"
        )


def _last_before(context: Any, end: datetime) -> str:
    """Return a sentence that names the scheduled interval that ends at an instant, and the command that runs it."""
    from cairn_operators.dag_schedule import schedule_of_dag
    from state_backend.values.airflow_commands import backfill_command
    from state_backend.values.errors import Rerun
    from state_backend.values.schedule import decode, interval_before

    schedule = schedule_of_dag(context.get("dag"))
    last = None if schedule is None else interval_before(decode(schedule), plain(end))
    if last is None:
        return "Run the intervals that you want with cairn backfill"
    again = Rerun(first=last.start, last=last.start)
    return f"The last interval before is {last}. This command runs it:\n{backfill_command(context['dag_run'].dag_id, again)}"


def _suggestion(timetable: Any) -> str:
    expression, delta = setting_of(timetable, "expression"), setting_of(timetable, "delta")
    if expression is not None:
        return f'CronDataIntervalTimetable("{expression}", timezone="{setting_of(timetable, "timezone") or "UTC"}")'
    return (
        f"DeltaDataIntervalTimetable({delta!r})"
        if delta is not None
        else 'CronDataIntervalTimetable("@daily", timezone="UTC")'
    )


def is_due(begin: datetime, end: datetime, start: datetime, every: timedelta) -> bool:
    """Return True if a multiple of `every` has passed since `start` at some time after `begin` and not after `end`.

    The time does not count from the last run. So a re-run of an old interval gets the same answer as its first run.
    """
    return (end - start) // every > max((begin - start) // every, 0)


def is_due_in(context: Any, every: timedelta | None) -> bool:
    """Return True if the start date plus a multiple of `every` is in the data interval, or at its end.

    With a cron schedule, the clocks of its zone count: seven days end at midnight in summer and in winter. The
    result is True if there is no `every`, no start date, or no data interval, as in `backfill_pipeline`.
    """
    from cairn_operators.dag_schedule import schedule_of_dag
    from state_backend.values.schedule import Cron, decode

    if every is None or (dag := context["dag"]).start_date is None:
        return True
    if (begins := context.get("data_interval_start")) is None or not begins < context["data_interval_end"]:
        return True
    own = schedule_of_dag(dag)
    schedule = decode(own) if own is not None else None
    zone = schedule.rules if isinstance(schedule, Cron) else UTC
    instants = (begins, context["data_interval_end"], dag.start_date)
    begin, end, start = (plain(instant).astimezone(zone).replace(tzinfo=None) for instant in instants)
    return is_due(begin, end, start, every)


def skip_unless_due(context: Any, cadence: timedelta | None, what: str) -> None:
    if not is_due_in(context, cadence):
        end = data_interval(context)[1].isoformat()
        raise AirflowSkipException(f"{what} every {cadence}; none is due at {end}")


def plain(instant: datetime) -> datetime:
    """Convert Airflow's pendulum datetime to a plain `datetime`, so that the difference of two supports `%`."""
    return datetime.fromisoformat(instant.isoformat())
