"""A run of an Airflow DAG, as Airflow's REST API, its execution API and its database tell it, and the states of runs.

No module of Airflow is imported: all three use the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval

# States of a run that waits or is in progress.
UNFINISHED = ("queued", "running")
# States of a task whose try ended with an error.
FAILED = ("failed", "up_for_retry")


@dataclass(frozen=True, slots=True, kw_only=True)
class DagRun:
    """A run of a DAG.

    Attributes:
        run_id: Id of the run.
        state: State of the run, such as `success`.
        run_type: Kind of the run: `scheduled`, `manual`, `backfill` or `asset_triggered`.
        clear_number: Number of times that the run was cleared.
        logical_date: Logical date of the run; None if it has none.
        start: Start of the data interval; None if the run has no data interval.
        end: End of the data interval; None if the run has no data interval.
        due: Time at which the run may begin.
        queued: Time at which the run began to wait for its turn; None if it is not known.
        began: Start of the run; None before it.
        ended: End of the run; None before it.
    """

    run_id: str
    state: str
    run_type: str = "scheduled"
    clear_number: int = 0
    logical_date: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    due: datetime | None = None
    queued: datetime | None = None
    began: datetime | None = None
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


R = TypeVar("R", bound=DagRun)


def read_run(of: type[R], said: Any) -> R:
    """Return a run that Airflow describes by an object, or by a mapping with ISO 8601 times as its REST API does."""

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
