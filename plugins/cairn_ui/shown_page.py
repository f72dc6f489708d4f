"""What the pages share: the readers and their caches, and the values that each template needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, TypeVar

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import requires_access_view
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, Response

from cairn_operators.data_docs_link import docs_root
from cairn_ui import airflow_database, database_runs, next_steps
from cairn_ui.access import Asks, Rights
from cairn_ui.data_docs import of_checkpoints
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Look, NotAnswered, Reader, Reading
from cairn_ui.render_template import HEADERS, render
from state_backend.checkpoint.log import Log
from state_backend.ports.storage import Storage
from state_backend.values.airflow_runs import DagSchedule
from state_backend.values.errors import CairnError

URL_PREFIX = "/cairn/checkpoints"
T = TypeVar("T")

# Every route of a page asks for the right to use the website before it reads anything.
router = APIRouter(
    default_response_class=HTMLResponse, dependencies=[Depends(requires_access_view(AccessView.WEBSITE))]
)
reader = Reader(airflow_database.open_folder)
dags = airflow_database.DagsInDatabase()
reasons = database_runs.Reasons()


def base_of(request: Request) -> str:
    """Return the path at which Airflow serves this application, including the prefix of a proxy."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def page_of(request: Request, template: str, **values: Any) -> Response:
    values = {"base": base_of(request), "ui": airflow_database.ui_prefix(), "now": datetime.now(UTC), **values}
    return HTMLResponse(render(template, **values), headers=HEADERS)


def written_ms(ref: PipelineRef, log: Log, ids: Collection[int]) -> Mapping[int, int]:
    """Return commit times in ms since the epoch, by checkpoint id.

    If the storage fails or does not answer in time, the result is empty. The page then shows everything but the times.
    """
    try:
        return reader.written(ref, log, ids)
    except (CairnError, NotAnswered):
        return {}


def find_ref(rights: Rights, key: str) -> PipelineRef:
    ref = next((r for r in dags.pipelines() if r.key == key), None)
    if ref is None or not rights.may_read(ref):
        raise HTTPException(404, "This pipeline does not exist, or you may not read its DAG")
    return ref


class PipelinePage:
    """The data of a request for a page of a pipeline: the user's rights, the pipeline, and the last reading."""

    def __init__(self, request: Request, rights: Rights, ref: PipelineRef, look: Look) -> None:
        self.request, self.rights, self.look = request, rights, look
        newest = look.reading.log.newest if look.reading is not None else None
        self.ref = ref if ref.code or newest is None else replace(ref, code=newest.content.code)
        self.airflow = airflow_database.airflow_url(str(request.base_url.replace(path="")))

    @cached_property
    def schedule(self) -> DagSchedule | None:
        dag_id = self.ref.dag_id
        return None if dag_id is None else airflow_database.schedules_of({dag_id}).get(dag_id)

    @cached_property
    def docs(self) -> Mapping[int, str]:
        """The paths of the pipeline's pages of Data Docs, by checkpoint id."""
        return of_checkpoints(docs_root(), self.ref.name)

    def ask(self, what: str, work: Callable[[Storage], T]) -> T:
        """Return the result of `work`, run in a thread with a time limit. Calls with the same `what` share it."""
        return reader.ask(self.ref, what, work)

    def runs_there(self, rows: Iterable[Mapping[str, Any]]) -> set[str]:
        """Return the ids of the runs in `rows` that Airflow still has. A page links only to these runs."""
        return database_runs.runs_there(self.ref.dag_id, {row["run"]["run_id"] for row in rows if row["run"]})

    def show(self, template: str, make: Callable[[Reading], Any] | None = None, **values: Any) -> Response:
        """Render `template` with `values`, and with what `make` returns for the reading (None: nothing) as `view`."""
        view, problem, reading = None, self.look.problem, self.look.reading
        if make is not None and reading is not None:
            try:
                view = make(reading)
            except (CairnError, NotAnswered) as error:
                problem = str(error)
        return page_of(
            self.request,
            template,
            ref=self.ref,
            look=self.look,
            view=view,
            problem=problem,
            read=None if reading is None else datetime.fromtimestamp(reading.read_s, UTC),
            after_failed_read=next_steps.after_failed_read(self.ref),
            without_checkpoint=next_steps.without_checkpoint(self.ref, self.schedule),
            running=problem is not None or (self.schedule is not None and bool(self.schedule.running)),
            **values,
        )


def _pipeline_page(request: Request, rights: Asks, key: str) -> PipelinePage:
    ref = find_ref(rights, key)
    return PipelinePage(request, rights, ref, reader.look(ref))


Shown = Annotated[PipelinePage, Depends(_pipeline_page)]
Number = Annotated[int | None, Query(ge=1)]
