"""Values that Airflow's database has about a DAG: its schedule, its runs, and the tries of a run's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval

UNFINISHED = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of a DAG, as Airflow reports it."""

    paused: bool
    # The latest end of a data interval among the DAG's runs, in whatever state; None without runs.
    asked_end: datetime | None
    # When Airflow should create the next run; None if the schedule has no further run.
    next_due: datetime | None
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of a DAG."""

    run_id: str
    state: str
    # Start of the data interval; None if the run has no data interval.
    start: datetime | None
    # End of the data interval; None if the run has no data interval.
    end: datetime | None
    due: datetime | None
    # Time at which the run began to wait for its turn; None if it is not known.
    queued: datetime | None = None
    # Start of the run; None before it.
    began: datetime | None = None
    # End of the run; None before it.
    ended: datetime | None = None

    @property
    def interval(self) -> Interval | None:
        """Return the data interval; None if the run has none."""
        if self.start is None or self.end is None:
            return None
        try:
            return Interval(self.start, self.end)
        except UsageError:  # An empty interval, or an end with a fraction of a millisecond: the run is of no pipeline.
            return None

    @property
    def unfinished(self) -> bool:
        """Return True if the run waits or is in progress."""
        return self.state in UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTry:
    """One try of a task of a run."""

    task_id: str
    map_index: int = -1
    try_number: int
    # Airflow's state of the try; None before Airflow has scheduled it.
    state: str | None
    # Time at which the scheduler found that the task may run; None before it.
    scheduled: datetime | None = None
    # Time at which the scheduler gave the task to the executor; None before it.
    queued: datetime | None = None
    # Start of the try; None before it.
    began: datetime | None
    # End of the try; None before it.
    ended: datetime | None
    # The reason that the retry policy gave for another try; None without one.
    retry_reason: str | None = None

    @property
    def failed(self) -> bool:
        """Return True if the try ended with an error."""
        return self.state in ("failed", "up_for_retry")
