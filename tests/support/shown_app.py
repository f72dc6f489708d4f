"""The pages' application by itself: the real routes and templates over folders of this machine, and in Airflow's place a few answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

from airflow.api_fastapi.core_api import security
from fastapi import FastAPI, HTTPException, Request

from cairn_ui import access as rights
from cairn_ui import airflow_database as airflow_side
from cairn_ui import data_docs_routes as docs_routes
from cairn_ui import database_runs, routes, shown_page
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Reader
from state_backend.ports.storage import Storage
from state_backend.values.airflow_runs import DagRun, DagSchedule, TaskTry
from tests.support.checkpoints import day
from tests.support.shown_pipelines import run_id


@dataclass(frozen=True, slots=True)
class AuthManager:
    """Lets everybody read all DAGs but those that are ``refused`` to them."""

    refused: Mapping[str, str]

    def is_authorized_view(self, *, access_view: Any, user: Any) -> bool:
        return bool(user.name != "nobody")

    def is_authorized_configuration(self, *, method: str, user: Any) -> bool:
        return bool(user.name == "admin")

    def is_authorized_dag(self, *, method: str, details: Any, user: Any, access_entity: Any = None) -> bool:
        return self.refused.get(user.name) != details.id


def user_of(request: Request) -> Any:
    """Who the cookie says; 401 without one."""
    name = request.cookies.get("_token")
    if name is None:
        raise HTTPException(401, "Not authenticated")
    return SimpleNamespace(name=name)


@contextmanager
def shown_app(
    storages: Mapping[str, Storage], refs: list[PipelineRef], *, refused: Mapping[str, str], running: int = 0
) -> Iterator[FastAPI]:
    """Mounted where Airflow mounts it. ``storages``: by the pipeline's name; who asks for another one never gets an answer."""
    dags = SimpleNamespace(pipelines=lambda: refs)
    schedule = DagSchedule(paused=False, asked_end=day(9).end, next_due=None, running=running)
    run = DagRun(
        run_id=run_id(9),
        state="success",
        start=day(9).start,
        end=day(9).end,
        due=day(9).end,
        queued=day(10).start - timedelta(seconds=10),
        began=day(10).start,
        ended=day(10).start + timedelta(seconds=90),
    )
    tries = tuple(
        TaskTry(task_id=name, state=state, try_number=n, began=at, ended=at + timedelta(seconds=20))
        for name, n, state, at in (
            ("process", 1, "failed", day(10).start),
            ("process", 2, "success", day(10).start + timedelta(seconds=25)),
            ("checkpoint", 1, "success", day(10).start + timedelta(seconds=50)),
        )
    )
    manager = AuthManager(refused)
    whole = FastAPI()
    whole.mount(shown_page.URL_PREFIX, routes.app)
    whole.mount("/cairn/docs", docs_routes.app)
    with (
        mock.patch.object(shown_page, "reader", Reader(lambda ref: storages[ref.name])),
        mock.patch.object(shown_page, "dags", dags),
        mock.patch.object(rights, "get_auth_manager", lambda: manager),
        mock.patch.object(security, "get_auth_manager", lambda: manager),
        mock.patch.object(rights, "DagModel", SimpleNamespace(get_team_name=lambda _: None)),
        mock.patch.object(airflow_side, "schedules_of", lambda ids: dict.fromkeys(ids, schedule)),
        mock.patch.object(airflow_side, "last_savepoint", lambda *_: {"checkpoint": 3, "savepoint": "file:///s/3"}),
        mock.patch.object(database_runs, "runs_there", lambda _, run_ids: {*run_ids} - {run_id(8)}),
        mock.patch.object(database_runs, "last_runs", lambda ids, _: dict.fromkeys(ids, (run,))),
        mock.patch.object(database_runs, "runs_after", lambda *_: (run,)),
        mock.patch.object(database_runs, "failing_tasks", lambda _: {}),
        mock.patch.object(database_runs, "scheduled_by_assets", lambda: ({"cairn://rides": ["report", "secret"]}, {})),
        mock.patch.object(shown_page.reasons, "reason", lambda *_: "AirflowException: <killed>"),
        mock.patch.object(airflow_side, "airflow_url", lambda _: "http://127.0.0.1:8081"),
        mock.patch.object(database_runs, "run_of", lambda _, run_id: run if run_id == run.run_id else None),
        mock.patch.object(database_runs, "tries_of", lambda *_: tries),
        mock.patch.dict(routes.app.dependency_overrides, {security.get_user: user_of}),
        mock.patch.dict(docs_routes.app.dependency_overrides, {security.get_user: user_of}),
    ):
        yield whole
