"""Read from Airflow's database: serialized DAGs, their schedules, and results of savepoint tasks."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from typing import Any

from airflow.configuration import conf
from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.dagrun import DagRun
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from sqlalchemy import func, select

from cairn_operators.storage_connection import storage_credentials
from cairn_ui.pipelines_of_dags import PipelineRef, all_pipelines
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.ports.storage import Storage
from state_backend.values.airflow_runs import UNFINISHED, DagSchedule


class DagsInDatabase:
    """A cache of the serialized DAGs in Airflow's database, from which it finds the pipelines.

    A DAG is read again only when it has changed. DAGs that Airflow marks as stale, because their files are missing, are
    left out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Any, Mapping[str, Any]]] = {}

    def pipelines(self) -> list[PipelineRef]:
        """Return the pipelines of all DAGs, and those that only the setting CAIRN_UI_PIPELINES lists.

        The result does not depend on the user. So the caller must check which pipelines the user may read.
        """
        with self._lock:
            self._read()
            dags = [(dag_id, data) for dag_id, (_, data) in sorted(self._known.items())]
        return all_pipelines(dags, configured_setting())

    def _read(self) -> None:
        with create_session() as session:
            newest = (
                select(DagVersion.dag_id, func.max(DagVersion.version_number).label("number"))
                .group_by(DagVersion.dag_id)
                .subquery()
            )
            rows = session.execute(
                select(SerializedDagModel.dag_id, SerializedDagModel.id, SerializedDagModel.dag_hash)
                .join(DagVersion, SerializedDagModel.dag_version_id == DagVersion.id)
                .join(newest, (newest.c.dag_id == DagVersion.dag_id) & (newest.c.number == DagVersion.version_number))
                .join(DagModel, DagModel.dag_id == SerializedDagModel.dag_id)
                .where(DagModel.is_stale.is_(False))
            ).all()
            marks = {dag_id: (id_, hash_) for dag_id, id_, hash_ in rows}
            changed = [mark[0] for dag_id, mark in marks.items() if self._known.get(dag_id, (None,))[0] != mark]
            known = {d: kept for d, kept in self._known.items() if d in marks}
            for model in session.scalars(select(SerializedDagModel).where(SerializedDagModel.id.in_(changed))):
                known[model.dag_id] = (marks[model.dag_id], _slim(model.data or {}))
        self._known = known


def _slim(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a serialized DAG without the tasks that can't be Cairn's, to save memory.

    Each of Cairn's tasks that the pages need has a template field `root`.
    """
    tasks = data.get("dag", {}).get("tasks", [])
    ours = [t for t in tasks if "root" in t.get("__var", t).get("template_fields", ())]
    return {"dag": {"tasks": ours}}


def configured_setting() -> str:
    """Return the setting that lists pipelines without a DAG: URLs of their folders, separated by white space.

    The setting is `$CAIRN_UI_PIPELINES`, else Airflow's `[cairn] ui_pipelines`, else an empty text.
    """
    from state_backend.values.environment import Variable

    return Variable.UI_PIPELINES.given or conf.get("cairn", "ui_pipelines", fallback="") or ""


def schedules_of(dag_ids: Collection[str]) -> dict[str, DagSchedule]:
    found = {}
    with create_session() as session:
        last = (
            select(DagRun.dag_id, func.max(DagRun.data_interval_end).label("end"))
            .where(DagRun.dag_id.in_(dag_ids), DagRun.data_interval_end > DagRun.data_interval_start)
            .group_by(DagRun.dag_id)
            .subquery()
        )
        ends = {row.dag_id: row.end for row in session.execute(select(last.c.dag_id, last.c.end))}
        active = session.execute(
            select(DagRun.dag_id, func.count())
            .where(DagRun.dag_id.in_(dag_ids), DagRun.state.in_(UNFINISHED))
            .group_by(DagRun.dag_id)
        ).all()
        running = {dag_id: int(number) for dag_id, number in active}
        deferred = select(TaskInstance.dag_id, TaskInstance.run_id)
        waiting: dict[str, set[str]] = {}
        for row in session.execute(deferred.where(TaskInstance.dag_id.in_(dag_ids), TaskInstance.state == "deferred")):
            waiting.setdefault(row.dag_id, set()).add(row.run_id)
        for model in session.scalars(select(DagModel).where(DagModel.dag_id.in_(dag_ids))):
            found[model.dag_id] = DagSchedule(
                paused=bool(model.is_paused),
                asked_end=ends.get(model.dag_id),
                next_due=model.next_dagrun_create_after,
                running=running.get(model.dag_id, 0),
                waiting=frozenset(waiting.get(model.dag_id, ())),
            )
    return found


def last_savepoint(dag_id: str, task_id: str) -> dict[str, Any] | None:
    with create_session() as session:
        xcom = session.execute(
            select(XComModel.value, XComModel.run_id)
            .where(XComModel.dag_id == dag_id, XComModel.task_id == task_id, XComModel.key == "return_value")
            .order_by(XComModel.timestamp.desc())
            .limit(1)
        ).first()
    if xcom is None:
        return None
    value = json_object(xcom.value)
    return None if value is None else {**value, "run_id": xcom.run_id}


def json_object(value: Any) -> dict[str, Any] | None:
    """Return an XCom's value, an object or its JSON text as the database stores it; None if it is another value.

    Airflow's own function is not used. It creates an instance of any class that the JSON names. So the author of a task
    could run code inside the API server.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) and "__classname__" not in value else None


def airflow_url(request_url: str) -> str:
    """Return the URL of this Airflow: the setting `[api] base_url`, else `request_url`, without a slash at the end."""
    return (conf.get("api", "base_url", fallback="") or request_url).rstrip("/")


def ui_prefix() -> str:
    """Return the path of `[api] base_url`, with which all URLs of Airflow's pages begin: empty, or e.g. `/airflow`."""
    from urllib.parse import urlsplit

    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")


def open_folder(ref: PipelineRef) -> Storage:
    """Return the storage of a pipeline's folder, opened with the identity in the DAG's connection.

    Secrets of the connection pass through a temporary file, which is deleted before the function returns.
    """
    return open_url(ref, join_url(ref.root, ref.name))


def open_url(ref: PipelineRef, url: str) -> Storage:
    with storage_credentials(ref.storage_conn_id) as environment:
        return open_storage(url, credentials=environment)
