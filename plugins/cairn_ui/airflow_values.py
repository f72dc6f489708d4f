"""Values that Airflow's database has about a DAG: its schedule, and the tries of a run's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from state_backend.values.airflow_runs import FAILED


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
        return self.state in FAILED
