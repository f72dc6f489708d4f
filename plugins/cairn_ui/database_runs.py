"""Read from Airflow's database: runs, tries of tasks, and the DAGs that assets schedule. Read logs of tries."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from airflow.models.asset import AssetModel, DagScheduleAssetReference, TaskOutletAssetReference
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun as Row
from airflow.models.log import Log
from airflow.models.taskinstance import TaskInstance
from airflow.models.taskinstancehistory import TaskInstanceHistory
from airflow.utils.log.log_reader import TaskLogReader
from airflow.utils.session import create_session
from sqlalchemy import or_, select
from sqlalchemy.orm import joinedload

from cairn_operators.airflow_versions import has
from cairn_ui.try_reason import LogLine, reason_of
from state_backend.values.airflow_runs import FAILED, UNFINISHED, DagRun, FailingTask, TaskTry, read_run
from state_backend.values.intervals import from_ms

_log = logging.getLogger("cairn")

# Largest number of tries, of references between DAGs and assets, and of lines of a log that one page reads.
_TRIES, _REFERENCES, _LINES = 500, 10_000, 200_000
# Events of the scheduler that end a try without a message in the try's own log.
_ENDINGS = ("state mismatch", "heartbeat timeout", "stuck in queued tries exceeded", "fail task")
# States of tries that have not begun or never will. Their rows may have the times of the try before.
_NOT_BEGUN = (None, "scheduled", "queued", "upstream_failed", "removed")


def _runs(asked: Any) -> tuple[DagRun, ...]:
    with create_session() as session:
        return tuple(read_run(DagRun, row) for row in session.scalars(asked))


def run_of(dag_id: str, run_id: str) -> DagRun | None:
    return next(iter(_runs(select(Row).where(Row.dag_id == dag_id, Row.run_id == run_id))), None)


def runs_there(dag_id: str | None, run_ids: Collection[str]) -> set[str]:
    """Return those of `run_ids` that Airflow's database has for the DAG; empty without a DAG.

    The run of a checkpoint is not in the database if a person deleted it, or if `cairn run` made the checkpoint.
    """
    if dag_id is None or not run_ids:
        return set()
    with create_session() as session:
        return set(session.scalars(select(Row.run_id).where(Row.dag_id == dag_id, Row.run_id.in_(run_ids))))


def last_runs(dag_ids: Collection[str], most: int) -> dict[str, tuple[DagRun, ...]]:
    """Return the newest runs of each DAG, at most `most`, oldest first. Runs without a logical date are left out.

    Each DAG gets its own query, so that the database can use its index of DAG and logical date, also for many runs.
    """
    dated = Row.logical_date.is_not(None)
    return {
        dag_id: _runs(select(Row).where(Row.dag_id == dag_id, dated).order_by(Row.logical_date.desc()).limit(most))[
            ::-1
        ]
        for dag_id in dag_ids
    }


def runs_after(dag_id: str, start: datetime | None, most: int) -> tuple[DagRun, ...]:
    """Return the first `most` runs of a DAG whose data interval begins at or after `start` (None: all), by time."""
    asked = select(Row).where(Row.dag_id == dag_id, Row.logical_date.is_not(None))
    if start is not None:  # The logical date, which is never before the interval's start, has an index: a fast query.
        asked = asked.where(Row.logical_date >= start, Row.data_interval_start >= start)
    return _runs(asked.order_by(Row.logical_date).limit(most))


def failing_tasks(dag_ids: Collection[str]) -> dict[str, list[FailingTask]]:
    """Return the tasks of unfinished runs whose last try failed, by DAG id, in the order of their runs; at most 500.

    A try that failed before a person cleared the task does not count.
    """
    tried = or_(TaskInstance.state.in_(FAILED), TaskInstance.try_number > 1)
    asked = (
        select(TaskInstance, Row)
        .join(Row, (Row.dag_id == TaskInstance.dag_id) & (Row.run_id == TaskInstance.run_id))
        .where(TaskInstance.dag_id.in_(dag_ids), Row.state.in_(UNFINISHED), tried)
        .where(or_(TaskInstance.state.is_(None), TaskInstance.state != "success"))
        .order_by(Row.logical_date, TaskInstance.task_id)
        .limit(_TRIES)
    )
    found: dict[str, list[FailingTask]] = {}
    with create_session() as session:
        for task, run in session.execute(asked).all():
            last = task if task.state in FAILED else _try_before(session, task)
            if last is not None:
                failing = FailingTask(
                    dag_id=task.dag_id,
                    run_id=task.run_id,
                    interval=read_run(DagRun, run).interval,
                    task_id=task.task_id,
                    try_number=last.try_number,
                    tries=last.max_tries + 1,
                    ended=last.end_date,
                )
                found.setdefault(task.dag_id, []).append(failing)
    return found


def _try_before(session: Any, task: Any) -> Any:
    """Return the row of the failed try that the task's present try repeats; None if a person cleared the task since."""
    key = {"dag_id": task.dag_id, "run_id": task.run_id, "task_id": task.task_id, "map_index": task.map_index}
    before = select(TaskInstanceHistory).filter_by(**key, try_number=task.try_number - 1, max_tries=task.max_tries)
    return session.scalar(before.where(TaskInstanceHistory.state.in_(FAILED)))


