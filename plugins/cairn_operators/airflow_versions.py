"""What differs between the versions of Airflow that Cairn runs with. No other module asks for a version of Airflow.

`DIFFERENCES` says since when Airflow has something, and what a user of an older Airflow has instead. The names below
the table are the same on every version.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from airflow import __version__

from state_backend.values.frozen import frozen


def minor(version: str) -> tuple[int, int]:
    """Return major and minor number of a version, such as (3, 2) for `3.2.2rc1`."""
    first, second, *_ = version.split(".")
    return int(first), int(second)


VERSION = minor(__version__)


@frozen
class Difference:
    since: tuple[int, int]
    # What an older Airflow does instead, for a task's log and the docs; None if only the name of a module differs.
    instead: str | None = None


DIFFERENCES = {
    # Before 3.2, `AirflowFailException` and others were in `airflow.exceptions`, `conf` in `airflow.configuration`.
    "airflow.sdk.exceptions": Difference(since=(3, 2)),
    "airflow.sdk.configuration": Difference(since=(3, 2)),
    # Before 3.2, timetables were only in `airflow.timetables`. They are still there, with other attribute names.
    "timetables in airflow.sdk": Difference(
        since=(3, 2), instead="a DAG file imports `CronDataIntervalTimetable` from `airflow.timetables.interval`"
    ),
    "deadlines in airflow.sdk": Difference(
        since=(3, 2), instead="a DAG file imports `DeadlineAlert` from `airflow.sdk.definitions.deadline`"
    ),
    # Before 3.2 the metrics were in `airflow.stats`, and before 3.3 they were methods of a class.
    "airflow.sdk.observability": Difference(since=(3, 2)),
    "metrics as functions": Difference(since=(3, 3)),
    # Before 3.2, the argument `retry_exponential_backoff` was a bool: True makes each pause twice as long.
    "factor of pauses": Difference(
        since=(3, 2),
        instead="the first pause is 15 to 30 s, and each further one about twice as long, up to 10 minutes",
    ),
    "retry policy": Difference(
        since=(3, 3),
        instead="on 3.2, the first pause is 5 to 10 s, and each further one about three times as long, up to 10 minutes. An exception of your processor is "
        "retried with these pauses too, and after a clear the pauses do not begin again",
    ),
    "form of a connection": Difference(
        since=(3, 2),
        instead="the form of a Spark connection has only Airflow's fields: write `conf` and `use_ssl` into Extra",
    ),
    # Before 3.2, the execution API answered with status 500 if the run had no start date: a queued run, or a run that
    # was queued when a person marked it as failed.
    "query of a queued run": Difference(
        since=(3, 2),
        instead="`process` may fail while a manual run of the interval before is queued: clear it after that run",
    ),
    # Before Airflow 3.2, a clear incremented `clear_number` only for ended runs.
    "clear number of an active run": Difference(
        since=(3, 2),
        instead="mark the run as failed before you clear it. Otherwise a cleared range or restore repeats nothing, and the next run does not wait",
    ),
    # Airflow has this since 3.2.2, but `since` has only two numbers. So 3.2.2 counts as an Airflow without it.
    "conf for runs that exist": Difference(
        since=(3, 3),
        instead="before 3.2.2, a backfill gives options such as `--replace-overlapping` only to runs that it creates: first delete the runs of its dates in "
        "Airflow's UI",
    ),
    "task state store": Difference(
        since=(3, 3),
        instead="nothing is kept between tries: each retry of `process` computes, `restore` and `promote` ask again, and the operation of a killed driver "
        "continues on its Spark Connect server for up to 5 minutes",
    ),
    "waiting for input": Difference(
        since=(3, 3), instead="a task that waits for a person is `deferred`, and a triggerer must run"
    ),
    "retry reason": Difference(
        since=(3, 3), instead="the page of a run shows why a try failed only if it can read the try's log"
    ),
}


def has(name: str, version: tuple[int, int] = VERSION) -> bool:
    """Return True if Airflow `version` (default: the installed one) has the feature called `name` in `DIFFERENCES`."""
    return version >= DIFFERENCES[name].since


def say_lacks(log: Any, *names: str) -> None:
    """Write into `log`, for each feature in `names` that the installed Airflow lacks, its text `Difference.instead`."""
    for name in names:
        if not has(name):
            log.info("Airflow %s has no %s: %s", __version__, name, DIFFERENCES[name].instead)


if has("airflow.sdk.exceptions"):
    from airflow.sdk.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        DownstreamTasksSkipped,
    )
else:
    from airflow.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        DownstreamTasksSkipped,
    )

if has("airflow.sdk.configuration"):
    from airflow.sdk.configuration import conf
else:
    from airflow.configuration import conf

if has("metrics as functions"):
    from airflow.sdk.observability import stats
elif has("airflow.sdk.observability"):
    from airflow.sdk.observability.stats import Stats as stats  # noqa: N813
else:
    from airflow.stats import Stats as stats  # noqa: N813

# The module from which a user's DAG file imports the timetables with data intervals, for error messages.
TIMETABLES = "airflow.sdk" if has("timetables in airflow.sdk") else "airflow.timetables.interval"
if has("timetables in airflow.sdk"):
    from airflow.sdk import CronDataIntervalTimetable, DeltaDataIntervalTimetable
else:
    from airflow.timetables.interval import CronDataIntervalTimetable, DeltaDataIntervalTimetable

if has("retry policy"):
    from airflow.sdk import RetryDecision, RetryPolicy
else:
    RetryDecision = RetryPolicy = object

__all__ = [
    "TIMETABLES",
    "AirflowException",
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowSkipException",
    "CronDataIntervalTimetable",
    "DeltaDataIntervalTimetable",
    "DownstreamTasksSkipped",
    "RetryDecision",
    "RetryPolicy",
    "conf",
    "stats",
]


def setting_of(timetable: Any, name: str) -> Any:
    """Return a timetable's attribute `name`, which `airflow.timetables` calls `_name`. None if it has neither."""
    return getattr(timetable, name, getattr(timetable, f"_{name}", None))


def own_pauses(longest: timedelta, version: tuple[int, int] = VERSION) -> dict[str, Any]:
    """Return a task's retry arguments for an Airflow `version` without retry policies. Pauses grow up to `longest`.

    With a `longest` of ten minutes, seven retries take 30 to 37 minutes in all, and 25 to 36 minutes before Airflow
    3.2.
    """
    growing = {"max_retry_delay": longest}
    if has("factor of pauses", version):
        return {**growing, "retry_delay": timedelta(seconds=5), "retry_exponential_backoff": 3.0}
    return {**growing, "retry_delay": timedelta(seconds=15), "retry_exponential_backoff": True}


def wait_for_answer(
    task: Any, ti_id: Any, options: list[str], kwargs: dict[str, Any], timeout: timedelta | None
) -> NoReturn:
    """End the task's process until a person answers. Then Airflow calls the task's method `after_answer` with `kwargs`.

    `ti_id`: Id of the task instance. `options`: The possible answers. `timeout`: Longest wait; None for no limit.
    """
    if has("waiting for input"):
        from airflow.sdk.exceptions import TaskAwaitingInput

        raise TaskAwaitingInput(method_name="after_answer", kwargs=kwargs, timeout=timeout)
    from airflow.providers.standard.triggers.hitl import HITLTrigger

    until = None if timeout is None else datetime.now(UTC) + timeout
    trigger = HITLTrigger(ti_id=ti_id, options=options, params={}, timeout_datetime=until)
    task.defer(trigger=trigger, method_name="after_answer", kwargs=kwargs)
    raise AssertionError("deferring raises")
