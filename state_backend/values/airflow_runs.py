"""Runs, tries, schedules and states of Airflow DAGs, without an import of Airflow.

Airflow's REST API, its API for tasks and its database give these fields the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.human_units import span
from state_backend.values.intervals import Interval

UNFINISHED = ("queued", "running")  # states of a run
FAILED = ("failed", "up_for_retry")  # states of a task


@frozen
class DagRun:
    run_id: str
    state: str
    # "scheduled", "manual", "backfill" or another run type of Airflow.
    run_type: str = "scheduled"
    clear_number: int = 0  # how many times the run was cleared
    logical_date: datetime | None = None
    # Start and end of the run's data interval; None if the run has no data interval.
    start: datetime | None = None
    end: datetime | None = None
    # Earliest time at which the run may begin.
    due: datetime | None = None
    # Time at which the run began to wait for its turn; None if it is not known.
    queued: datetime | None = None
    # Time at which the run began; None if it has not begun.
    began: datetime | None = None
    # Time at which the run ended; None if it has not ended.
    ended: datetime | None = None

    @property
    def interval(self) -> Interval | None:
        if self.start is None or self.end is None:
            return None
        try:
            return Interval(self.start, self.end)
        except UsageError:  # An empty interval, or a fraction of a millisecond: this is no pipeline's run.
            return None

    @property
    def unfinished(self) -> bool:
        return self.state in UNFINISHED


@frozen
class DagSchedule:
    paused: bool
    # The latest end of a data interval among the DAG's runs, whatever their states; None without runs.
    asked_end: datetime | None
    # When Airflow should create the next run; None if the schedule has no further run.
    next_due: datetime | None
    # Number of runs that wait or are in progress.
    running: int
    # Ids of the active runs with a task that waits in the triggerer.
    waiting: frozenset[str] = frozenset()


@frozen
class TaskTry:
    task_id: str
    map_index: int = -1
    try_number: int
    # Airflow's state of the try; None before Airflow has scheduled it.
    state: str | None
    # Time at which the scheduler found that the task may run; None if it has not found so yet.
    scheduled: datetime | None = None
    # Time at which the scheduler gave the task to the executor; None if it has not done so yet.
    queued: datetime | None = None
    # Time at which the try began; None if it has not begun.
    began: datetime | None
    # Time at which the try ended; None if it has not ended.
    ended: datetime | None
    # The reason that the retry policy gave for another try; None without one.
    retry_reason: str | None = None
    # What a deferred task waits for, in the words of its log; None if the task is not deferred.
    waits: str | None = None
    # Time since which a deferred task waits; None if the task is not deferred.
    waits_since: datetime | None = None
    # Number of retries that Airflow allows in all. A clear raises the number, and a retry does not.
    most_retries: int | None = None

    @property
    def failed(self) -> bool:
        return self.state in FAILED


@frozen
class FailingTask:
    """A task of an unfinished run whose last try failed, and which Airflow tries again."""

    dag_id: str
    run_id: str
    # The run's data interval; None if it has none.
    interval: Interval | None
    task_id: str
    # The number of the try that failed.
    try_number: int
    # The most tries that Airflow makes.
    tries: int
    ended: datetime | None

    def words(self, now: datetime) -> str:
        """Return a clause such as "try 2 of 4 of task process failed 40 s ago", with the run's interval."""
        ago = "" if self.ended is None else f" {span((now - self.ended).total_seconds())} ago"
        of = "" if self.interval is None else f" of {self.interval}"
        return f"try {self.try_number} of {self.tries} of task {self.task_id}{of} failed{ago}"


R = TypeVar("R", bound=DagRun)


def read_run(of: type[R], said: Any) -> R:
    """Return an Airflow run as an instance of `of`. `said`: a run object of Airflow, or its JSON from the REST API."""

    def get(name: str) -> Any:
        return said.get(name) if isinstance(said, Mapping) else getattr(said, name, None)

    def at(name: str) -> datetime | None:
        return datetime.fromisoformat(found) if isinstance(found := get(name), str) else found

    def word(name: str) -> str:
        return str(getattr(get(name), "value", get(name)))

    return of(
        run_id=get("dag_run_id") or get("run_id"),
        state=word("state"),
        run_type=word("run_type"),
        clear_number=get("clear_number") or 0,
        logical_date=at("logical_date"),
        start=at("data_interval_start"),
        end=at("data_interval_end"),
        due=at("run_after"),
        queued=at("queued_at"),
        began=at("start_date"),
        ended=at("end_date"),
    )