def tries_of(dag_id: str, run_id: str) -> tuple[TaskTry, ...]:
    """Return the tries of a run's tasks, by task id and number: at most 500 earlier ones, and 500 latest ones."""
    found: dict[tuple[str, int, int], TaskTry] = {}
    with create_session() as session:
        for table in (TaskInstanceHistory, TaskInstance):
            rows = session.scalars(select(table).where(table.dag_id == dag_id, table.run_id == run_id).limit(_TRIES))
            # While a task waits for its next try, both tables have the failed try, so it gets only one key.
            found |= {(row.task_id, row.map_index, row.try_number): _try(row) for row in rows}
    return tuple(found[key] for key in sorted(found))


def _try(row: Any) -> TaskTry:
    state = str(row.state) if row.state else None
    begun = state not in _NOT_BEGUN
    kept = _kept_for_later(row) if state == "deferred" else {}
    return TaskTry(
        task_id=row.task_id,
        map_index=row.map_index,
        try_number=row.try_number,
        state=state,
        scheduled=row.scheduled_dttm if state is not None else None,
        queued=row.queued_dttm if begun or state == "queued" else None,
        began=row.start_date if begun else None,
        ended=row.end_date if begun else None,
        retry_reason=row.retry_reason if begun and has("retry reason") else None,
        waits=kept.get("waits"),
        waits_since=from_ms(kept["since_ms"]) if "since_ms" in kept else None,
        most_retries=row.max_tries,
    )


def _kept_for_later(row: Any) -> dict[str, Any]:
    """Return the arguments that Airflow stores with a deferred task (`row`) for the method that resumes it."""
    kept = row.next_kwargs if isinstance(row.next_kwargs, dict) else {}
    plain: dict[str, Any] = kept.get("__var", kept)  # Airflow 3.1 wraps the arguments in `__var`.
    return plain


def scheduled_by_assets() -> tuple[Mapping[str, Collection[str]], Mapping[str, Collection[str]]]:
    """Return (scheduled, writes): DAG ids by the URI of the asset that schedules them, and asset URIs by DAG id.

    DAGs that Airflow marks as stale, because their files are missing, are left out.
    """
    scheduled: dict[str, set[str]] = {}
    writes: dict[str, set[str]] = {}
    for uri, dag_id in _references(DagScheduleAssetReference):
        scheduled.setdefault(uri, set()).add(dag_id)
    for uri, dag_id in _references(TaskOutletAssetReference):
        writes.setdefault(dag_id, set()).add(uri)
    return scheduled, writes


def _references(table: Any) -> list[tuple[str, str]]:
    """Return (asset URI, DAG id) of each row in `table`, which tells which DAGs use which assets; at most 10,000."""
    with create_session() as session:
        rows = session.execute(
            select(AssetModel.uri, table.dag_id)
            .join(AssetModel, AssetModel.id == table.asset_id)
            .join(DagModel, DagModel.dag_id == table.dag_id)
            .where(DagModel.is_stale.is_(False))
            .limit(_REFERENCES)
        )
        # Airflow stores `cairn://rides` as `cairn://rides/`.
        return [(uri.rstrip("/"), dag_id) for uri, dag_id in rows]


class Reasons:
    """A cache of the reasons why tries failed. Several threads may use it at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, TaskTry], str] = {}

    def reason(self, dag_id: str, run_id: str, one: TaskTry) -> str | None:
        """Return in one line why the try `one` failed; None if neither its log nor the database has a reason."""
        key = (dag_id, run_id, one)
        if (known := self._known.get(key)) is not None:
            return known
        found = _reason(dag_id, run_id, one)
        if found is not None:  # None is not cached: some workers upload the log only at the end of the task.
            if len(self._known) >= 1000:
                self._known.clear()
            self._known[key] = found
        return found


def _reason(dag_id: str, run_id: str, one: TaskTry) -> str | None:
    key = {"dag_id": dag_id, "task_id": one.task_id, "run_id": run_id, "map_index": one.map_index}
    key |= {"try_number": one.try_number}
    with create_session() as session:
        ended = select(Log.extra).filter_by(**key).where(Log.event.in_(_ENDINGS)).order_by(Log.id).limit(20)
        events = [event for event in session.scalars(ended) if event]
        for table in (TaskInstanceHistory, TaskInstance):
            row = session.scalar(select(table).filter_by(**key).options(joinedload(table.dag_run)))
            if row is not None:
                return reason_of(_lines(row, one.try_number), events, one.retry_reason)
    return None


def _lines(row: Any, try_number: int) -> Iterator[LogLine]:
    """Yield the messages of a try's log. If an error ends the read, yield those before it. `row`: The task instance."""
    reader: Any = TaskLogReader()
    if not reader.supports_read:
        return
    try:
        stream, _ = reader.read_log_chunks(row, try_number, {"download_logs": True})
        for message in islice(stream, _LINES):
            more = message.model_extra or {}
            yield LogLine(
                level=more.get("level"),
                text=message.event,
                errors=tuple(_errors(more.get("error_detail"))),
                signal=more.get("signal_name"),
            )
    except Exception:  # A configured log handler may raise anything. The page then shows only the scheduler's events.
        _log.exception("the log of %s, try %d, can't be read for a page", row.task_id, try_number)


def _errors(detail: Any) -> Iterator[tuple[str, str]]:
    for error in detail if isinstance(detail, list) else ():
        if isinstance(error, dict):
            yield str(error.get("exc_type") or ""), str(error.get("exc_value") or "")
